"""SIGTERM drains a worker of a pair: it takes nothing new, ends what it has, and exits with status 0.

The engine goes on taking requests after SIGTERM, and kills itself in a moment at which it has none. Here the gateways
that are named let go of the worker first. Then its HTTP server answers each new request with 503 at once, by which a
gateway that was not told may ask another pair, and the other worker is told of the half that it has been given.
`/health` answers 503 as in the engine.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import uvicorn
from sglang.srt.disaggregation.room_notes import is_room
from sglang.srt.managers import gateway_notice
from sglang.srt.managers.worker_rest import LOOK_S, is_hopeless, of_schedulers
from sglang.srt.utils import kill_process_tree

logger = logging.getLogger(__name__)

__all__ = ["CLOSE_S", "Door", "Drain", "VARIABLE", "brings_work", "drain_seconds", "rooms_of"]

VARIABLE = "SGLANG_DISAGGREGATION_DRAIN_TIMEOUT"
# Seconds for what a decode worker with the flag has, where the variable is not set.
DEFAULT_S = 300.0
# Seconds without anything left before the end, since what a peer is to be told of the last request may still be on its
# way; between two lines of the log.
QUIET_S, SAY_S = 1.0, 5.0
# Seconds for what is aborted in the end to be told so, and for connections to take what has been written to them.
ABORT_S, CLOSE_S = 5.0, 10.0
# Seconds after which a client may ask here again: a new process, if any.
RETRY_AFTER_S = 1
REASON = "this worker is shutting down and takes no new request"

# Paths under which work comes, what others begin with, and variables by which the engine names some anew.
WORK = frozenset({"/generate", "/encode", "/classify", "/invocations", "/vertex_generate"})
WORK_BELOW = ("/v1/", "/api/")
WORK_NAMED = ("AIP_PREDICT_ROUTE", "SGLANG_OLLAMA_CHAT_ROUTE", "SGLANG_OLLAMA_GENERATE_ROUTE")
# Rooms of one request that its peer is told of: as many as it may have samples.
MOST_ROOMS = 4096

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def drain_seconds(args: Any) -> float | None:
    """Seconds that this worker has for its requests after SIGTERM; None where SIGTERM is the engine's.

    Raises ValueError for a value of the variable that is none.
    """
    given = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(given) if given else None
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"{VARIABLE} is {given!r}: give seconds, or 0 for the engine's own way to end.")
    if args.disaggregation_mode == "null" or args.tokenizer_worker_num > 1:
        return None
    if seconds is None and args.disaggregation_decode_enable_radix_cache:
        return DEFAULT_S
    return seconds or None


def brings_work(scope: Message) -> bool:
    """Whether an HTTP request asks for tokens, rather than about the worker or what it has."""
    # Behind a proxy (--fastapi-root-path) the server puts before it what that has taken off.
    path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
    if scope["method"] not in ("POST", "PUT") or path.endswith("/cancel"):
        return False
    named = {os.environ.get(variable, "").rstrip("/") for variable in WORK_NAMED} - {""}
    return path in WORK or path in named or path.startswith(WORK_BELOW)


def rooms_of(body: bytes, samples: bool) -> Iterator[SimpleNamespace]:
    """The rooms of a request, with their hosts and ports; nothing of what is none.

    No more than `MOST_ROOMS`: a small body may name millions.
    samples: also the rooms of its samples, for which decode would ask prefill.
    """
    try:
        said = json.loads(body)
    except ValueError:
        return
    if not isinstance(said, dict) or said.get("bootstrap_room") in (None, []):
        return
    rooms = said["bootstrap_room"]
    rooms = rooms[:MOST_ROOMS] if isinstance(rooms, list) else [rooms]
    params = said.get("sampling_params", said)
    first = params[0] if isinstance(params, list) and params else params
    n = first.get("n", 1) if isinstance(first, dict) else 1
    if samples and isinstance(n, int) and 1 < n <= MOST_ROOMS:
        # Prefill tells its scheduler, which needs no addresses.
        rooms = rooms + list(islice(_of_samples(rooms, n), MOST_ROOMS - len(rooms) + 1))
    at = {name: said.get(name) for name in ("bootstrap_host", "bootstrap_port")}
    yield SimpleNamespace(bootstrap_room=rooms, **at, samples=0)


def _of_samples(rooms: list, n: int) -> Iterator[int]:
    """The rooms of the samples of requests of ``rooms``; without the extra `samples` they have none of their own."""
    try:
        from sglang.srt.managers.samples import sample_room
    except ImportError:
        return
    for room in filter(is_room, rooms):
        yield from (sample_room(room, i) for i in range(n))


class Door:
    """An ASGI application in front of the HTTP server's routes, which answers 503 to what would bring work.

    refused: called with the body of each of these.
    """

    def __init__(self, app: App, refused: Callable[[bytes], None]) -> None:
        self.app, self.refused = app, refused

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or let through."""
        if scope["type"] != "http" or not brings_work(scope):
            await self.app(scope, receive, send)
            return
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        try:
            self.refused(b"".join(parts))
        except Exception:
            logger.exception("Could not report a refused request to the other worker")
        error = {"message": REASON, "type": "ServiceUnavailable", "code": 503}
        headers = [
            (b"content-type", b"application/json"),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
            # What comes next on this connection might meet its end.
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


class Drain:
    """Ends the process of a worker's HTTP server after SIGTERM.

    server: uvicorn's. app: what it serves. timeout_s: for what it has. Exit status 1 says that some of it was cut off.
    """

    def __init__(self, server: uvicorn.Server, app: Any, timeout_s: float) -> None:
        self.server, self.app, self.timeout_s = server, app, timeout_s
        # The server's exchanges with work that had begun when the door was closed.
        self.inside: list[Any] = []

    @staticmethod
    def of(args: Any) -> Drain | None:
        """The drain of this process; None where SIGTERM is the engine's. Before the engine takes the signal."""
        seconds = drain_seconds(args)
        server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if seconds is None or not isinstance(server, uvicorn.Server):
            return None
        from sglang.srt.entrypoints.http_server import app

        return Drain(server, app, seconds)

    async def run(self, manager: Any) -> None:
        """Wait for SIGTERM, then for what ``manager`` has, and end the process. manager: the tokenizer manager."""
        while not manager.gracefully_exit:
            await asyncio.sleep(LOOK_S)
        until = time.monotonic() + self.timeout_s
        args = manager.server_args
        told = gateway_notice.gateways()
        if told:
            # Until they have let go, what they send is served.
            mode, key = args.disaggregation_mode, gateway_notice.key_for(args)
            await asyncio.to_thread(gateway_notice.leave_all, told, mode, args.host, args.port, key)
        self.close_door(manager)
        left = await self.wait_empty(manager, until)
        if left:
            logger.error("Shutting down: %s, and the time is up (%s): aborted", left, VARIABLE)
            manager.dump_requests_before_crash()
            manager.abort_request(abort_all=True)
            until = time.monotonic() + ABORT_S
            # A prefill's ranks tell decode of what it is sent no more.
            while await self._left(manager, until) and time.monotonic() < until:
                await asyncio.sleep(LOOK_S)
        await self.end(manager, status=1 if left else 0)

    def close_door(self, manager: Any) -> None:
        """Refuse what comes from now on."""
        prefill = manager.server_args.disaggregation_mode == "prefill"

        def refused(body: bytes) -> None:
            for part in rooms_of(body, samples=prefill):
                manager._tell_peer(part, REASON)

        cycles = (getattr(connection, "cycle", None) for connection in self.server.server_state.connections)
        self.inside = [cycle for cycle in cycles if cycle and brings_work(cycle.scope)]
        # Behind the authentication: of whom it turns away nothing is read, and nobody is told in this worker's name.
        router = self.app.router
        router.middleware_stack = Door(router.middleware_stack, refused)
        logger.info("Shutting down: no new requests are accepted; %d are running", len(manager.rid_to_state))

    async def wait_empty(self, manager: Any, until: float) -> str:
        """Wait until there has been nothing for `QUIET_S` seconds. Returns what is left at ``until``, or ""."""
        began = said = time.monotonic()
        quiet_since: float | None = None
        while True:
            left = await self._left(manager, until)
            now = time.monotonic()
            if left:
                quiet_since = None
            elif now - (quiet_since := quiet_since or now) >= QUIET_S:
                logger.info("Shutting down: everything has ended, after %.1f s", quiet_since - began)
                return ""
            if now >= until or is_hopeless(manager):
                return left or "something that ended a moment ago"
            if left and now - said >= SAY_S:
                said = now
                logger.info("Shutting down: %s", left)
            await asyncio.sleep(LOOK_S)

    async def _left(self, manager: Any, until: float) -> str:
        """What the worker still has, in words; "" for nothing."""
        if manager.rid_to_state:
            return f"{len(manager.rid_to_state)} requests are left"
        if under_way := self._under_way():
            return f"{under_way} requests are still coming, or their answers going"
        return await of_schedulers(manager, until)

    def _under_way(self) -> int:
        """Requests with which the server is not done: of one whose body is still coming, nobody else knows.

        What came to the closed door is not among them: it may come again and again.
        """
        return sum(1 for cycle in self.inside if not (cycle.response_complete or cycle.disconnected))

    async def end(self, manager: Any, status: int) -> None:
        """Have the server send what it has to send, and end this process and its children."""
        if manager._subprocess_watchdog is not None:
            # It would take the end of a child for a crash.
            await asyncio.to_thread(manager._subprocess_watchdog.stop)
        self.server.should_exit = True
        try:
            await self._wait(lambda: not self.server.server_state.connections, CLOSE_S)
            if cut := self._under_way():
                status = 1
                logger.error(
                    "Shutting down: %d clients did not read their answers in %g s: connections closed", cut, CLOSE_S
                )
        finally:
            # Also when the server is faster, and cancels this.
            logger.info("Shutting down: exit status %d", status)
            kill_process_tree(os.getpid(), include_parent=False)
            logging.shutdown()
            with suppress(OSError, ValueError):
                print(end="", flush=True)
            os._exit(status)

    @staticmethod
    async def _wait(over: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not over() and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
