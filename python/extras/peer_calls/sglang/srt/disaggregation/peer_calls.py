"""Messages between workers over HTTP: calls of one worker, and their receipt by a prefill's bootstrap server.

Callers do not wait: one thread of a process makes all calls over persistent connections, and an unresponsive worker
delays only its own.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from sglang.srt.disaggregation.decode_radix.hooks import Hooks
from sglang.srt.disaggregation.room_notes import MOST, is_room

logger = logging.getLogger(__name__)

__all__ = [
    "CallHooks",
    "FIELDS",
    "NotNow",
    "Unanswered",
    "add_route",
    "ask",
    "listen",
    "receive",
    "take",
    "tell",
    "unreadable",
]

# Fields of a message beside rooms, by route.
FIELDS: dict[str, dict[str, type]] = {}
# Length of a text from another worker, at most.
MOST_CHARACTERS = 1000
# Seconds for an answer; attempts to deliver a message; seconds between attempts.
ANSWER_S, TRIES, AGAIN_S = 5.0, 4, 1.0
# Connections to one worker; concurrent DNS look-ups; pending calls to all workers.
AT_ONCE, NAMES_AT_ONCE, MOST_WAITING = 16, 256, 16384


# ---- sender ----


class CallHooks:
    """A process that calls bootstrap servers. Created with its first call."""

    def signs(
        self, method: str, path: str, body: bytes
    ) -> tuple[Mapping[str, str], Callable[[str, int, bytes, Mapping[str, str]], None]]:
        """Called for each call. Returns headers for it, and a check of the answer's URL, status, content and headers,
        which raises if the answer is not authentic."""
        raise NotImplementedError


class Unanswered(Exception):
    """A worker did not answer, or its answer is unusable."""


def ask(addr: str, route: str, rooms: Sequence[int], **said: Any) -> Future[tuple[int, str]]:
    """Query the worker at ``addr`` once; the result is status and text. Fails with `Unanswered`."""
    return _calls.submit(partial(_calls.post, addr, route, _message(rooms, said)))


def tell(addr: str, route: str, rooms: Sequence[int], **said: Any) -> Future[None]:
    """Notify the worker at ``addr``, with retries; a final failure is logged.

    404 counts as delivered: a worker without this package does not need the message.
    """

    def warn(told: Future[None]) -> None:
        if not told.cancelled() and told.exception() is not None:
            of = f"room {rooms[0]}" + f" and {len(rooms) - 1} more" * (len(rooms) > 1)
            logger.warning("%s was not informed of %s (%s): %s", addr, of, route[1:], told.exception())

    told = _calls.submit(partial(_calls.tell, addr, route, _message(rooms, said)))
    told.add_done_callback(warn)
    return told


def _message(rooms: Sequence[int], said: dict[str, Any]) -> bytes:
    # Some versions before 0.1.0 read ``room``.
    return json.dumps({"room": rooms[0], "rooms": [*rooms], **said}).encode()


class _Calls:
    """Makes calls on an event loop in a thread, which starts with the first call."""

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._hooks: Hooks[CallHooks] | None = None

    def submit(self, call: Callable[[], Coroutine]) -> Future:
        # Here, because of a circular import.
        from sglang.srt.disaggregation.common.prefill_peers import in_background

        wrong = None
        with self._lock:
            if self._loop is None:
                # Not uvloop, which has few threads for DNS: a look-up without an answer blocks one for long.
                loop = asyncio.SelectorEventLoop()
                loop.set_default_executor(ThreadPoolExecutor(NAMES_AT_ONCE, "peer-names"))
                started = in_background(loop.run_forever, "peer-calls")
                wrong = str(started.exception()) if started.done() else None
                self._loop = loop if wrong is None else None
            if self._waiting >= MOST_WAITING:
                wrong = "too many calls wait for an answer"
            self._waiting += wrong is None
        if wrong is not None or self._loop is None:
            failed: Future = Future()
            failed.set_exception(Unanswered(wrong))
            return failed
        made = asyncio.run_coroutine_threadsafe(call(), self._loop)
        made.add_done_callback(self._done)
        return made

    def _done(self, made: Future) -> None:
        with self._lock:
            self._waiting -= 1

    async def tell(self, addr: str, route: str, message: bytes) -> None:
        """Post it until it is delivered or refused, or the attempts are used up."""
        for last in (*[False] * (TRIES - 1), True):
            try:
                status, text = await self.post(addr, route, message)
                if status in (200, 404):
                    return
                error = Unanswered(f"status {status}: {text[:200]}")
                last = last or status < 500
            except Unanswered as e:
                error = e
            if last:
                raise error
            await asyncio.sleep(AGAIN_S)

    async def post(self, addr: str, route: str, message: bytes) -> tuple[int, str]:
        self._hooks = self._hooks or Hooks(CallHooks)
        headers, checks = {"Content-Type": "application/json"}, []
        for signs in self._hooks.signs:
            more, check = signs("POST", route, message)
            headers |= more
            checks.append(check)
        try:
            async with self._opened().post(
                f"http://{addr}{route}",
                data=message,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(ANSWER_S),
            ) as reply:
                content = await reply.read()
                for check in checks:
                    check(str(reply.url), reply.status, content, reply.headers)
                return reply.status, content.decode(errors="replace")
        except asyncio.TimeoutError as e:
            raise Unanswered(f"no answer in {ANSWER_S:g} s") from e
        except Exception as e:
            raise Unanswered(f"{type(e).__name__}: {e}") from e

    def _opened(self) -> aiohttp.ClientSession:
        """The session, which keeps connections. No cookies: calls are independent."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=AT_ONCE)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            # An unclosed session is logged as an error.
            atexit.register(self._close, self._session)
        return self._session

    def _close(self, session: aiohttp.ClientSession) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(session.close(), self._loop).result(ANSWER_S)


