"""A shared secret for the control plane of a PD deployment: handshakes, requests for KV, reports of completion.

The engine accepts every well-formed message. With ``SGLANG_DISAGGREGATION_SECRET_FILE`` on all workers, each ZMQ
message, each request to the bootstrap server except health checks, and each answer has a HMAC-SHA256 (RFC 2104) over
its content, the time, a nonce and, for ZMQ, the receiver. Unsigned, wrong, expired or repeated messages are ignored. A
bootstrap server has many names, so a request to it is also valid at another one of the deployment. Nothing is
encrypted, and KV transfers are unchanged.

Upstream: none is known. sgl-project/sglang#21567 (open) encrypts ZeroMQ; #39400 (open) asks for a check of bootstrap
routes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import requests
from aiohttp import web
from sglang.srt.disaggregation.common.prefill_peers import NotTrusted
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.peer_calls import CallHooks, unreadable

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_DISAGGREGATION_SECRET_FILE"
# The length of `openssl rand -hex 16`.
LEAST_BYTES = 16
# Seconds that a request may take, and by which clocks may differ.
WINDOW_S = 60.0
# The same for ZMQ messages, which wait while the network is cut or the receiver is hung. The receiver's requests wait
# half as long by default.
LATE_S = 600.0
HEADER = "X-SGLang-PD-Signature"
# Time (s), nonce, MAC.
_TAG = struct.Struct(">d12s32s")
# Seconds between two log lines about ignored messages.
_TELL_S = 10.0


@lru_cache(maxsize=1)
def secret() -> Secret | None:
    """This process's secret, if any. Raises ValueError for a file without one."""
    path = os.environ.get(VARIABLE, "").strip()
    if not path:
        return None
    try:
        content = Path(path).read_bytes().strip()
    except OSError as e:
        raise ValueError(f"{VARIABLE}={path} cannot be read: {e.strerror or e}") from None
    if len(content) < LEAST_BYTES:
        raise ValueError(
            f"{VARIABLE}={path} holds {len(content)} bytes, and a secret has at least {LEAST_BYTES}: "
            "`openssl rand -hex 32` makes one"
        )
    return Secret(content)


class Secret:
    """Signs and verifies. Thread-safe."""

    def __init__(
        self, key: bytes, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ):
        self._key, self._clock, self._monotonic = hashlib.sha256(key).digest(), clock, monotonic
        self._lock = threading.Lock()
        # Messages to an earlier process at this port are not in ``_used``.
        self._started = monotonic()
        # Used nonces and their expiry, seconds since the start. Only of correctly signed messages, so that outsiders
        # cannot make it grow.
        self._used: OrderedDict[bytes, float] = OrderedDict()

    def sign(self, parts: Sequence[bytes], purpose: str) -> bytes:
        """The tag of a message. purpose: its kind and receiver."""
        now, number = self._clock(), os.urandom(12)
        return _TAG.pack(now, number, self._mac(parts, purpose, now, number))

    def verify(self, parts: Sequence[bytes], purpose: str, tag: bytes, late_s: float = WINDOW_S) -> None:
        """Raises ValueError with the reason for an invalid message.

        late_s: seconds that it may have taken, at most `LATE_S`.
        """
        if len(tag) != _TAG.size:
            raise ValueError("it is not signed")
        at, number, mac = _TAG.unpack(tag)
        if not hmac.compare_digest(mac, self._mac(parts, purpose, at, number)):
            raise ValueError("its signature is not valid: another secret, another receiver or another message")
        with self._lock:
            now, runs_s = self._clock(), self._monotonic() - self._started
            if not now - min(late_s, runs_s + WINDOW_S) <= at <= now + WINDOW_S:
                raise ValueError(
                    f"it was signed {now - at:.0f} s ago by this host's clock: a replay, or a clock is wrong"
                )
            while self._used and next(iter(self._used.values())) < runs_s:
                self._used.popitem(last=False)
            if number in self._used:
                raise ValueError("it has come before")
            # Not by its own time, so that entries stay sorted by expiry.
            self._used[number] = runs_s + WINDOW_S + LATE_S

    def _mac(self, parts: Sequence[bytes], purpose: str, at: float, number: bytes) -> bytes:
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        # With lengths, so that bytes cannot move between parts.
        for part in (purpose.encode(), struct.pack(">d", at), number, *parts):
            mac.update(struct.pack(">Q", len(part)))
            mac.update(part)
        return mac.digest()


# ---- ZMQ ----


