"""Monitors the peers of a worker's requests: requests of an ended process fail at once.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from sglang.srt.disaggregation.common.peer_liveness import Endpoint, host_and_port, is_address, nothing_listens
from sglang.srt.disaggregation.common.peer_sockets import PeerSockets
from sglang.srt.disaggregation.common.prefill_peers import FORGOTTEN_S, MOST_ASKED
from sglang.srt.disaggregation.common.rooms import Rooms

logger = logging.getLogger(__name__)

# Rooms handled while holding the lock that the scheduler needs.
AT_ONCE = 128
# Seconds for which a port must refuse connections before the process counts as ended, not restarting.
REFUSING_S = 0.3


class Refusing:
    """Prefills whose bootstrap servers refuse connections."""

    def __init__(self) -> None:
        # Times of the first and last refusal, by address.
        self._since: dict[str, tuple[float, float]] = {}

    def note(self, addr: str, answered: bool) -> None:
        """Note the result of a request to it. Raises ValueError for an invalid address."""
        now = time.monotonic()
        if answered or not nothing_listens(*host_and_port(addr)):
            self._since.pop(addr, None)
            return
        first, last = self._since.get(addr, (now, now))
        if len(self._since) > MOST_ASKED:
            # A copy in one go: other threads note others.
            for other, (_, at) in list(self._since.items()):
                if now - at >= FORGOTTEN_S:
                    self._since.pop(other, None)
        # A refusal long ago was another process's.
        self._since[addr] = (first if now - last < 10 * REFUSING_S else now, now)

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Why a request that has waited since ``since`` can fail now; None if it cannot."""
        first, last = self._since.get(addr, (0.0, 0.0))
        return (
            f"prefill {addr} is gone: it refuses connections" if last > since and last - first >= REFUSING_S else None
        )


def check_rank(addr: str, info: Any) -> None:
    """Check a rank's address as its bootstrap server reports it. Raises ConnectionError.

    A host name is refused: ZeroMQ's thread, which answers heartbeats, would block on DNS. The engine sends addresses.
    """
    host, port = (info.get("rank_ip"), info.get("rank_port")) if isinstance(info, dict) else (None, None)
    if not (isinstance(host, str) and is_address(host) and type(port) is int and 0 < port < 65536):
        raise ConnectionError(f"prefill {addr} does not say where a rank listens: {str(info)[:200]!a}")


def forget_heartbeats(manager: Any, addr: str) -> None:
    """Drop the engine's heartbeat connection and failure count of an ended prefill."""
    with manager.session_pool_lock:
        session = manager.session_pool.pop(addr, None)
    if session is not None:
        session.close()
    manager.heartbeat_failures.pop(addr, None)


def fail_lost_prefills(manager: Any) -> None:
    """Decode: fail the requests of each prefill that has lost a scheduler. manager: of this decode rank.

    The engine polls bootstrap servers and needs two failures, 10 s or more. It misses a prefill that restarted
    meanwhile, and goes on to send to nobody.
    """
    lost = manager.peer_sockets.lost().keys()
    # Keys: a prefill's address and three ranks, joined by underscores. A copy in one go: the scheduler adds
    # connections.
    for key, infos in dict(manager.connection_pool).items() if lost else ():
        addr = key.rsplit("_", 3)[0]
        if addr in manager.prefill_info_table and any((info["rank_ip"], info["rank_port"]) in lost for info in infos):
            try:
                manager._handle_node_failure(addr)
            except Exception:
                logger.exception("Could not fail the requests of prefill %s", addr)


class Books(Protocol):
    """The room tables of a prefill rank."""

    rooms: Rooms
    transfer_infos: dict[int, Any]

    def end_room(self, room: int, reason: str | None = None) -> None: ...

    def forget(self, room: int) -> None: ...


