"""``pd-radix drain``: take a worker out of service without losing a request."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import requests

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.hosts import host_addresses, is_loopback

from .cluster.local_http import local_session, status_text
from .operate.reading import (
    SILENT,
    TIMEOUT_S,
    UNTOLD,
    Rank,
    Reader,
    Unheard,
    addresses,
    base_url,
    engine_requests,
    gateway_workers,
)
from .operate.texts import printable
from .process_group import kernel_stat, start_time
from .progress import Display

# Seconds between two looks; and seconds without requests before the end: requests that the gateway routed before may
# still be in flight.
LOOK_S, QUIET_S = 0.2, 2.0
# Seconds for the gateway to remove the worker.
LET_GO_S = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix drain``."""
    parser.description = (
        "Have the gateway send a worker nothing new, wait until it has ended what it has, and, with --pid, end it."
    )
    parser.add_argument("worker", metavar="HOST:PORT", help="a prefill or decode worker, as the gateway knows it")
    parser.add_argument("--gateway", required=True, metavar="URL", help="the gateway (smg)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for what it has, seconds (default: 300)"
    )
    parser.add_argument("--pid", type=int, metavar="PID", help="then end this process on this host, and wait for it")


def run(args: argparse.Namespace) -> int:
    """Drain the worker. Returns the exit code."""
    if not args.timeout > 0:
        raise PdRadixError(f"--timeout is {args.timeout:g}: give a number of seconds above 0")
    started = "" if args.pid is None else check_pid(args.pid)
    (url,) = addresses([args.worker], None, None)
    deadline = time.monotonic() + args.timeout
    steps = Display()
    url = as_known(args.gateway, url, deadline, steps.now)
    steps.now(f"asking {args.gateway} to send {url} nothing new")
    steps.done(leave(args.gateway, url, deadline, steps.now, ends=args.pid is not None))
    wait_empty(url, deadline, steps.now)
    steps.done(f"{url} has ended what it had")
    if args.pid is not None:
        steps.now(f"ending process {args.pid}")
        end(args.pid, started, deadline)
        steps.done(f"process {args.pid} has ended")
    return 0


def as_known(gateway: str, url: str, deadline: float, say: Callable[[str], None]) -> str:
    """The URL by which ``gateway`` knows the worker at ``url``; ``url`` if it does not know it.

    Raises PdRadixError without an answer before ``deadline``.
    """
    known = {worker["url"] for worker in _known(gateway, deadline, say)}
    if url in known:
        return url
    ours = _addresses(url)
    same = [one for one in known if _port(one) == _port(url) and ours & _listed_addresses(gateway, one)]
    return same[0] if len(same) == 1 else url


def leave(gateway: str, url: str, deadline: float, say: Callable[[str], None], ends: bool = False) -> str:
    """Have ``gateway`` remove a worker, with all its DP ranks. Returns a report.

    An unknown worker that answers has been removed before, as by a drain that timed out. ends: its process will be
    ended. Raises PdRadixError if removal fails or takes beyond ``deadline``, if it is the last worker of its kind, or
    may be known by another name.
    """
    known = _known(gateway, deadline, say)
    # DP ranks may be separate workers.
    ours = [worker for worker in known if worker["url"] == url]
    if not ours:
        if role := _role(url, deadline):
            _check_unknown(gateway, url, [one["url"] for one in known if one.get("worker_type") == role], role, ends)
            return f"{gateway} does not know {url}, which answers as a {role} worker, and sends it nothing"
        others = sorted({worker["url"] for worker in known})
        raise PdRadixError(f"{gateway} knows no worker {url}, but {', '.join(others) or 'none'}")
    nameless = [worker for worker in ours if "id" not in worker]
    if nameless:
        raise PdRadixError(f"{gateway} gives {url} no id by which it could be taken out: is that smg?")
    kind = ours[0].get("worker_type")
    if not any(worker.get("worker_type") == kind and _serves(worker) for worker in known if worker not in ours):
        raise PdRadixError(f"{url} is the last {kind} worker of {gateway}: start another one first")
    said = "confirmed the removal"
    with local_session() as session:
        for worker in ours:
            try:
                reply = session.delete(f"{base_url(gateway)}/workers/{worker['id']}", timeout=TIMEOUT_S)
            except requests.RequestException as error:
                # The list shows whether the request arrived.
                said = f"did not answer the request for removal ({error})"
                continue
            if not reply.ok:
                refused = f"{status_text(reply.status_code)} {printable(reply.text[:200])}"
                raise PdRadixError(f"{gateway} does not remove {url}: {refused}")
    began = time.monotonic()
    until = min(began + LET_GO_S, deadline)
    while any(other["url"] == url and _serves(other) for other in _known(gateway, until, say)):
        if time.monotonic() > until:
            raise PdRadixError(f"{gateway} {said} of {url}, and still uses it after {until - began:.0f} s")
        time.sleep(LOOK_S)
    return f"{gateway} sends {url} nothing new"


def _check_unknown(gateway: str, url: str, others: list[str], role: str, ends: bool) -> None:
    """Raise PdRadixError if a worker may be one of ``others``, the known ones of its role."""
    ours = _addresses(url)
    for other in others:
        theirs = _listed_addresses(gateway, other)
        # A host has several addresses; a worker may listen on one or all.
        if _port(other) == _port(url) and (not theirs or ours & theirs or (_is_here(ours) and _is_here(theirs))):
            there = "" if theirs else ", where that name is known"
            raise PdRadixError(
                f"{gateway} does not know {url}, which may be {other}: name it as the gateway does{there}"
            )
    if ends and not others:
        raise PdRadixError(
            f"{gateway} does not know {url} and lists no {role} worker, as one that was just started: "
            "drain again once it lists others, or without --pid"
        )


