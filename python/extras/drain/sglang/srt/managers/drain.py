"""SIGTERM drains a worker of a pair: it accepts no new requests, finishes running ones, and exits with status 0.

The engine continues to accept requests after SIGTERM, and kills itself once it has none. Here the worker is first
removed from the named gateways. Then its HTTP server answers new requests with 503 at once, so that a gateway that was
not notified may retry on another pair, and notifies the other worker, which has the request too. `/health` answers 503
as in the engine.

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
# Seconds for running requests of a decode worker with the flag, if the variable is not set.
DEFAULT_S = 300.0
# Idle seconds before the exit, since notifications about the last request may be in flight; seconds between log lines.
QUIET_S, SAY_S = 1.0, 5.0
# Seconds for aborted requests to end, and for connections to take their answers.
ABORT_S, CLOSE_S = 5.0, 10.0
# The Retry-After header, in seconds: a new process may have started by then.
RETRY_AFTER_S = 1
REASON = "this worker is shutting down and takes no new request"

# Paths of requests for work, their prefixes, and variables by which the engine renames some.
WORK = frozenset({"/generate", "/encode", "/classify", "/invocations", "/vertex_generate"})
WORK_BELOW = ("/v1/", "/api/")
WORK_NAMED = ("AIP_PREDICT_ROUTE", "SGLANG_OLLAMA_CHAT_ROUTE", "SGLANG_OLLAMA_GENERATE_ROUTE")
# Rooms of one request that its peer is notified of: the maximum number of samples.
MOST_ROOMS = 4096

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def drain_seconds(args: Any) -> float | None:
    """Seconds for running requests after SIGTERM; None if the engine handles SIGTERM.

    Raises ValueError for an invalid value of the variable.
    """
    given = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(given) if given else None
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"{VARIABLE} is {given!r}: give seconds, or 0 for the engine's shutdown.")
    if args.disaggregation_mode == "null" or args.tokenizer_worker_num > 1:
        return None
    if seconds is None and args.disaggregation_decode_enable_radix_cache:
        return DEFAULT_S
    return seconds or None


def brings_work(scope: Message) -> bool:
    """Whether an HTTP request asks for tokens; False for questions about the worker or running requests."""
    # Behind a proxy (--fastapi-root-path) the server restores the prefix that the proxy removed.
    path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
    if scope["method"] not in ("POST", "PUT") or path.endswith("/cancel"):
        return False
    named = {os.environ.get(variable, "").rstrip("/") for variable in WORK_NAMED} - {""}
    return path in WORK or path in named or path.startswith(WORK_BELOW)


def rooms_of(body: bytes, samples: bool) -> Iterator[SimpleNamespace]:
    """The rooms of a request, with their hosts and ports; none if the body is invalid.

    At most `MOST_ROOMS`, since a small body may name millions. samples: include the rooms of its samples, for which
    decode would ask prefill.
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
        # Only prefill includes samples. It notifies its scheduler, which needs no addresses.
        rooms = rooms + list(islice(_of_samples(rooms, n), MOST_ROOMS - len(rooms) + 1))
    at = {name: said.get(name) for name in ("bootstrap_host", "bootstrap_port")}
    yield SimpleNamespace(bootstrap_room=rooms, **at, samples=0)


def _of_samples(rooms: list, n: int) -> Iterator[int]:
    """Rooms of the samples of requests of ``rooms``; none without the extra `samples`."""
    try:
        from sglang.srt.managers.samples import sample_room
    except ImportError:
        return
    for room in filter(is_room, rooms):
        yield from (sample_room(room, i) for i in range(n))


