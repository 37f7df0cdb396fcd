"""A worker's sockets for its messages to peers, and what ZeroMQ says of these: which are lost.

ZeroMQ says when a connection comes about and when it ends. With heartbeats it ends one over which nothing comes any
more: any ZeroMQ answers them by itself, whatever else its process does, and needs no interpreter for it.

The engine makes a context, with two threads, for each peer, and keeps it for good.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

import logging
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

# Sockets of one context, of which a peer takes three. ZeroMQ's default is 1023, and prefills at new addresses come
# before old ones are given up.
MOST_SOCKETS = 16384
# Seconds between two heartbeats; and for an answer beyond the time for which the engine's own heartbeat goes on to ask.
HEARTBEAT_S, MORE_S = 3.0, 2.0
# Seconds in which a connection that has ended comes about again where its peer lives: of what was sent over it nothing
# may be lost. And milliseconds from one attempt to the next, at first and at most.
BACK_S, RECONNECT_MS, MOST_RECONNECT_MS = 1.0, 100, 1000
# And of one attempt: the system's goes on for minutes where a way has been cut, also when it is whole again.
CONNECT_MS = 3000
# Seconds for which a look waits for what ZeroMQ says.
LOOK_S = 0.15
# Seconds after which a peer without a connection is forgotten, and what waits for it.
FORGOTTEN_S = 900.0
# Peers that are remembered to have been there.
REMEMBERED = 65536

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_numbers = count()


class Loss(NamedTuple):
    """When a peer was found to be lost, by the monotonic clock, and whether its process is known to have ended.

    Of one that only does not answer it is not: it may stand still, or the way to it be cut, and it goes on to write.
    """

    at: float
    gone: bool


def answer_s() -> float:
    """Seconds that an answer to a heartbeat may take: as long as the engine lets a prefill be silent."""
    failures = max(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.get(), 1)
    return failures * max(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.get(), 2.0) + MORE_S


class _Peer:
    """The socket to one peer. lock: of whoever uses it."""

    def __init__(self, context: zmq.Context, endpoint: str, is_ipv6: bool, watched: bool, answer_s: float):
        self.at, self.watched, self.lock = host_and_port(endpoint.removeprefix("tcp://")), watched, threading.Lock()
        self.socket, self.monitor = context.socket(zmq.PUSH), context.socket(zmq.PAIR)
        # Since when there is no connection, whether there has been one, and whether the process is known to have ended:
        # written by the thread that looks. And when it has last spoken: its connection is then about to come again.
        self.away_since: float | None = time.monotonic()
        self.was_there = self.is_gone = False
        self.spoke_at = 0.0
        try:
            self.socket.set(zmq.IPV6, int(is_ipv6))
            self.socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            self.socket.set(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
            self.socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            if watched:
                self.socket.set(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_S))
                self.socket.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * answer_s))
            # ZeroMQ's thread waits where these are not read and there is no room for more.
            self.monitor.set(zmq.RCVHWM, 0)
            address = f"inproc://peer-{next(_numbers)}"
            self.socket.monitor(address, _EVENTS)
            self.monitor.connect(address)
            self.socket.connect(endpoint)
        except Exception:
            self.close()
            raise

    def read(self) -> None:
        """Take in what has become of the connection."""
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
        """Seconds for which it is not there, None if it is."""
        return None if self.away_since is None else now - max(self.away_since, self.spoke_at)

    def close(self) -> None:
        """What waits in it goes with it: whoever is given that port next would be sent it."""
        # First, or ZeroMQ's thread would wait for who reads of its end.
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class PeerSockets:
    """One socket for each peer, which threads may share: those of all messages to it, which keep their order.

    Whoever sends for the engine waits where the queue to a peer is full, as in the engine; these messages have a socket
    of their own, and say nothing of the peer: it may be without this package.
    """

    def __init__(self, context: zmq.Context, answer_s: float):
        """answer_s: seconds that a peer may take to answer."""
        self._context, self._answer_s, self._lock = context, answer_s, threading.Lock()
        # By endpoint, and whether who sends waits.
        self._peers: dict[tuple[str, bool], _Peer] = {}
        self._lost: dict[Endpoint, Loss] = {}
        # Peers that have been there, and those of them that are.
        self.reached: set[Endpoint] = set()
        self.connected: set[Endpoint] = set()

    def connect(self, endpoint: str, is_ipv6: bool = False, waits: bool = True) -> PeerSocket:
        """What sends to a peer. waits: whether until there is room in its queue; else `NotTaken` is raised.

        Raises ZMQError where no more sockets can be made.
        """
        self._get(endpoint, is_ipv6, waits)
        return PeerSocket(self, endpoint, is_ipv6, waits)

    def watch(self, host: str, port: int) -> None:
        """A peer has spoken that is to be looked after from now on."""
        if not is_address(host):
            return
        address = NetworkAddress(host, port)
        try:
            self._get(address.to_tcp(), address.is_ipv6, waits=False).spoke_at = time.monotonic()
        except (ValueError, zmq.ZMQError) as e:
            logger.warning("Decode at %s cannot be monitored: %s", address, e)

    def send(self, endpoint: str, is_ipv6: bool, waits: bool, frames: Sequence[Any], flags: int = 0) -> Any:
        """Send all frames to a peer, or none. Raises ZMQError, and `NotTaken`."""
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
                    # Who listens there now may be another.
                    self._lost.pop(peer.at, None)
        return peer

    def lost(self) -> dict[Endpoint, Loss]:
        """The peers that are lost, and have not come back."""
        with self._lock:
            return dict(self._lost)

    def are_gone(self, peers: Iterable[Endpoint]) -> bool:
        """Whether the processes of all these have ended, and nobody has been spoken to in their places."""
        lost = self._lost
        return all((loss := lost.get(peer)) is not None and loss.gone for peer in peers)

    def start(self, check: Callable[[], None]) -> None:
        """Look again and again, in a thread, and call ``check`` each time."""
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
        """Find out who is lost, by what ZeroMQ says; wait for that no longer than this. For one thread.

        What it has said is read before time counts: this process may have stood still meanwhile.
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
        """Close a socket; the next message makes a new one. Not while somebody sends, who may wait for the peer."""
        with self._lock:
            if not peer.lock.acquire(blocking=False):
                return
            self._peers.pop(key, None)
        try:
            peer.close()
        finally:
            peer.lock.release()


class PeerSocket:
    """Stands for the socket to one peer, which may be closed between two messages."""

    def __init__(self, sockets: PeerSockets, endpoint: str, is_ipv6: bool, waits: bool):
        self._sockets, self._to = sockets, (endpoint, is_ipv6, waits)

    def send_multipart(self, frames: Sequence[Any], flags: int = 0) -> Any:
        """Send all frames. Raises ZMQError, and `NotTaken`."""
        return self._sockets.send(*self._to, frames, flags)
