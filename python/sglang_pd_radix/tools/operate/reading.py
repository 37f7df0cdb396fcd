"""Reads all workers of a deployment once: requests, tree, pool, bytes, failures, oldest requests."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_pd_radix.errors import PdRadixError

from ..cluster.local_http import http, status_text
from .texts import printable

# Time-out of an answer, seconds.
TIMEOUT_S = 5.0
# Time-out of a connection, which is tried before any query.
CONNECT_S = 1.5
# Errors of a worker: no answer; and, for a PD worker, an answer without requests.
SILENT = "does not answer"
UNTOLD = "does not report its requests: without this package, or with an older one"
# Suffix of DP ranks behind a worker's address, from a gateway with --dp-aware.
_RANK = re.compile(r"@\d+$")
# Valid URLs. An IPv6 address needs brackets, which separate it from the port.
_URL = re.compile(r"https?://([^/@\s]+@)?(\[[^\]/\s]+\]|[^:/@\[\]\s]+)(:(?P<port>\d+))?(/\S*)?")
# Counters of prefill, of decode and of both: our name to the metric's.
_COUNTERS = {
    "sent_bytes": "sglang:kv_transfer_sent_bytes_total",
    "saved_bytes": "sglang:kv_transfer_saved_bytes_total",
    "prompt_tokens": "sglang:decode_prompt_tokens_total",
    "held_tokens": "sglang:decode_prefix_hit_tokens_total",
    "failures": "sglang:kv_transfer_failures_total",
    "peers_lost": "sglang:kv_transfer_peers_lost_total",
}
# A rank's pool figures, in tokens.
_TOKENS = ("size", "available", "evictable", "protected")
# Errors from reading JSON that is invalid, nested too deeply, or of another structure.
_OTHER = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class _Odd(ValueError):
    """A worker reports an invalid figure. The message names it."""


@dataclass
class Rank:
    """A DP rank of a worker, or a worker without DP. ``error``: why it could not be read.

    requests: by state. pool: tokens. counters: since the worker's start, by `_COUNTERS`; empty without
    --enable-metrics. rates: per second since the last look; empty at the first. in_step_s: seconds since its scheduler
    last answered or was first queried; None unless the HTTP server answers and the scheduler, busy in a step, does not.
    """

    worker: str
    role: str = "?"
    rank: int | None = None
    flag: bool = False
    idle: bool = False
    requests: dict[str, int] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    audit: list[str] | None = None
    counters: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    error: str = ""
    in_step_s: float | None = None

    @property
    def unheard(self) -> bool:
        """Whether a retry may succeed."""
        return self.error == SILENT or self.in_step_s is not None

    @property
    def name(self) -> str:
        """Worker and rank."""
        return self.worker if self.rank is None else f"{self.worker}/{self.rank}"

    @property
    def held_part(self) -> float | None:
        """Part of recent prompt tokens that the tree held; since the start if there were none."""
        for figures in (self.rates, self.counters):
            if figures.get("prompt_tokens"):
                return figures.get("held_tokens", 0) / figures["prompt_tokens"]
        return None

    @property
    def queued(self) -> int:
        """Requests that are here and not running."""
        return sum(count for state, count in self.requests.items() if state != "running")


@dataclass
class Look:
    """All workers at one moment. oldest: the oldest requests, with their ``worker``."""

    at: float
    ranks: list[Rank]
    oldest: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ranks = [asdict(rank) | {"held_part": rank.held_part} for rank in self.ranks]
        return {"time": self.at, "workers": ranks, "oldest": self.oldest, "total": totals(self.ranks)}


def totals(ranks: Iterable[Rank]) -> dict[str, Any]:
    """Totals of counters and rates, and requests by role and state."""
    sums: dict[str, Any] = {"requests": {}, "counters": {}, "rates": {}}
    for rank in ranks:
        of_role = sums["requests"].setdefault(rank.role, {})
        for into, figures in ((of_role, rank.requests), (sums["counters"], rank.counters), (sums["rates"], rank.rates)):
            for name, value in figures.items():
                into[name] = into.get(name, 0) + value
    sums["unreachable"] = sorted(rank.worker for rank in ranks if rank.error)
    return sums


def base_url(address: str) -> str:
    """``HOST:PORT`` or a URL as a base URL. Raises PdRadixError for anything else."""
    url = (address if "//" in address else f"http://{address}").rstrip("/")
    parts = _URL.fullmatch(url)
    if parts is None or int(parts["port"] or 80) > 65535:
        raise PdRadixError(f"{address}: give HOST:PORT or http://HOST:PORT, an IPv6 address in brackets")
    return url


def addresses(urls: Sequence[str], gateway: str | None, deployment: str | None) -> list[str]:
    """The workers: named, from a gateway, or from a file of ``pd-radix up --json``.

    Raises PdRadixError if there are none.
    """
    found = [base_url(address) for address in urls]
    if gateway is not None:
        check_listening([base_url(gateway)])
        found += [worker["url"] for worker in gateway_workers(gateway)]
    if deployment is not None:
        try:
            processes = json.loads(Path(deployment).read_text(encoding="utf-8"))["processes"]
            found += [process["url"] for process in processes if process["role"] in ("prefill", "decode", "engine")]
        except (OSError, *_OTHER) as error:
            raise PdRadixError(f"{deployment} is no file of pd-radix up --json: {error}") from error
    if not found and (gateway or deployment):
        raise PdRadixError(f"{gateway or deployment} has no workers")
    if not found:
        raise PdRadixError("name workers (HOST:PORT ...), --gateway URL or --deployment FILE")
    return list(dict.fromkeys(url.rstrip("/") for url in found))


def check_listening(urls: Sequence[str]) -> None:
    """Raise PdRadixError if none of ``urls`` accepts connections."""
    with ThreadPoolExecutor(len(urls)) as pool:
        wrong = list(pool.map(unreached, urls))
    if all(wrong):
        raise PdRadixError(f"nothing listens at {urls[0]} ({wrong[0]}): start it, or correct its address")


def unreached(url: str) -> str:
    """Why the address of ``url`` does not accept connections; "" if it does."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


