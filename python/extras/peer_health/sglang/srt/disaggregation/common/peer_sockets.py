"""Sockets for a worker's messages to its peers, and lost peers as ZeroMQ's socket monitor reports them.

ZeroMQ reports when a connection is made and when it ends. With heartbeats it also ends a connection without traffic.
Any ZeroMQ peer answers heartbeats in its own thread, without the interpreter.

The engine creates one context with two threads per peer and never closes it.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import zmq
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.peer_liveness import Endpoint, gone, host_and_port, is_address
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

# Sockets per context; a peer takes three. ZeroMQ's default, 1023, is too low: prefills with new addresses arrive before
# the sockets of old ones are closed.
MOST_SOCKETS = 16384
# Seconds between heartbeats; and how much longer than the engine's own heartbeat to wait for an answer.
HEARTBEAT_S, MORE_S = 3.0, 2.0
# Seconds in which a live peer's connection returns; no message is lost by then. And the first and longest interval
# between attempts, milliseconds.
BACK_S, RECONNECT_MS, MOST_RECONNECT_MS = 1.0, 100, 1000
# Time-out of one attempt: the system's takes minutes after a network cut, even once that is over.
CONNECT_MS = 3000
# Seconds that one look waits for monitor events.
LOOK_S = 0.15
# Seconds after which a peer without connection is dropped, with its queued messages.
FORGOTTEN_S = 900.0
# Bound of `PeerSockets.reached`.
REMEMBERED = 65536

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_numbers = count()


class Loss(NamedTuple):
    """A lost peer. at: when it was found, monotonic. gone: its process is known to have ended.

    Otherwise it is hung or unreachable, and may go on to write.
    """

    at: float
    gone: bool


def answer_s() -> float:
    """Seconds to wait for a heartbeat's answer: as long as the engine lets a prefill be silent, and `MORE_S`."""
    failures = max(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.get(), 1)
    return failures * max(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.get(), 2.0) + MORE_S