_calls = _Calls()


# ---- receiver ----


class NotNow(Exception):
    """This worker cannot handle the message for a reason of its own; another worker may, or this one later."""


_listeners: dict[str, Callable[..., None]] = {}


def add_route(route: str, **fields: type) -> None:
    """Accept messages with rooms and ``fields`` at ``route`` of a prefill's bootstrap server.

    Called on import, before that server is created. `listen` sets the listener.
    """
    FIELDS[route] = fields


def listen(route: str, listener: Callable[..., None]) -> None:
    """Have ``listener`` called, on the bootstrap server's thread, with the rooms and `FIELDS` of each message.

    It may raise ValueError to refuse a message, and `NotNow`.
    """
    _listeners[route] = listener


def receive(route: str, told: Any) -> None:
    """Pass a message to its listener. Raises ValueError for an invalid message, and the listener's errors."""
    said: dict[str, Any] = told if isinstance(told, dict) else {}
    rooms: Any = said.get("rooms", [said.get("room")])
    if not isinstance(rooms, list) or not 0 < len(rooms) <= MOST or not all(map(is_room, rooms)):
        raise ValueError(f"{route[1:]}: rooms must be a list of up to {MOST} numbers from 1 to 2**63 - 1")
    fields: dict[str, Any] = {name: said.get(name) for name in FIELDS[route]}
    for name, kind in FIELDS[route].items():
        if type(fields[name]) is not kind:
            raise ValueError(f"{route[1:]}: {name} must be a {kind.__name__}")
        if kind is str:
            # JSON may contain a lone surrogate, with which clients could not be answered.
            fields[name] = fields[name][:MOST_CHARACTERS].encode(errors="replace").decode()
    if route not in _listeners:
        raise NotNow("this prefill is starting")
    _listeners[route](rooms, **fields)


async def take(request: web.Request) -> web.Response:
    """Answer a message to the bootstrap server."""
    try:
        receive(request.path, await request.json())
    except web.RequestPayloadError as e:
        return unreadable(request, e)
    except NotNow as e:
        # Not 400, which a router takes for the client's error. For a decode worker this is a failure of prefill.
        return web.Response(text=str(e), status=503)
    except (ValueError, LookupError, RecursionError) as e:
        # LookupError: an unknown charset.
        return web.Response(text=str(e), status=400)
    return web.Response(text="OK")


def unreadable(request: web.Request, error: Exception) -> web.Response:
    """Answer 400 to a body that does not match its headers, and close the connection."""
    reply = web.Response(status=400, text=f"the body of the request cannot be read: {error}")
    # Otherwise aiohttp reads the rest of the body and fails again.
    request.content.feed_eof()
    reply.force_close()
    return reply
