"""Each worker looks after the peers of its requests: what is lost with a process that ends is failed at once.

A watch is a thread of its own. It knows of its worker only what it is handed.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from sglang.srt.disaggregation.common import peer_liveness
from sglang.srt.disaggregation.common.peer_liveness import Endpoint
from sglang.srt.disaggregation.common.peer_sockets import UNUSED_S
from sglang.srt.disaggregation.common.rooms import REMEMBERED_ROOMS, Rooms
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

# Seconds between two looks at the ports of a prefill with requests of this decode worker, and of one without.
LOOK_S, IDLE_LOOK_S = 0.15, 2.0
# A look takes at most one in so many seconds of a processor, and of the interpreter that it shares with a scheduler.
SHARE = 20
# Rooms that are gone through with the lock that the scheduler needs.
AT_ONCE = 128
# Seconds between two looks for sockets to peers that are gone.
SWEEP_S = 10.0


def host_and_port(addr: str) -> Endpoint:
    """Of an address as the engine writes it."""
    parsed = NetworkAddress.parse(addr)
    return parsed.host, parsed.port


def ports_of(
    prefills: Iterable[str], connections: Mapping[str, Iterable[Mapping[str, Any]]]
) -> dict[str, set[Endpoint]]:
    """Of each prefill, by address, where its schedulers listen, or else its bootstrap server.

    connections: the engine's, by a prefill's address and three ranks, with underscores between.
    """
    found: dict[str, set[Endpoint]] = {addr: set() for addr in prefills}
    for key, infos in connections.items():
        addr = key.rsplit("_", 3)[0]
        if addr in found:
            found[addr].update((info["rank_ip"], info["rank_port"]) for info in infos)
    return {addr: ports or {host_and_port(addr)} for addr, ports in found.items()}


def ports_in_use(manager: Any) -> set[Endpoint]:
    """Where the prefill ranks listen to which a decode worker's requests may be sent, by its manager.

    None on prefill, which connects anew to a decode rank that asks after a while.
    """
    # A copy in one go: the scheduler makes connections.
    connections = dict(getattr(manager, "connection_pool", {}))
    return {(info["rank_ip"], info["rank_port"]) for infos in connections.values() for info in infos}


class Pause:
    """Before a look: `LOOK_S`, and longer where the looks of this thread take long."""

    def __init__(self) -> None:
        self._since = time.thread_time()

    def seconds(self) -> float:
        """How long to wait, by the processor time since the last call."""
        now, since = time.thread_time(), self._since
        self._since = now
        return max(LOOK_S, SHARE * (now - since))


class Sockets(Protocol):
    """Sockets to peers, by what they are connected to as ZeroMQ writes it."""

    def socket_endpoints(self) -> list[str]: ...

    def close_socket(self, endpoint: str, unused_s: float | None = None) -> None: ...


class SocketSweep:
    """Closes sockets, every `SWEEP_S` seconds: to peers at whose port nobody listens any more, and unused ones.

    The engine keeps them. ZeroMQ goes on trying to reach each of them, ten times a second, and what still waits in one
    is sent to whoever is given that port next. A peer whose host is gone, as a deleted pod's, does not refuse: its
    socket is one that nobody uses, and a context has only so many.
    """

    def __init__(self, books: Sequence[Sockets], in_use: Callable[[], Iterable[Endpoint]] = lambda: ()):
        """in_use: peers to which there may be something to say at any time."""
        self._books, self._in_use = books, in_use
        self._swept_at = time.monotonic()

    def sweep(self) -> None:
        """Look for them if it is time to."""
        now = time.monotonic()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        peers: dict[Endpoint, list[tuple[Sockets, str]]] = {}
        for sockets in self._books:
            for at in sockets.socket_endpoints():
                peers.setdefault(host_and_port(at.removeprefix("tcp://")), []).append((sockets, at))
        gone, in_use = peer_liveness.gone(peers), {*self._in_use()}
        for peer, found in peers.items():
            for sockets, at in found if peer in gone or peer not in in_use else ():
                sockets.close_socket(at, None if peer in gone else UNUSED_S)


class PrefillWatch:
    """Decode: finds out which prefills are gone as soon as the operating system says that their processes are.

    The engine asks their bootstrap servers, and takes one for lost after two failures, ten seconds or more; one that
    was restarted meanwhile it never misses, and what it goes on to send nobody receives.
    """

    def __init__(
        self,
        ports: Callable[[], dict[str, set[Endpoint]]],
        is_awaited: Callable[[str], bool],
        on_gone: Callable[[str], None],
        sweep: SocketSweep,
    ):
        """ports: of each prefill, by address, where its processes listen. is_awaited: whether it has requests of this
        worker. on_gone: is told of one that is gone."""
        self._ports, self._is_awaited, self._on_gone, self._sweep = ports, is_awaited, on_gone, sweep
        # When each was last looked at.
        self._looked: dict[str, float] = {}

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self.run, daemon=True, name="watch-prefills").start()

    def run(self) -> None:
        """Look again and again."""
        pause = Pause()
        while True:
            time.sleep(pause.seconds())
            try:
                self._sweep.sweep()
                self._check()
            except Exception:
                logger.exception("Could not look after prefills")

    def _check(self) -> None:
        now, known = time.monotonic(), self._ports()
        due = {
            addr: ports
            for addr, ports in known.items()
            if self._is_awaited(addr) or now - self._looked.get(addr, 0.0) >= IDLE_LOOK_S
        }
        self._looked = {addr: at for addr, at in self._looked.items() if addr in known} | dict.fromkeys(due, now)
        try:
            gone = peer_liveness.gone(port for ports in due.values() for port in ports)
        except Exception:
            # One of them cannot be looked at: each by itself, which takes longer.
            gone = None
        for addr, ports in due.items():
            try:
                # One of its schedulers is enough.
                if (peer_liveness.gone(ports) if gone is None else gone) & ports:
                    self._on_gone(addr)
            except Exception:
                logger.exception("Could not look after prefill %s", addr)


class Books(Protocol):
    """What a prefill rank has of rooms."""

    rooms: Rooms
    transfer_infos: dict[int, Any]

    @property
    def transfer_timeout(self) -> float: ...

    def end_room(self, room: int, reason: str | None = None) -> None: ...

    def forget(self, room: int) -> None: ...


class Unclaimed:
    """What decode has asked for, and of which no request has come here. None may come any more."""

    def __init__(self, books: Books) -> None:
        self._books = books
        # Of what decode workers without the flag have asked for, by room: what that is, and since when it is known.
        self._seen: dict[int, tuple[list[Any], float]] = {}

    def rooms(self) -> list[int]:
        """Which they are. Takes the rooms' lock, for `AT_ONCE` of what has been asked for at a time."""
        books, found = self._books, []
        # A copy in one go: not all who change it take the lock.
        asked = list(books.transfer_infos)
        for first in range(0, len(asked), AT_ONCE):
            with books.rooms.lock:
                found += [room for room in asked[first : first + AT_ONCE] if room not in books.rooms.live]
        return found

    def drop(self, rooms: Iterable[int], reason: str) -> None:
        """Who asked for ``rooms`` is gone. Of one whose request is not here, only why it fails is kept."""
        books = self._books
        with books.rooms.lock:
            for room in set(rooms):
                if room in books.transfer_infos and room not in books.rooms.live:
                    books.end_room(room)
                    books.forget(room)
                    books.rooms.refuse(room, reason)

    def expire(self) -> None:
        """Forget what decode workers without the flag have asked for and must have given up.

        They do not say so, and nobody looks at their ports. Their rooms may be used again.
        """
        now, rooms = time.monotonic(), self.rooms()
        for room in self._seen.keys() - set(rooms):
            del self._seen[room]
        for first in range(0, len(rooms), AT_ONCE):
            with self._books.rooms.lock:
                for room in rooms[first : first + AT_ONCE]:
                    self._expire(room, now)

    def _expire(self, room: int, now: float) -> None:
        books = self._books
        asked = books.transfer_infos.get(room)
        infos = [] if asked is None else list(asked.values())
        with_flag = any(getattr(info, "names_prefix", False) for info in infos)
        if asked is None or room in books.rooms.live or with_flag:
            # Gone or begun meanwhile, or one that says itself when it gives up.
            self._seen.pop(room, None)
            return
        before, since = self._seen.get(room, ([], now))
        if [*map(id, before)] != [*map(id, infos)]:
            # It has been asked for anew, or by another rank.
            since = now
        self._seen[room] = infos, since
        if now - since >= books.transfer_timeout:
            books.end_room(room)
            books.forget(room)
            del self._seen[room]