class Unclaimed:
    """Decode's requests for KV whose own requests have not reached this prefill, and may never."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def rooms(self) -> list[int]:
        """Their rooms. Takes the rooms' lock for `AT_ONCE` rooms at a time."""
        books, found = self._books, []
        # A copy in one go: some writers do not take the lock.
        asked = list(books.transfer_infos)
        for first in range(0, len(asked), AT_ONCE):
            with books.rooms.lock:
                found += [room for room in asked[first : first + AT_ONCE] if room not in books.rooms.live]
        return found

    def drop(self, rooms: Iterable[int], reason: str) -> None:
        """Drop ``rooms`` of a lost decode worker; the reason is kept for requests that arrive later."""
        books = self._books
        with books.rooms.lock:
            for room in set(rooms):
                if room in books.transfer_infos and room not in books.rooms.live:
                    books.end_room(room)
                    books.forget(room)
                    books.rooms.refuse(room, reason)


class DecodeWatch:
    """Prefill: fails the requests of a decode rank as soon as ZeroMQ reports it lost. Only ranks with the flag.

    In the engine, requests that it had not asked for wait until a time-out, with NIXL until their client disconnects;
    and the router waits for both workers.
    """

    def __init__(
        self,
        peers: PeerSockets,
        rooms: Rooms,
        waiting: Mapping[int, Iterable[Endpoint]],
        asked: Callable[[int], Iterable[Endpoint]],
        unclaimed: Unclaimed,
        on_lost: Callable[[], None] = lambda: None,
    ):
        """waiting: decode ranks in which each room waits. asked: ranks with the flag that have requested a room's KV;
        called with the rooms' lock. on_lost: called for each lost rank.
        """
        self._peers, self._rooms, self._waiting = peers, rooms, waiting
        self._asked, self._on_lost = asked, on_lost
        self._unclaimed = unclaimed
        # Lost decode ranks that have been logged, until they return.
        self._told: set[Endpoint] = set()

    def check(self) -> None:
        """Fail the requests of lost ranks; called periodically."""
        # Only ranks reached before: with NIXL nothing else connects to them, and a firewall may refuse connections.
        lost = {rank: loss for rank, loss in self._peers.lost().items() if rank in self._peers.reached}
        self._told -= self._peers.connected
        rooms = self._rooms_by_rank() if lost else {}
        for rank in lost.keys() & rooms.keys():
            (host, port), of_rank = rank, rooms[rank]
            reason = f"decode {host}:{port} is gone: it refuses connections"
            if not lost[rank].gone:
                reason = f"decode {host}:{port} has not answered for a while: it stands still, or the way to it is cut"
            # Log once per loss, not for each later request.
            if rank not in self._told:
                self._told.add(rank)
                logger.error("Decode at %s:%s is lost, and with it %s requests", host, port, len(of_rank))
                self._on_lost()
            with self._rooms.lock:
                # Other ranks or workers may still wait for it.
                self._unclaimed.drop([room for room in of_rank if {*self._asked(room)} <= lost.keys()], reason)
            self._lose(of_rank, reason)

    def _lose(self, rooms: list[int], reason: str) -> None:
        """Fail those of ``rooms`` whose requests are here."""
        books = self._rooms
        with books.lock:
            for room in rooms:
                if room in books.live and room not in books.refused:
                    books.give_up(room, reason)

    def _rooms_by_rank(self) -> dict[Endpoint, list[int]]:
        """Rooms by the decode ranks in which they wait or that have requested them.

        Live requests that have not failed, and unclaimed rooms.
        """
        found: dict[Endpoint, list[int]] = {}
        books, asked = self._rooms, self._unclaimed.rooms()
        with books.lock:
            live = list(books.live)
        # Requests may have arrived meanwhile.
        unclaimed = list({*asked}.difference(live))
        for first in range(0, len(live), AT_ONCE):
            with books.lock:
                for room in live[first : first + AT_ONCE]:
                    sender = books.live.get(room)
                    # A failed one stays live while something is still being written for it.
                    if sender is not None and room not in books.refused and not sender.has_failed():
                        for rank in {*self._asked(room), *self._waiting.get(room, ())}:
                            found.setdefault(rank, []).append(room)
        for first in range(0, len(unclaimed), AT_ONCE):
            with books.lock:
                for room in unclaimed[first : first + AT_ONCE]:
                    for rank in self._asked(room):
                        found.setdefault(rank, []).append(room)
        return found