class Door:
    """ASGI application in front of the server's routes; answers requests for work with 503.

    refused: called with the body of each refused request.
    """

    def __init__(self, app: App, refused: Callable[[bytes], None]) -> None:
        self.app, self.refused = app, refused

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer with 503, or pass the request on."""
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
            # A later request on this connection might find it closed.
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


class Drain:
    """Ends the process of a worker's HTTP server after SIGTERM.

    server: uvicorn's. app: its application. timeout_s: for running requests. Exit status 1: some were aborted.
    """

    def __init__(self, server: uvicorn.Server, app: Any, timeout_s: float) -> None:
        self.server, self.app, self.timeout_s = server, app, timeout_s
        # HTTP exchanges for work that began before new requests were refused.
        self.inside: list[Any] = []

    @staticmethod
    def of(args: Any) -> Drain | None:
        """The drain of this process; None if the engine handles SIGTERM. Call before the engine sets its handler."""
        seconds = drain_seconds(args)
        server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if seconds is None or not isinstance(server, uvicorn.Server):
            return None
        from sglang.srt.entrypoints.http_server import app

        return Drain(server, app, seconds)

    async def run(self, manager: Any) -> None:
        """Wait for SIGTERM, then for running requests, and end the process. manager: the tokenizer manager."""
        while not manager.gracefully_exit:
            await asyncio.sleep(LOOK_S)
        until = time.monotonic() + self.timeout_s
        args = manager.server_args
        told = gateway_notice.gateways()
        if told:
            # Requests are served until the gateways have removed this worker.
            mode, key = args.disaggregation_mode, gateway_notice.key_for(args)
            await asyncio.to_thread(gateway_notice.leave_all, told, mode, args.host, args.port, key)
        self.close_door(manager)
        left = await self.wait_empty(manager, until)
        if left:
            logger.error("Shutting down: %s, and the time is up (%s): aborted", left, VARIABLE)
            manager.dump_requests_before_crash()
            manager.abort_request(abort_all=True)
            until = time.monotonic() + ABORT_S
            # Prefill's ranks report aborted transfers to decode.
            while await self._left(manager, until) and time.monotonic() < until:
                await asyncio.sleep(LOOK_S)
        await self.end(manager, status=1 if left else 0)

    def close_door(self, manager: Any) -> None:
        """Refuse new requests from now on."""
        prefill = manager.server_args.disaggregation_mode == "prefill"

        def refused(body: bytes) -> None:
            for part in rooms_of(body, samples=prefill):
                manager._tell_peer(part, REASON)

        cycles = (getattr(connection, "cycle", None) for connection in self.server.server_state.connections)
        self.inside = [cycle for cycle in cycles if cycle and brings_work(cycle.scope)]
        # Behind the authentication: bodies of unauthorized clients are not read, nor reported to the peer.
        router = self.app.router
        router.middleware_stack = Door(router.middleware_stack, refused)
        logger.info("Shutting down: no new requests are accepted; %d are running", len(manager.rid_to_state))

    async def wait_empty(self, manager: Any, until: float) -> str:
        """Wait until idle for `QUIET_S` seconds. Returns what is left at ``until``, or ""."""
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
                return left or "a request that ended a moment ago"
            if left and now - said >= SAY_S:
                said = now
                logger.info("Shutting down: %s", left)
            await asyncio.sleep(LOOK_S)

    async def _left(self, manager: Any, until: float) -> str:
        """What is still running, for the log; "" if nothing."""
        if manager.rid_to_state:
            return f"{len(manager.rid_to_state)} requests are left"
        if under_way := self._under_way():
            return f"{under_way} requests are still arriving or being answered"
        return await of_schedulers(manager, until)

    def _under_way(self) -> int:
        """Requests whose HTTP exchange is not complete; only the server knows of one whose body is still arriving.

        Without those that were refused: clients may retry without end.
        """
        return sum(1 for cycle in self.inside if not (cycle.response_complete or cycle.disconnected))

    async def end(self, manager: Any, status: int) -> None:
        """Let the server finish its answers, and end this process and its children."""
        if manager._subprocess_watchdog is not None:
            # It would treat the end of a child as a crash.
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
            # Also if the server ends first and cancels this task.
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
