"""What the messages over Mooncake's ZMQ sockets are made of, and a socket that lets only good ones through.

docs/protocol.md has the frames.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.decode_prefix import wire_int
from sglang.srt.utils.network import NetworkAddress

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.last_words import LastWords
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, TransferInfo

logger = logging.getLogger(__name__)

# Prefill's messages about one piece of a delta that goes through decode's staging buffer, and decode's answer.
STAGE, STAGED, GRANT = b"stage", b"staged", b"grant"
# The engine's about its own use of that buffer, to prefill, and how many numbers follow; then comes decode's session.
ENGINE_STAGING = {b"WATERMARK": 2, b"STAGING_RSP": 5}


@dataclasses.dataclass(frozen=True)
class Peer:
    """Where one decode rank with a radix cache hears of its requests."""

    endpoint: str
    port: int

    @classmethod
    def read(cls, frames: list[bytes]) -> Peer:
        """From two frames of a message. Raises ValueError for what is no address."""
        return cls(frames[0].decode("ascii"), wire_int(frames[1], "port"))


class Inbox:
    """The manager's socket as its thread sees it: what ``check`` refuses, or deals with itself, never gets there.

    The engine's threads end at the first message they cannot read, and with them all requests of the worker.
    check: takes the frames; False when they are dealt with, raises when they cannot be used.
    """

    def __init__(self, socket: Any, check: Callable[[list[bytes]], bool]):
        self.socket = socket
        self.check = check

    def recv_multipart(self) -> list[bytes]:
        """The next message for the engine's thread."""
        while True:
            frames = self.socket.recv_multipart()
            try:
                if self.check(frames):
                    return frames
            except Exception as e:
                logger.error("Ignored a message: %s", e)


def check_engine_staging(frames: list[bytes]) -> None:
    """Raise ValueError for a message about staging buffers to prefill that would end the engine's thread."""
    kind, *rest = frames
    numbers = ENGINE_STAGING.get(kind)
    if numbers is None:
        # To decode.
        return
    if len(rest) < numbers + (kind == b"STAGING_RSP"):
        raise ValueError(f"{kind!r} has only {len(frames)} frames")
    for number in rest[:numbers]:
        # An offset may be negative: there is no memory.
        int(number.decode("ascii"))
    b"".join(rest[numbers:]).decode("ascii")


def head(manager: MooncakeKVManager, room: int, session: str) -> list[bytes]:
    """The frames with which each of decode's messages about a request begins: the room, and who it is."""
    return [b"%d" % room, manager.local_ip.encode("ascii"), b"%d" % manager.rank_port, session.encode("ascii")]


def post(peer: Peer, frames: list[bytes]) -> None:
    """Send a message from any thread, or raise NotTaken. The sockets of the transfer threads are for these alone."""
    address = NetworkAddress(peer.endpoint, peer.port)
    socket, lock = CommonKVReceiver._connect(address.to_tcp(), is_ipv6=address.is_ipv6)
    try:
        with lock:
            socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.Again:
        raise NotTaken(address.to_tcp()) from None


def listeners(infos: Iterable[TransferInfo]) -> set[Peer]:
    """Whom to tell that a request failed.

    Not decode workers without the flag, whose wire stays as it was. Nor does a dummy rank tell anybody: its word would
    count for that of the rank that writes.
    """
    return {Peer(i.endpoint, i.dst_port) for i in infos if i.names_prefix and not i.is_dummy}


def say_failed(words: LastWords[Peer], room: int, rank: int, peers: Iterable[Peer], reason: str) -> None:
    """Send decode ranks the engine's failure message of prefill's ``rank`` and, as a fourth frame, the reason."""
    frames = [b"%d" % room, b"%d" % KVPoll.Failed, b"%d" % rank, reason.encode("ascii", "replace")]
    for peer in peers:
        try:
            post(peer, frames)
        except Exception as e:
            words.unsaid(room, peer)
            logger.warning("Could not tell decode at %s:%s that room %s failed: %s", peer.endpoint, peer.port, room, e)