class DecodeWatch:
    """Prefill: fails the requests of a decode rank as soon as the operating system says that it is gone.

    In the engine those that it had not asked for wait until a time-out, over NIXL as long as their client does; and the
    router waits for both workers. Only of ranks that run with the flag; nobody is looked at who has no request here,
    but once.
    """

    def __init__(
        self,
        rooms: Rooms,
        asked: Callable[[int], Iterable[Endpoint]],
        sweep: SocketSweep,
        unclaimed: Unclaimed,
        on_gone: Callable[[], None] = lambda: None,
    ):
        """asked: the decode ranks with the flag that have asked for the KV of a room; called with the rooms' lock.

        on_gone: called for each that is gone.
        """
        self._rooms, self._asked, self._sweep, self._on_gone = rooms, asked, sweep, on_gone
        self._unclaimed = unclaimed
        # Decode ranks that have not refused a connection, and those of them that have been found to be gone since.
        self.reachable: set[Endpoint] = set()
        self._told: set[Endpoint] = set()

    def start(self) -> None:
        """Start the thread, and the one that finds out whether this worker has stood still."""
        self._rooms.pulse.start()
        threading.Thread(target=self.run, daemon=True, name="watch-decodes").start()

    def run(self) -> None:
        """Look again and again."""
        pause = Pause()
        while True:
            self._rooms.wait_for_newcomers(pause.seconds())
            try:
                self._sweep.sweep()
                self._check()
            except Exception:
                logger.exception("Could not look after decode workers")

    def _check(self) -> None:
        self._unclaimed.expire()
        rooms = self._rooms_by_rank()
        # Who ends now has been there.
        ranks = rooms.keys() | self._rooms.take_newcomers()
        gone = peer_liveness.gone(ranks)
        if len(self.reachable) > REMEMBERED_ROOMS:
            self.reachable.clear()
        self.reachable |= ranks - gone
        self._told = self._told.intersection(self.reachable) - (ranks - gone)
        # Over NIXL nobody else connects to it from here, and a firewall may refuse that in its place.
        for host, port in gone & self.reachable & rooms.keys():
            lost = rooms[host, port]
            reason = f"decode {host}:{port} is gone: it refuses connections"
            # Not again for each request that comes after that.
            if (host, port) not in self._told:
                self._told.add((host, port))
                logger.error("Decode at %s:%s is gone, and with it %s requests", host, port, len(lost))
                self._on_gone()
            with self._rooms.lock:
                # Nor may another of its ranks, or another worker, wait for it.
                self._unclaimed.drop([room for room in lost if {*self._asked(room)} <= gone], reason)
            self._rooms.lose_decode(lost, reason)

    def _rooms_by_rank(self) -> dict[Endpoint, list[int]]:
        """The live requests that go on, by the decode ranks in which they wait or that have asked for them.

        And what has been asked for whose request has not come here, and may never.
        """
        found: dict[Endpoint, list[int]] = {}
        books, asked = self._rooms, self._unclaimed.rooms()
        with books.lock:
            live = list(books.live)
        # Some may have come since.
        unclaimed = list({*asked}.difference(live))
        for first in range(0, len(live), AT_ONCE):
            with books.lock:
                for room in live[first : first + AT_ONCE]:
                    sender = books.live.get(room)
                    # One that has failed stays here while something is still being written for it.
                    if sender is not None and room not in books.refused and not sender.has_failed():
                        for rank in {*self._asked(room), *books.waiting.get(room, ())}:
                            found.setdefault(rank, []).append(room)
        for first in range(0, len(unclaimed), AT_ONCE):
            with books.lock:
                for room in unclaimed[first : first + AT_ONCE]:
                    for rank in self._asked(room):
                        found.setdefault(rank, []).append(room)
        return found
