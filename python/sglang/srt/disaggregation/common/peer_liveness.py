"""Whether the processes of other workers are gone, found out by threads: a scheduler waits for no peer.

A refused connection says that the process that listened there has ended. No answer says nothing: the way to the peer
may be cut, or it stands still.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Iterable

from sglang.srt.disaggregation.common.peer_names import PeerNames
from sglang.srt.disaggregation.peer_calls import in_background

logger = logging.getLogger(__name__)

Endpoint = tuple[str, int]

# Seconds that one look waits for answers, however many peers are looked at: more than the way around the world takes.
# For those of DNS it waits as long, before.
ANSWER_S = 0.2
# Seconds between the two looks that make a peer gone, so that nothing is made of a moment.
AGAIN_S = 0.075
# Seconds for which an answer is kept, and after which one that nobody asks for any more is forgotten.
KEPT_S, FORGOTTEN_S = 2.0, 60.0

_names = PeerNames()


def refusing(endpoints: Iterable[Endpoint]) -> set[Endpoint]:
    """Those of ``endpoints`` that refuse connections, at all of their addresses. All are asked at once."""
    endpoints = set(endpoints)
    addresses = _names.look_up({host for host, _ in endpoints}, ANSWER_S)
    poller = select.poll()
    asked: dict[int, tuple[Endpoint, socket.socket]] = {}
    refused: set[Endpoint] = set()
    others: set[Endpoint] = set()

    def note(endpoint: Endpoint, error: int) -> None:
        (refused if error == errno.ECONNREFUSED else others).add(endpoint)

    def ask(endpoint: Endpoint) -> None:
        host, port = endpoint
        for family, (address, _, *scope) in addresses[host]:
            probe = socket.socket(family, socket.SOCK_STREAM)
            probe.setblocking(False)
            asked[probe.fileno()] = endpoint, probe
            error = probe.connect_ex((address, port, *scope))
            if error == errno.EINPROGRESS:
                poller.register(probe, select.POLLOUT)
            else:
                note(endpoint, error)
                asked.pop(probe.fileno())[1].close()

    try:
        for endpoint in endpoints:
            try:
                ask(endpoint)
            except (OSError, OverflowError, ValueError) as e:
                # No such port.
                logger.debug("%s:%s cannot be looked at: %s", *endpoint, e)
                others.add(endpoint)
        deadline = time.monotonic() + ANSWER_S
        while asked and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                endpoint, probe = asked.pop(fd)
                note(endpoint, probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                probe.close()
    finally:
        for endpoint, probe in asked.values():
            others.add(endpoint)
            probe.close()
    _names.doubt({host for host, _ in refused})
    return refused - others


def gone(endpoints: Iterable[Endpoint]) -> set[Endpoint]:
    """Those of ``endpoints`` that refuse connections twice."""
    found = refusing(endpoints)
    if found:
        time.sleep(AGAIN_S)
        found = refusing(found)
    return found


def nothing_listens(host: str, port: int) -> bool:
    """Whether the process that listened there is gone. For threads that may wait."""
    return bool(refusing([(host, port)]))


class PeerLiveness:
    """What is known of peers, for schedulers: asked and answered without waiting, looked for by a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._asked: set[Endpoint] = set()
        # When the look began, and whether the peer was gone.
        self._known: dict[Endpoint, tuple[float, bool]] = {}
        # Whether there is that thread.
        self._looks = False

    def are_gone(self, endpoints: Iterable[Endpoint], since: float) -> bool:
        """Whether all of these were found to be gone after ``since``. What is not known by now is looked for."""
        now = time.monotonic()
        known = self._known
        ask, found = [], True
        for endpoint in endpoints:
            at, is_gone = known.get(endpoint, (0.0, False))
            found = found and is_gone and at >= since
            if at < since or now - at > KEPT_S:
                ask.append(endpoint)
        if ask and not found:
            with self._lock:
                self._asked.update(ask)
                if not self._looks:
                    # If it cannot be, the next question tries again.
                    self._looks = in_background(self._run, "look-at-peers") is None
                self._lock.notify()
        return found

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._asked:
                    self._lock.wait()
                asked, self._asked = self._asked, set()
            began = time.monotonic()
            found: set[Endpoint] = set()
            try:
                found = gone(asked)
            except Exception:
                logger.exception("Could not look after %s", asked)
            with self._lock:
                # Replaced as a whole: it is read without the lock.
                kept = {peer: known for peer, known in self._known.items() if began - known[0] < FORGOTTEN_S}
                self._known = kept | {peer: (began, peer in found) for peer in asked}
