"""A worker finds out at once which of its peers are lost, and fails what it has of these."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import nixl_world as nixl_wire
import pytest
import zmq
from prefill_loop import PrefillLoop, PrefillScheduler
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import peer_watch
from sglang.srt.disaggregation.common.peer_liveness import gone, nothing_listens, refusing
from sglang.srt.disaggregation.common.peer_sockets import Loss, PeerSockets
from sglang.srt.disaggregation.common.prefill_peers import FORGOTTEN_S, MOST_ASKED
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.common.waiting_rooms import WaitingRooms
from test_lost_on_prefill import assert_ends
from test_prefill_rooms import OTHER, ROOM, loop
from test_rooms import sender
from test_silent_peers import Gate, begin, world
from waiting import until

from sglang_pd_radix.tools.cluster import free_ports

__all__ = ["loop", "world"]


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """Where connections neither come about nor are refused: as behind a cut wire."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(0)
        here = "127.0.0.1", listener.getsockname()[1]
        held = [socket.socket() for _ in range(3)]
        for waiting in held:
            waiting.setblocking(False)
            waiting.connect_ex(here)
        yield here
        for waiting in held:
            waiting.close()


def test_all_peers_are_looked_at_together(silent: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive:
        here, there = alive.getsockname(), ("127.0.0.1", free_ports(1)[0])
        wrong = [("localhost", there[1]), ("127.0.0.1", 1 << 20), ("127.0.0.1", -1)]
        # DNS is not asked for names.
        assert refusing([here, silent, there, *wrong]) == {there}
        assert gone([silent, here]) == set() and gone([there, here]) == {there}
    assert nothing_listens(*here) and not nothing_listens(*silent)
    # At both addresses of the name, if it has two.
    assert nothing_listens("localhost", there[1]) and not nothing_listens("no such host.", 1)


def test_pages_of_a_silent_prefill_are_kept_and_those_of_one_that_is_gone_are_not(world: Any, monkeypatch) -> None:
    """Of one that does not answer nobody knows that it writes no more."""
    (receiver,) = world.request(1, 24, 8).start_prefill().start_decode().ask().receivers
    receiver.fenced, manager = True, world.decode[0].manager
    loss = Loss(0.0, gone=False)
    (peer,) = receiver.bootstrap_infos
    monkeypatch.setitem(manager.peer_sockets._lost, (peer["rank_ip"], peer["rank_port"]), loss)
    peer_watch.fail_lost_prefills(manager)
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    assert not receiver.writers_done()
    monkeypatch.setitem(manager.peer_sockets._lost, (peer["rank_ip"], peer["rank_port"]), loss._replace(gone=True))
    assert receiver.writers_done()


@pytest.mark.parametrize("wrong", [{"rank_port": "5"}, {"rank_port": 65536}, {"rank_ip": None}, 7])
def test_an_answer_that_names_no_place_fails_those_that_waited(world: Any, monkeypatch, wrong: Any) -> None:
    """Who watches prefills would stumble over it at every look, and find out of none that it is gone."""
    gate = Gate(monkeypatch)
    gate.answer = lambda answer: {**answer, **wrong} if isinstance(wrong, dict) else wrong
    receiver = begin(world, 1)
    gate.open.set()
    until(lambda: receiver.poll() == KVPoll.Failed, "its failure")
    with pytest.raises(Exception, match=f"prefill {receiver.bootstrap_addr} does not say where a rank listens: "):
        receiver.failure_exception()
    assert not world.decode[0].manager.connection_pool
    gate.answer = lambda answer: answer
    later = begin(world, 2)
    until(lambda: later.poll() == KVPoll.WaitingForInput, "the handshake")


def test_a_prefill_that_refuses_for_a_while_is_gone_and_is_not_remembered_for_good(monkeypatch):
    """Requests name prefills. One whose server is started anew refuses for a moment."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(peer_watch, "time", clock)
    monkeypatch.setattr(peer_watch, "nothing_listens", lambda host, port: port % 2 == 0)
    book = peer_watch.Refusing()

    def ask(addr: str, answered: bool = False) -> str | None:
        book.note(addr, answered)
        return book.why_unreached(addr, 999.0)

    assert ask("127.0.0.1:1") is None and ask("127.0.0.1:2") is None
    clock.now += 1.1 * peer_watch.REFUSING_S
    assert ask("127.0.0.1:1") is None
    assert ask("127.0.0.1:2") == "prefill 127.0.0.1:2 is gone: it refuses connections"
    # Not for who has waited since then only, nor once it has answered, nor long after that.
    assert book.why_unreached("127.0.0.1:2", clock.now) is None
    assert ask("127.0.0.1:2", True) is None and ask("127.0.0.1:2") is None
    clock.now += 11 * peer_watch.REFUSING_S
    assert ask("127.0.0.1:2") is None
    for port in range(2, 4 * MOST_ASKED, 2):
        clock.now += FORGOTTEN_S / MOST_ASKED
        ask(f"127.0.0.2:{port}")
    assert len(book._since) <= MOST_ASKED + 2


def test_a_decode_rank_that_is_gone_is_counted_once(monkeypatch, caplog) -> None:
    """However many of its requests come after that, which fail all the same; and once more where it has come back."""
    rank = "10.0.0.7", 5000
    peers = PeerSockets(zmq.Context.instance(), 1.0)
    peers.reached.add(rank)
    books: Any = SimpleNamespace(rooms=Rooms(), transfer_infos={})
    gone_ones: list[int] = []
    unclaimed, waiting = peer_watch.Unclaimed(books), WaitingRooms(books.rooms, lambda *peer: None)
    watch = peer_watch.DecodeWatch(peers, books.rooms, waiting, lambda room: (), unclaimed, lambda: gone_ones.append(1))

    def lose() -> None:
        peers.connected.discard(rank)
        peers._lost[rank] = Loss(0.0, gone=True)

    class Sender:
        bootstrap_room = 0

        def has_failed(self) -> bool:
            return False

        def poll(self) -> int:
            return 0

    def come(rooms: Iterable[int]) -> list[bool]:
        failed = []
        for room in rooms:
            waiting.note(room, *rank)
            sender: Any = Sender()
            sender.bootstrap_room = room
            books.rooms.begin(room, sender)
            watch.check()
            failed.append(room in books.rooms.refused or room not in books.rooms.live)
        return failed

    assert come([0]) == [False]
    lose()
    assert come(range(1, 5)) == [True] * 4
    assert len(gone_ones) == 1 and caplog.text.count("is lost, and with it") == 1
    # It is spoken to once more, in vain.
    del peers._lost[rank]
    assert come([5]) == [False]
    lose()
    assert come([6]) == [True] and len(gone_ones) == 1
    del peers._lost[rank]
    peers.connected.add(rank)
    assert come([7]) == [False]
    lose()
    assert come([8, 9]) == [True] * 2
    assert len(gone_ones) == 2 and caplog.text.count("is lost, and with it") == 2


def test_a_look_at_many_rooms_leaves_the_lock_to_the_scheduler() -> None:
    books: Any = SimpleNamespace(rooms=Rooms(), transfer_infos={})
    lock, held, most = books.rooms.lock, 0, 0

    class Counted:
        def __enter__(self) -> None:
            nonlocal held
            held = 0
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            nonlocal most
            most = max(most, held)
            lock.release()

    def asked(room: int) -> list[tuple[str, int]]:
        nonlocal held
        held += 1
        return [("10.0.0.7", 5000 + room % 3)]

    count = 5 * peer_watch.AT_ONCE
    for room in range(count):
        books.rooms.live[room] = SimpleNamespace(has_failed=lambda: False)
        books.transfer_infos[count + room] = {}
    books.rooms.lock = Counted()
    watch = peer_watch.DecodeWatch(SimpleNamespace(), books.rooms, {}, asked, peer_watch.Unclaimed(books))  # type: ignore[arg-type]
    found = watch._rooms_by_rank()
    assert sorted(room for rooms in found.values() for room in rooms) == [*range(2 * count)] and len(found) == 3
    assert most == peer_watch.AT_ONCE


def test_of_a_lost_decode_those_fail_that_are_here() -> None:
    rooms = Rooms()
    for room in (1, 2, 4):
        rooms.begin(room, sender(room))
    rooms.refuse(2, "no such agent")
    rooms.end(4)
    books: Any = SimpleNamespace(rooms=rooms, transfer_infos={})
    watch = peer_watch.DecodeWatch(SimpleNamespace(), rooms, {}, lambda room: (), peer_watch.Unclaimed(books))  # type: ignore[arg-type]
    watch._lose([1, 2, 3, 4], "decode is gone")
    # The second has its reason already, the third never came, and the fourth has ended.
    assert rooms.refused == {1: "decode is gone", 2: "no such agent"}
    assert [one.bootstrap_room for one in rooms.given_up] == [1]


def test_a_decode_that_is_gone_is_lost_once(loop: PrefillLoop, monkeypatch: pytest.MonkeyPatch):
    """Also while something is still being written to it: the watch looks again, and counted and told it once more."""
    loop.arrive(100, ROOM)
    loop.wire.wire.held = True
    manager = loop.wire.prefill[0].manager
    gone: set = set()
    lost: list[int] = []
    monkeypatch.setattr(manager.peer_sockets, "lost", lambda: dict.fromkeys(gone, Loss(0.0, True)))
    monkeypatch.setattr(manager.decode_watch, "_on_lost", lambda: lost.append(len(gone)))
    askers = manager._askers(ROOM)
    manager.peer_sockets.reached |= askers

    def before(scheduler: PrefillScheduler) -> None:
        if scheduler.tp_rank == 0 and len(scheduler.steps) >= 2:
            gone.update(askers)
            manager.decode_watch.check()

    loop.before = before
    loop.run(10)
    assert len(lost) == len(askers) > 0
    assert_ends(loop, 4, "is gone: it refuses connections")


def test_what_a_decode_that_is_gone_has_asked_for_is_forgotten(loop: PrefillLoop, monkeypatch: pytest.MonkeyPatch):
    """Also of requests that have not come here, and may never; those of others stay."""
    loop.arrive(100, ROOM)
    for room in (OTHER, OTHER + 1):
        loop.wire.request(room, 100).start_decode().ask()
    manager = loop.wire.prefill[0].manager
    ranks = [rank.manager for rank in loop.wire.prefill]
    nixl_wire.until(lambda: all({OTHER, OTHER + 1} <= {*rank.transfer_infos} for rank in ranks), "decode has asked all")
    watch, gone = manager.decode_watch, manager._askers(OTHER)
    watch.check()
    assert {ROOM, OTHER, OTHER + 1} <= {*manager.transfer_infos}
    manager.peer_sockets.reached |= gone
    monkeypatch.setattr(manager.peer_sockets, "lost", lambda: dict.fromkeys(gone, Loss(0.0, True)))
    watch.check()
    # It is here, and ends with its poll.
    assert {*manager.transfer_infos} == {ROOM}
    assert not {OTHER, OTHER + 1} & {*manager.request_status}
    for scheduler in loop.schedulers[1:]:
        scheduler.disagg_prefill_bootstrap_queue.kv_manager.decode_watch._unclaimed.drop([OTHER], "decode is gone")
    # One that comes all the same is told at once.
    loop.arrive(100, OTHER, asked=False)
    loop.run(6)
    for scheduler in loop.schedulers:
        reasons = [req.finished_reason.message for req, _ in scheduler.told if req.bootstrap_room == OTHER]
        assert len(reasons) == 1 and "gone" in reasons[0]
