"""A peer that does not answer, or does not read, holds nobody up: no scheduler's thread waits for one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_mooncake_wire as mooncake_wire
import test_nixl_wire as nixl_wire
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import handshakes, peer_watch
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.common.handshakes import Connections, RankAnswers
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.peer_liveness import gone, nothing_listens, refusing
from sglang.srt.disaggregation.common.peer_sockets import Loss, PeerSockets
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, PrefillPeers
from sglang.srt.disaggregation.common.rooms import Rooms
from waiting import until

from sglang_pd_radix.tools.cluster import free_ports

# For what would never end. Nothing is measured.
LONG_S = 20
IN_BACKGROUND = handshakes.in_background


@pytest.fixture(params=["nixl", "mooncake"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = (nixl_wire if request.param == "nixl" else mooncake_wire).World(monkeypatch)
    yield made
    if request.param == "mooncake":
        made.close()


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


@pytest.fixture
def deaf() -> Iterator[int]:
    """A port at which a worker stands still: connections come about, and nobody reads."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(10)
        yield listener.getsockname()[1]


def in_time(work: Callable[[], Any]) -> None:
    """Do ``work``, which may wait for nobody."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "it waits for a peer"
    if errors:
        raise errors[0]


# ---- whether a peer is gone ----


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


def test_a_scheduler_goes_on_where_the_system_has_no_thread_left(monkeypatch, no_threads) -> None:
    """As when requests name many prefills that do not answer, each of which is asked by a thread. Later it is asked."""
    asked: list[str] = []
    monkeypatch.setattr(PrefillPeers, "ask_for_prefix", lambda peers, addr: asked.append(addr))
    peers = PrefillPeers(lambda: None, lambda addr: None, lambda addr: True)
    answers, connections = RankAnswers(), Connections()

    def ask() -> dict[str, int]:
        peers.query("127.0.0.1:1")
        return answers.query("127.0.0.1:1", [5], lambda addr, rooms: {str(room): 3 for room in rooms})

    with no_threads():
        assert ask() == {} and not asked
        attempt = connections.start("127.0.0.1:1", 0, lambda: None)
        # Those that wait for it fail, and no others.
        assert attempt.over and attempt.reason == "can't start new thread"
    known: dict[str, int] = {}
    until(lambda: known.update(ask()) or (known and asked), "all have been asked")
    assert known == {"5": 3}


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


# ---- messages that are not taken ----


def fill(receiver: Any) -> None:
    """Send words to its prefill until none is taken."""
    for _ in range(200_000):
        for peer in receiver.bootstrap_infos:
            receiver._send_to(peer, receiver._notice(b"word" * 1000))
    raise AssertionError("everything is taken")


def test_no_message_to_a_prefill_that_reads_nothing_is_waited_for(world: Any, deaf: int) -> None:
    """ZeroMQ waited when its queue was full, for good, and so did who wanted the socket's lock."""
    manager = world.decode[0].manager
    first, second = (world.request(room, 24, 8).start_prefill().start_decode().receivers[0] for room in (1, 2))
    manager.prefills.capabilities[first.bootstrap_addr] = Capabilities(version=1, queued=True)
    for receiver in (first, second):
        receiver.fenced = True
        receiver.bootstrap_infos = [{**info, "rank_port": deaf} for info in receiver.bootstrap_infos]
    with pytest.raises(NotTaken, match=f"tcp://127.0.0.1:{deaf} takes no messages"):
        in_time(lambda: fill(first))
    # Its word is said again by the queue.
    in_time(first.announce)
    with pytest.raises(NotTaken):
        in_time(lambda: first.send_metadata(np.arange(4, dtype=np.int32), 0, None, decode_prefix_len=8))
    first.fail("not taken")
    in_time(first.cancel)
    # Nobody has been asked to write for it.
    assert first.writers_done()
    # The engine's own message, to a prefill without the package.
    with pytest.raises(NotTaken):
        in_time(lambda: second.send_metadata(np.arange(4, dtype=np.int32), 0, None))
    # From any thread, as prefill's are.
    with pytest.raises(NotTaken):
        in_time(lambda: manager.connect_unwaiting("127.0.0.1", deaf).send_multipart([b"word"]))