class _Peer:
    """The socket to one peer. lock: held during its use."""

    def __init__(self, context: zmq.Context, endpoint: str, is_ipv6: bool, watched: bool, answer_s: float):
        self.at, self.watched, self.lock = host_and_port(endpoint.removeprefix("tcp://")), watched, threading.Lock()
        self.socket, self.monitor = context.socket(zmq.PUSH), context.socket(zmq.PAIR)
        # Set by the monitoring thread: since when there is no connection; whether there ever was one; whether its
        # process has ended. And when it last sent a message: it is about to reconnect then.
        self.away_since: float | None = time.monotonic()
        self.was_there = self.is_gone = False
        self.spoke_at = -math.inf
        try:
            self.socket.set(zmq.IPV6, int(is_ipv6))
            self.socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            self.socket.set(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
            self.socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            if watched:
                self.socket.set(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
                self.socket.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * answer_s))
            # Bounded, unread events would block ZeroMQ's thread.
            self.monitor.set(zmq.RCVHWM, 0)
            address = f"inproc://peer-{next(_numbers)}"
            self.socket.monitor(address, _EVENTS)
            self.monitor.connect(address)
            self.socket.connect(endpoint)
        except Exception:
            self.close()
            raise

    def read(self) -> None:
        """Take in the monitor's events."""
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.away_since, self.was_there, self.is_gone = None, True, False
            elif self.away_since is None:
                self.away_since = time.monotonic()

    def away_s(self, now: float) -> float | None:
        """Seconds without connection; None if there is one."""
        return None if self.away_since is None else now - max(self.away_since, self.spoke_at)

    def close(self) -> None:
        """Close it with its unsent messages: another process may get that port."""
        # First, or ZeroMQ's thread would wait for a reader of the monitor.
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class PeerSockets:
    """One socket per peer, shared by threads, so that messages keep their order.

    The engine's own messages block on a full queue, as in the engine. They have a separate socket that is not
    monitored: that peer may be without this package.
    """

    def __init__(self, context: zmq.Context, answer_s: float):
        """answer_s: seconds in which a peer has to answer a heartbeat."""
        self._context, self._answer_s, self._lock = context, answer_s, threading.Lock()
        # By endpoint, and whether sends block.
        self._peers: dict[tuple[str, bool], _Peer] = {}
        self._lost: dict[Endpoint, Loss] = {}
        # Peers that have been connected, and those that are now.
        self.reached: set[Endpoint] = set()
        self.connected: set[Endpoint] = set()

    def connect(self, endpoint: str, is_ipv6: bool = False, waits: bool = True) -> PeerSocket:
        """A sender to a peer. waits: block if its queue is full; otherwise raise `NotTaken`.

        Raises ZMQError if there are too many sockets.
        """
        self._get(endpoint, is_ipv6, waits)
        return PeerSocket(self, endpoint, is_ipv6, waits)

    def watch(self, host: str, port: int) -> None:
        """Monitor a peer that has sent a message."""
        if not is_address(host):
            return
        address = NetworkAddress(host, port)
        try:
            self._get(address.to_tcp(), address.is_ipv6, waits=False).spoke_at = time.monotonic()
        except (ValueError, zmq.ZMQError) as e:
            logger.warning("Decode at %s cannot be monitored: %s", address, e)

    def send(self, endpoint: str, is_ipv6: bool, waits: bool, frames: Sequence[Any], flags: int = 0) -> Any:
        """Send all frames to a peer, or none. Raises ZMQError or `NotTaken`."""
        peer = self._get(endpoint, is_ipv6, waits)
        with peer.lock:
            try:
                return peer.socket.send_multipart(frames, flags if waits else flags | zmq.NOBLOCK)
            except zmq.Again:
                raise NotTaken(endpoint) from None

    def _get(self, endpoint: str, is_ipv6: bool, waits: bool) -> _Peer:
        with self._lock:
            peer = self._peers.get((endpoint, waits))
            if peer is None:
                peer = _Peer(self._context, endpoint, is_ipv6, not waits, self._answer_s)
                self._peers[endpoint, waits] = peer
                if peer.watched:
                    # A new process may listen there now.
                    self._lost.pop(peer.at, None)
        return peer

    def lost(self) -> dict[Endpoint, Loss]:
        """The peers that are lost now."""
        with self._lock:
            return dict(self._lost)

    def are_gone(self, peers: Iterable[Endpoint]) -> bool:
        """Whether all these processes have ended, and no new ones have been contacted at their addresses."""
        lost = self._lost
        return all((loss := lost.get(peer)) is not None and loss.gone for peer in peers)

    def start(self, check: Callable[[], None]) -> None:
        """Start the monitoring thread; it calls ``check`` before each look."""
        threading.Thread(target=self._run, args=(check,), daemon=True, name="watch-peers").start()

    def _run(self, check: Callable[[], None]) -> None:
        while True:
            try:
                check()
                self.look(LOOK_S)
            except Exception:
                logger.exception("Could not monitor peers")
                time.sleep(LOOK_S)

    def look(self, wait_s: float) -> None:
        """Find lost peers by monitor events, waiting at most ``wait_s`` for one. For one thread.

        Events are read before elapsed time counts: this process may have been stalled.
        """
        with self._lock:
            peers = {peer.monitor: (key, peer) for key, peer in self._peers.items()}
        poller = zmq.Poller()
        for monitor in peers:
            poller.register(monitor, zmq.POLLIN)
        if not peers:
            # A poller without sockets returns at once.
            time.sleep(wait_s)
        changed = [peers[monitor][1] for monitor, _ in poller.poll(int(1000 * wait_s))]
        for peer in changed:
            peer.read()
        refused = gone({peer.at for peer in changed if peer.away_since is not None})
        now = time.monotonic()
        for key, peer in peers.values():
            away_s = peer.away_s(now)
            peer.is_gone |= away_s is not None and peer in changed and peer.at in refused
            if peer.watched:
                self._judge(peer, away_s)
            if peer.is_gone or (away_s or 0.0) >= FORGOTTEN_S:
                self._drop(key, peer)
        with self._lock:
            for at in [at for at, loss in self._lost.items() if now - loss.at >= FORGOTTEN_S]:
                del self._lost[at]

    def _judge(self, peer: _Peer, away_s: float | None) -> None:
        at, patience_s = peer.at, BACK_S if peer.was_there else HEARTBEAT_S + self._answer_s
        with self._lock:
            if peer.was_there:
                if len(self.reached) > REMEMBERED:
                    self.reached.clear()
                self.reached.add(at)
            if away_s is None:
                self.connected.add(at)
            else:
                self.connected.discard(at)
            before = self._lost.get(at)
            if not peer.is_gone and (away_s is None or away_s < patience_s):
                self._lost.pop(at, None)
            elif before is None or before.gone != peer.is_gone:
                self._lost[at] = Loss(time.monotonic(), peer.is_gone)

    def _drop(self, key: tuple[str, bool], peer: _Peer) -> None:
        """Close a socket; the next message opens a new one. Not during a send, which may block."""
        with self._lock:
            if not peer.lock.acquire(blocking=False):
                return
            self._peers.pop(key, None)
        try:
            peer.close()
        finally:
            peer.lock.release()


class PeerSocket:
    """Handle of a peer's socket, which may be closed and reopened between messages."""

    def __init__(self, sockets: PeerSockets, endpoint: str, is_ipv6: bool, waits: bool):
        self._sockets, self._to = sockets, (endpoint, is_ipv6, waits)

    def send_multipart(self, frames: Sequence[Any], flags: int = 0) -> Any:
        """Send all frames. Raises ZMQError or `NotTaken`."""
        return self._sockets.send(*self._to, frames, flags)