class SigningSocket:
    """Appends a tag to each message of a socket. endpoint: the receiver's."""

    def __init__(self, socket: Any, endpoint: str, key: Secret):
        self._socket, self._endpoint, self._key = socket, endpoint, key

    def send_multipart(self, frames: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Send the frames and their tag."""
        parts = [bytes(frame) for frame in frames]
        return self._socket.send_multipart([*parts, self._key.sign(parts, f"zmq {self._endpoint}")], *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class VerifyingSocket:
    """A worker's own socket; drops messages without a valid tag."""

    def __init__(self, socket: Any, endpoint: str, key: Secret):
        self._socket, self._endpoint, self._key = socket, endpoint, key
        self._told_at, self._untold = -_TELL_S, 0

    def recv_multipart(self, *args: Any, **kwargs: Any) -> list[bytes]:
        """The next valid message, without its tag."""
        while True:
            frames = self._socket.recv_multipart(*args, **kwargs)
            try:
                self._key.verify(frames[:-1], f"zmq {self._endpoint}", frames[-1], LATE_S)
                return frames[:-1]
            except ValueError as e:
                self._tell(str(e))

    def _tell(self, reason: str) -> None:
        # Rate-limited: outsiders must not fill the disk.
        self._untold += 1
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            logger.error(
                "Ignored %d message(s) at %s, the last since %s. Do all workers have the same %s?",
                self._untold,
                self._endpoint,
                reason,
                VARIABLE,
            )
            self._told_at, self._untold = now, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


# ---- HTTP ----


def _of_request(method: str, path: str, body: bytes) -> list[bytes]:
    return [method.encode(), path.encode(), body]


class SignedCall:
    """One request to a bootstrap server; with a secret it is signed, and its answer has to be."""

    def __init__(self, method: str, path: str, body: bytes):
        self._key = secret()
        self._tag = "" if self._key is None else self._key.sign(_of_request(method, path, body), "request").hex()
        self.headers = {HEADER: self._tag} if self._tag else {}

    def check(self, url: str, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        """Raise NotTrusted for an answer that is not correctly signed."""
        if self._key is None:
            return
        try:
            parts = [self._tag.encode(), b"%d" % status, content]
            self._key.verify(parts, "answer", _from_hex(headers.get(HEADER)))
        except ValueError as e:
            raise NotTrusted(
                f"{url} answered with status {status}, and {e}. Do all workers have the same {VARIABLE}?"
            ) from None


class SigningHooks(CallHooks):
    """Signs HTTP calls between workers, if there is a secret."""

    def signs(
        self, method: str, path: str, body: bytes
    ) -> tuple[Mapping[str, str], Callable[[str, int, bytes, Mapping[str, str]], None]]:
        """The header, and a check of the answer."""
        call = SignedCall(method, path, body)
        return call.headers, call.check


hooks.register(CallHooks, SigningHooks)


class _Signed(requests.auth.AuthBase):
    """`SignedCall` for the engine's requests."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body = request.body or b""
        assert isinstance(body, bytes), "the engine sends JSON only"
        call = SignedCall(request.method or "", request.path_url, body)
        request.headers.update(call.headers)
        request.register_hook(
            "response", lambda reply, **_: call.check(reply.url, reply.status_code, reply.content, reply.headers)
        )
        return request


class SignedRequests:
    """Signs requests to bootstrap servers, if there is a secret. unsigned: the engine's ``requests``."""

    def __init__(self, unsigned: Any):
        self._unsigned = unsigned

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._unsigned, name)
        return ask if secret() is None or name not in ("get", "put", "post") else partial(ask, auth=_Signed())


def middleware(key: Secret) -> Callable[..., Awaitable[web.StreamResponse]]:
    """For a bootstrap server: answers 401 to unsigned requests, except health checks, and signs its answers."""

    @web.middleware
    async def check(request: web.Request, handler: Callable[..., Awaitable[web.Response]]) -> web.StreamResponse:
        if request.path == "/health":
            return await handler(request)
        tag = request.headers.get(HEADER, "")
        try:
            parts = _of_request(request.method, request.raw_path, await request.read())
            key.verify(parts, "request", _from_hex(tag))
        except web.RequestPayloadError as e:
            return unreadable(request, e)
        except ValueError as e:
            return web.Response(status=401, text=f"{e}. This prefill has a secret: give the same {VARIABLE} to all.")
        try:
            reply = await handler(request)
        except web.HTTPException as e:
            reply = web.Response(status=e.status, text=e.text)
        body = reply.body if isinstance(reply.body, bytes) else b""
        reply.headers[HEADER] = key.sign([tag.encode(), b"%d" % reply.status, body], "answer").hex()
        return reply

    return check


def _from_hex(text: str | None) -> bytes:
    try:
        return bytes.fromhex(text or "")
    except ValueError:
        return b""