def test_a_request_that_one_prefill_rank_does_not_take_is_ended_by_all(monkeypatch, deaf: int) -> None:
    """Over NIXL the rank that was asked answered, and the other, which was not, never did: 300 s of quarantine."""
    world = nixl_wire.World(monkeypatch, prefill_tp=2)
    request = world.request(1).start_prefill().start_decode()
    (receiver,) = request.receivers
    receiver.fenced = True
    asked, unasked = receiver.bootstrap_infos
    receiver.bootstrap_infos = [asked, {**unasked, "rank_port": deaf}]
    with pytest.raises(NotTaken):
        in_time(lambda: fill(receiver))
    with pytest.raises(NotTaken):
        request.ask()
    assert receiver.state.asked
    receiver.fail("not taken")
    in_time(receiver.cancel)
    assert receiver.state.untold == receiver.bootstrap_infos[1:] and not receiver.writers_done()
    # It goes on, and takes messages.
    receiver.bootstrap_infos[1]["rank_port"] = unasked["rank_port"]
    receiver.state.told_at -= 1e6
    assert not receiver.writers_done()
    request.wait_senders(KVPoll.Failed)
    for rank in world.prefill:
        rank.manager.settle()
        assert not rank.manager.cancels
    until(receiver.writers_done, "both ranks have answered")
    assert not receiver.state.untold


def test_a_rank_whose_request_never_came_is_answered_all_the_same(world: Any, monkeypatch) -> None:
    request = world.request(1, 24, 8).start_prefill().start_decode()
    (receiver,) = request.receivers
    receiver.fenced = True
    with monkeypatch.context() as cut:
        # Lost with the connection.
        cut.setattr(receiver, "_send_to", lambda peer, frames: None)
        request.ask()
    assert receiver.state.asked
    receiver.fail("lost")
    receiver.cancel()
    request.wait_senders(KVPoll.Failed)
    until(receiver.writers_done, "prefill's answer")


# ---- handshakes ----


class Gate:
    """The bootstrap server of a world's prefill, which answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, receiver_type: type) -> None:
        self.open, self.asked = threading.Event(), 0
        self.answer: Callable[[dict | None], Any] = lambda answer: answer
        ask = receiver_type._get_bootstrap_info_from_server

        def gated(receiver: Any, *rank: int) -> dict | None:
            self.asked += 1
            assert self.open.wait(LONG_S)
            return self.answer(ask(receiver, *rank))

        monkeypatch.setattr(receiver_type, "_get_bootstrap_info_from_server", gated)
        monkeypatch.setattr(handshakes, "in_background", IN_BACKGROUND)


def begin(world: Any, room: int) -> Any:
    """A request whose handshake has begun."""
    module = nixl_wire if isinstance(world, nixl_wire.World) else mooncake_wire
    receiver_type = module.NixlKVReceiver if module is nixl_wire else module.MooncakeKVReceiver
    receiver = receiver_type(world.decode[0].manager, getattr(world, "addr", nixl_wire.ADDR), room)
    in_time(lambda: receiver.init(0))
    return receiver


def gate_of(world: Any, monkeypatch: pytest.MonkeyPatch) -> Gate:
    nixl = isinstance(world, nixl_wire.World)
    return Gate(monkeypatch, nixl_wire.NixlKVReceiver if nixl else mooncake_wire.MooncakeKVReceiver)


def test_a_handshake_is_made_without_standing_still_and_once_for_all(world: Any, monkeypatch) -> None:
    """The engine asks the bootstrap server on the scheduler's thread, for five seconds if it does not answer."""
    gate = gate_of(world, monkeypatch)
    receivers = [begin(world, room) for room in (1, 2, 3)]
    manager, registered = world.decode[0].manager, []
    for receiver in receivers:
        register = receiver._register_kv_args
        receiver._register_kv_args = lambda register=register: (registered.append(True), register())
    assert [receiver.poll() for receiver in receivers] == [KVPoll.Bootstrapping] * 3
    # Given up meanwhile: it stays so, and is nobody's concern.
    receivers[0].abort()
    assert receivers[0].poll() == KVPoll.Failed
    until(lambda: gate.asked == 1, "the question")
    gate.open.set()
    until(lambda: receivers[1].poll() == KVPoll.WaitingForInput, "the handshake")
    assert receivers[2].poll() == KVPoll.WaitingForInput and receivers[0].poll() == KVPoll.Failed
    assert gate.asked == 1 and registered == [True] and receivers[0].bootstrap_infos is None
    # One that comes later finds everything.
    later = begin(world, 4)
    assert later.poll() == KVPoll.WaitingForInput and gate.asked == 1
    assert not manager.connections._attempts