def _listed_addresses(gateway: str, url: str) -> set[str]:
    """The addresses of a listed worker, seen from its gateway: loopback means the gateway's host."""
    theirs = _addresses(url)
    if theirs and all(map(is_loopback, theirs)):
        at = _addresses(base_url(gateway))
        return theirs if _is_here(at) else at
    return theirs


def _addresses(url: str) -> set[str]:
    """The IP addresses of a URL's host; empty if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname or "", None)
    except (OSError, ValueError):
        return set()
    return {str(info[4][0]).partition("%")[0].removeprefix("::ffff:") for info in found}


def _port(url: str) -> int:
    """The port of a URL; 0 without a valid one."""
    try:
        parts = urlsplit(url)
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return 0


def _is_here(addresses: set[str]) -> bool:
    own = {one.partition("%")[0] for one in host_addresses()}
    return any(is_loopback(one) or one in own for one in addresses)


def _role(url: str, deadline: float) -> str:
    """The kind of PD worker at an address; "" if none answers in `LET_GO_S` seconds."""
    until = min(time.monotonic() + LET_GO_S, deadline)
    while True:
        rank = Reader([url]).look().ranks[0]
        # A busy worker answers late.
        if not rank.unheard or not _listens(url) or time.monotonic() > until:
            return rank.role if rank.role in ("prefill", "decode") else ""
        time.sleep(LOOK_S)


def _known(gateway: str, deadline: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The gateway's workers; repeats the request until ``deadline`` if it is late or starting."""
    said = ""
    while True:
        try:
            return gateway_workers(gateway)
        except Unheard as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != said:
                said = str(error)
                say(f"{said}; asked again for {deadline - time.monotonic():.0f} s more at most")
        time.sleep(LOOK_S)


def _serves(worker: dict[str, Any]) -> bool:
    """Whether the gateway may choose a worker."""
    return bool(worker.get("is_healthy", True)) and worker.get("status", "ready") != "draining"


def wait_empty(url: str, deadline: float, say: Callable[[str], None]) -> None:
    """Wait until a worker has had no request for `QUIET_S` seconds. Raises PdRadixError after ``deadline``."""
    reader, quiet_since, said = Reader([url]), None, ""
    while True:
        ranks = reader.look().ranks
        # A busy worker answers late; an ended one has no listener.
        if all(rank.error == SILENT for rank in ranks) and not _listens(url):
            raise PdRadixError(f"{url} {SILENT}")
        left = _left(ranks, url)
        now = time.monotonic()
        if left:
            quiet_since = None
            if left != said:
                said = left
                say(f"{url} has {left}")
        elif now - (quiet_since := quiet_since or now) >= QUIET_S:
            return
        if now > deadline:
            if not left:
                raise PdRadixError(f"{url} has had nothing for less than {QUIET_S:g} s: give a longer --timeout")
            raise PdRadixError(f"{url} still has {left}. It gets nothing new")
        time.sleep(LOOK_S)


def _listens(url: str) -> bool:
    """Whether something may be listening at a worker's address."""
    try:
        socket.create_connection((urlsplit(url).hostname, _port(url)), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def _left(ranks: list[Rank], url: str) -> str:
    """A worker's remaining requests, in words."""
    states: dict[str, int] = {}
    idle = True
    for rank in ranks:
        if rank.unheard:
            return "not answered yet"
        if rank.error == UNTOLD and not rank.pool:
            # The engine's count misses some requests, but the engine waits for them after SIGTERM.
            count = engine_requests(url)
            if count is None:
                return "an unknown number of requests"
            states["requests"] = count
            continue
        if rank.error and rank.error != UNTOLD:
            return f"answered {rank.error}"
        idle &= rank.idle
        for state, count in rank.requests.items():
            states[state] = states.get(state, 0) + count
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if count)
    return printable(said) or ("" if idle else "something that no queue has")


def check_pid(pid: int) -> str:
    """Start time of a process in kernel ticks, to detect a reused number.

    Raises PdRadixError if ``pid`` is no process that can be ended. 0 and below are groups or all processes.
    """
    try:
        if pid <= 1:
            raise ProcessLookupError("no process of a worker has that number")
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        raise PdRadixError(f"--pid {pid}: {error}") from error
    return start_time(pid)


def end(pid: int, started: str, deadline: float) -> None:
    """End the process ``pid`` that ``started`` then (`check_pid`), and wait for it; no-op if it has ended.

    Raises PdRadixError if it cannot be ended or does not end.
    """
    if start_time(pid) != started:
        return
    try:
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError) as error:
        raise PdRadixError(f"process {pid} cannot be ended: {error}") from error
    while _lives(pid, started):
        if time.monotonic() > deadline:
            raise PdRadixError(f"process {pid} has not ended")
        time.sleep(LOOK_S)


def _lives(pid: int, started: str) -> bool:
    # A zombie has ended.
    return start_time(pid) == started and kernel_stat(pid)[:1] not in ([], ["Z"], ["X"])
