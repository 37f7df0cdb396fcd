"""A peer that does not answer, or does not read, holds nobody up: no scheduler's thread waits for one."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import nixl_world
import numpy as np
import pytest
from engine_classes import engine_class
from prefill_front import peers_of
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import delta_receiver, prefill_peers
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, PrefillServerInfo
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, PrefillPeers, RankAnswers
from waiting import until

# For what would never end. Nothing is measured.
LONG_S = 20
IN_BACKGROUND = prefill_peers.in_background


@pytest.fixture
def deaf() -> Iterator[int]:
    """A port at which a worker stands still: connections come about, and nobody reads."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(10)
        yield listener.getsockname()[1]


@pytest.fixture
def world(wire: Any) -> Any:
    return wire


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


def test_a_scheduler_goes_on_where_the_system_has_no_thread_left(monkeypatch, no_threads) -> None:
    """As when requests name many prefills that do not answer, each of which is asked by a thread. Later it is asked."""
    asked: list[str] = []
    monkeypatch.setattr(PrefillPeers, "ask_for_prefix", lambda peers, addr: asked.append(addr))
    peers, answers = peers_of(), RankAnswers()

    def ask() -> dict[str, int]:
        peers.query("127.0.0.1:1")
        return answers.query("127.0.0.1:1", [5], lambda addr, rooms: {str(room): 3 for room in rooms})

    with no_threads():
        assert ask() == {} and not asked
        # Requests that wait for it fail, and no others.
        assert str(prefill_peers.in_background(lambda: None, "a").exception()) == "can't start new thread"
    known: dict[str, int] = {}
    until(lambda: known.update(ask()) or (known and asked), "all have been asked")
    assert known == {"5": 3}


# ---- messages that are not taken ----


def fill(receiver: Any) -> None:
    """Send words to its prefill until none is taken."""
    for _ in range(200_000):
        for peer in receiver.bootstrap_infos:
            receiver._send_to(peer, [*receiver.header, b"word" * 1000])
    raise AssertionError("everything is taken")


def test_no_message_to_a_prefill_that_reads_nothing_is_waited_for(world: Any, deaf: int) -> None:
    """ZeroMQ waited when its queue was full, for good, and so did who wanted the socket's lock."""
    manager = world.decode[0].manager
    first, second = (world.request(room, 24, 8).start_prefill().start_decode().receivers[0] for room in (1, 2))
    manager.prefills.capabilities[first.bootstrap_addr] = Capabilities(version=1)
    for receiver in (first, second):
        receiver.fenced = True
        receiver.bootstrap_infos = [{**info, "rank_port": deaf} for info in receiver.bootstrap_infos]
    with pytest.raises(NotTaken, match=f"tcp://127.0.0.1:{deaf} takes no messages"):
        in_time(lambda: fill(first))
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
    world = nixl_world.World(monkeypatch, prefill_tp=2)
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.asked = threading.Event(), 0
        self.answer: Callable[[dict | None], Any] = lambda answer: answer
        receiver_type: Any = engine_class(CommonKVReceiver)
        ask = receiver_type._get_bootstrap_info_from_server

        def gated(receiver: Any, *rank: int) -> dict | None:
            self.asked += 1
            assert self.open.wait(LONG_S)
            return self.answer(ask(receiver, *rank))

        monkeypatch.setattr(receiver_type, "_get_bootstrap_info_from_server", gated)
        monkeypatch.setattr(delta_receiver, "in_background", IN_BACKGROUND)


def begin(world: Any, room: int) -> Any:
    """A request whose handshake has begun."""
    receiver = world.request_type.receiver_type(world.decode[0].manager, world.addr, room)
    in_time(lambda: receiver.init(0))
    return receiver


def test_a_handshake_is_made_without_standing_still_and_once_for_all(world: Any, monkeypatch) -> None:
    """The engine asks the bootstrap server on the scheduler's thread, for five seconds if it does not answer."""
    gate = Gate(monkeypatch)
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
    assert not manager.rank_queries


@pytest.mark.parametrize("size", ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size"])
def test_a_prefill_of_no_ranks_cannot_be_used(world: Any, size: str) -> None:
    """The scheduler would divide by it."""
    manager = world.decode[0].manager
    sizes: Any = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
    info = PrefillServerInfo(**{**sizes, size: 0}, page_size=None, kv_cache_dtype=None, follow_bootstrap_room=True)
    with pytest.raises(ValueError, match=f"it says that its {size} is 0"):
        manager._resolve_rank_mapping(info)


def test_a_prefill_that_is_lost_while_it_is_asked_leaves_no_connection(world: Any, monkeypatch) -> None:
    gate = Gate(monkeypatch)
    receiver = begin(world, 1)
    manager = world.decode[0].manager
    until(lambda: gate.asked == 1, "the question")
    info = manager.prefill_info_table[receiver.bootstrap_addr]
    manager._handle_node_failure(receiver.bootstrap_addr)
    assert receiver.poll() == KVPoll.Failed
    # Another one has its address now.
    manager.prefill_info_table[receiver.bootstrap_addr] = copy.copy(info)
    joined = begin(world, 3)
    gate.open.set()
    until(lambda: joined.poll() == KVPoll.Failed, "the end of the question")
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