@pytest.mark.parametrize("wrong", [{"rank_port": "5"}, {"rank_port": 65536}, {"rank_ip": None}, 7])
def test_an_answer_that_names_no_place_fails_those_that_waited(world: Any, monkeypatch, wrong: Any) -> None:
    """Who watches prefills would stumble over it at every look, and find out of none that it is gone."""
    gate = gate_of(world, monkeypatch)
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


@pytest.mark.parametrize("size", ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size"])
def test_a_prefill_of_no_ranks_cannot_be_used(world: Any, size: str) -> None:
    """The scheduler would divide by it."""
    manager = world.decode[0].manager
    sizes: Any = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
    info = PrefillServerInfo(**{**sizes, size: 0}, page_size=None, kv_cache_dtype=None, follow_bootstrap_room=True)
    with pytest.raises(ValueError, match=f"it says that its {size} is 0"):
        manager._resolve_rank_mapping(info)


def test_a_prefill_that_is_lost_while_it_is_asked_leaves_no_connection(world: Any, monkeypatch) -> None:
    gate = gate_of(world, monkeypatch)
    receiver = begin(world, 1)
    manager = world.decode[0].manager
    until(lambda: gate.asked == 1, "the question")
    info = manager.prefill_info_table[receiver.bootstrap_addr]
    manager._handle_node_failure(receiver.bootstrap_addr)
    assert receiver.poll() == KVPoll.Failed
    gate.open.set()
    until(lambda: manager.connections.get(receiver.bootstrap_addr, 0).over, "the end of the question")
    assert not manager.connection_pool and receiver.bootstrap_infos is None
    manager.prefill_info_table[receiver.bootstrap_addr] = info
    later = begin(world, 2)
    until(lambda: later.poll() == KVPoll.WaitingForInput, "a handshake of its own")
    assert gate.asked == 2


# ---- books that two threads use ----


def test_a_prefill_is_lost_while_the_scheduler_opens_and_closes_rooms(world: Any, monkeypatch) -> None:
    """The engine iterates over the set that the scheduler has in hand: an error, and the rest waited for 300 s."""
    receivers = [world.request(room, 24, 8).start_decode().receivers[0] for room in (1, 2, 3)]
    manager, addr = world.decode[0].manager, receivers[0].bootstrap_addr
    in_hand, update = manager.addr_to_rooms_tracker[addr], manager.update_status

    def interleaved(room: int, status: KVPoll) -> None:
        in_hand.add(room + 1000)
        update(room, status)

    monkeypatch.setattr(manager, "update_status", interleaved)
    manager._handle_node_failure(addr)
    assert [receiver.poll() for receiver in receivers] == [KVPoll.Failed] * 3
    with pytest.raises(Exception, match="Losing connection with prefill"):
        receivers[0].failure_exception()


# ---- decode ranks that end early ----


def test_a_decode_rank_that_is_gone_is_counted_once(monkeypatch, caplog) -> None:
    """However many of its requests come after that, which fail all the same; and once more where it has come back."""
    rank = "10.0.0.7", 5000
    peers = PeerSockets(zmq.Context.instance(), 1.0)
    peers.reached.add(rank)
    books: Any = SimpleNamespace(rooms=Rooms(), transfer_infos={})
    gone_ones: list[int] = []
    unclaimed = peer_watch.Unclaimed(books)
    watch = peer_watch.DecodeWatch(peers, books.rooms, lambda room: (), unclaimed, lambda: gone_ones.append(1))

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
            books.rooms.note_waiting(room, *rank)
            sender: Any = Sender()
            sender.bootstrap_room = room
            books.rooms.begin(room, sender)
            watch.check()
            failed.append(room in books.rooms.refused or room not in books.rooms.live)
        return failed

    assert come([0]) == [False]
    lose()
    assert come(range(1, 5)) == [True] * 4
    assert len(gone_ones) == 1 and caplog.text.count("is gone, and with it") == 1
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
    assert len(gone_ones) == 2 and caplog.text.count("is gone, and with it") == 2


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
    watch = peer_watch.DecodeWatch(SimpleNamespace(), books.rooms, asked, peer_watch.Unclaimed(books))  # type: ignore[arg-type]
    found = watch._rooms_by_rank()
    assert sorted(room for rooms in found.values() for room in rooms) == [*range(2 * count)] and len(found) == 3
    assert most == peer_watch.AT_ONCE