class Unheard(PdRadixError):
    """No answer; a retry may succeed."""


def gateway_workers(gateway: str) -> list[dict[str, Any]]:
    """A gateway's entries of its workers; DP ranks of one worker have the same ``url``.

    Raises PdRadixError on an error, `Unheard` without an answer.
    """
    url = base_url(gateway) + "/workers"
    status, content = http(url, timeout=TIMEOUT_S)
    if not status:
        said = content.decode(errors="replace")
        # A refused connection is named last.
        why = re.search(r"\[Errno -?\d+\] ([\w ]+)", said)
        raise Unheard(f"{url} does not answer: {printable(why[1] if why else said[:200])}")
    try:
        listed = json.loads(content)["workers"]
        return [worker | {"url": printable(_RANK.sub("", str(worker["url"]).rstrip("/")))} for worker in listed]
    except _OTHER as error:
        said = printable(content.decode(errors="replace")[:200])
        raise PdRadixError(f"{url} names no workers ({status_text(status)}): {said}") from error


class Reader:
    """Reads workers repeatedly; keeps the last look for the rates."""

    def __init__(self, urls: Sequence[str]):
        self.urls = urls
        self._before: dict[str, tuple[float, Mapping[str, float]]] = {}
        # By worker: time of its last answer or first query, and its last state.
        self._heard: dict[str, tuple[float, Rank]] = {}

    def look(self) -> Look:
        """Read all workers at once."""
        with ThreadPoolExecutor(len(self.urls)) as pool:
            read = list(pool.map(_read, self.urls))
        oldest: list[dict[str, Any]] = []
        ranks: list[Rank] = []
        for of_worker, requests in read:
            for rank in of_worker:
                self._hear(rank)
            ranks += of_worker
            oldest += requests
        # Only from the look before: a worker that did not answer in between may have restarted and counted past its
        # old figures.
        before, self._before = self._before, {}
        for rank in ranks:
            self._rate(rank, before.get(rank.name))
        return Look(time.time(), ranks, sorted(oldest, key=lambda request: -request["seconds"]))

    def _hear(self, rank: Rank) -> None:
        """Note an answer; for a worker with a busy scheduler, fill in its last state and how long it is busy."""
        now = time.monotonic()
        if rank.in_step_s is not None:
            at, last = self._heard.setdefault(rank.worker, (now - rank.in_step_s, rank))
            rank.role, rank.flag, rank.in_step_s = last.role, last.flag, now - at
        elif not rank.error:
            self._heard[rank.worker] = now, rank

    def _rate(self, rank: Rank, before: tuple[float, Mapping[str, float]] | None) -> None:
        now = time.monotonic()
        if before is not None and now > before[0]:
            past = {name: value - before[1].get(name, 0.0) for name, value in rank.counters.items()}
            # A restarted worker counts from 0.
            if all(value >= 0 for value in past.values()):
                rank.rates = {name: value / (now - before[0]) for name, value in past.items()}
        if rank.counters:
            self._before[rank.name] = now, rank.counters


def _read(url: str) -> tuple[list[Rank], list[dict[str, Any]]]:
    """The ranks of one worker, at least one, and its oldest requests; a rank with an error if it cannot be read."""
    worker = url.partition("//")[2]
    status, content = http(url + "/server_info", timeout=TIMEOUT_S)
    said = content.decode(errors="replace")
    try:
        info = json.loads(content) if status == 200 else None
        if info is not None and info["internal_states"]:
            return _ranks(worker, info, _counters(url))
    except _Odd as odd:
        said = str(odd)
    except _OTHER:
        # Another program, or a proxy in front of the worker.
        pass
    if not status and http(url + "/model_info", timeout=TIMEOUT_S)[0] == 200:
        # The HTTP server answers this without the scheduler.
        return [Rank(worker, in_step_s=TIMEOUT_S)], []
    said = printable(said[:80]) if status else SILENT
    return [Rank(worker, error=f"{status_text(status)}: {said}" if status else said)], []


def _ranks(
    worker: str, info: dict[str, Any], counted: Mapping[str, dict[str, float]]
) -> tuple[list[Rank], list[dict[str, Any]]]:
    """A worker's ranks and oldest requests. Raises various errors for invalid data."""
    states = info["internal_states"]
    mode = info.get("disaggregation_mode") or "?"
    if not isinstance(mode, str):
        raise _Odd(f"disaggregation_mode is {json.dumps(mode)}")
    role = "engine" if mode == "null" else mode
    # In order of their answers; older versions do not name the rank.
    pools = [state.get("kv_pool", {}) for state in states]
    for pool in pools:
        _check(pool)
    ranks, oldest = [], []
    for number, _, pool in sorted((pool.get("dp_rank", n), n, pool) for n, pool in enumerate(pools)):
        rank = Rank(
            worker,
            role,
            number if len(states) > 1 else None,
            bool(info.get("disaggregation_decode_enable_radix_cache")),
            pool.get("idle", False),
            pool.get("requests", {}),
            {name: pool[name] for name in _TOKENS if name in pool},
            pool.get("audit"),
            counted.get(str(number) if len(states) > 1 else "", {}),
        )
        if "requests" not in pool and role != "engine":
            rank.error = UNTOLD
        ranks.append(rank)
        oldest += [request | {"worker": rank.name} for request in pool.get("oldest", ()) if "seconds" in request]
    return ranks, oldest


def _is_number(value: Any) -> bool:
    # Excludes NaN and infinity.
    return isinstance(value, (int, float)) and abs(value) < 2**63


def _are_requests(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and _is_number(each.get("seconds", 0)) for each in value
    )


_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_TOKENS, _is_number),
    "dp_rank": lambda value: isinstance(value, int),
    "idle": lambda value: isinstance(value, bool),
    "requests": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "audit": lambda value: value is None or isinstance(value, list),
    "oldest": _are_requests,
}


def _check(pool: dict[str, Any]) -> None:
    """Raise _Odd for an invalid figure: a sum or sort with it would fail for all workers."""
    for name, fits in _KINDS.items():
        if name in pool and not fits(pool[name]):
            raise _Odd(f"{name} is {json.dumps(pool[name])}")


def engine_requests(url: str) -> int | None:
    """The engine's number of queued and running requests; None if unavailable.

    Requests that prefill computes or sends are not included.
    """
    status, content = http(url + "/get_load", timeout=TIMEOUT_S)
    try:
        return sum(int(rank["num_reqs"]) for rank in json.loads(content)) if status == 200 else None
    except _OTHER:
        return None


def _counters(url: str) -> dict[str, dict[str, float]]:
    """A worker's counters by DP rank label, which is empty without DP."""
    from prometheus_client.parser import text_string_to_metric_families

    status, content = http(url + "/metrics", timeout=TIMEOUT_S)
    found: dict[str, dict[str, float]] = {}
    if status != 200:
        return found
    ours = {theirs: name for name, theirs in _COUNTERS.items()}
    try:
        families = list(text_string_to_metric_families(content.decode(errors="replace")))
    except (ValueError, IndexError):
        # A page of a proxy.
        return found
    for family in families:
        for sample in family.samples:
            if sample.name in ours:
                of_rank = found.setdefault(sample.labels.get("dp_rank", ""), {})
                of_rank[ours[sample.name]] = of_rank.get(ours[sample.name], 0.0) + sample.value
    return found
