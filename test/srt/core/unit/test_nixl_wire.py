"""What only the NIXL backend has: it trusts nothing that comes over the wire. What it shares: test_wire.py."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nixl_world import ADDR, BAD, ENGINE_RECEIVER, GOOD, ITEM, Agent, Rank, Transfer, World, bare, message
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver, TransferStatus
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until
from wire_ends import sent_frames


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


# ---- what decode sends ----


def test_the_registration_is_the_engines_byte_for_byte():
    receiver = bare()
    engines = sent_frames(receiver, lambda: ENGINE_RECEIVER._register_kv_args(receiver))
    assert sent_frames(receiver, receiver._register_kv_args) == engines and len(engines) == 2


def test_a_prefill_without_the_patch_gets_the_engines_message(world):
    """Whether a prefix may be named is a property of the peer and not of this worker."""
    world.decode[0].manager.prefills.capabilities.clear()
    receiver = NixlKVReceiver(world.decode[0].manager, ADDR, BAD)
    assert not receiver.peer_takes_prefix


# ---- requests for KV ----


@pytest.mark.parametrize("length", [0, 2, 5, 8, 10])
def test_a_truncated_message_fails_at_most_its_request(world, length):
    """ZeroMQ delivers all frames or none, so only a broken peer sends fewer; it must not hang or half-serve."""
    request = world.request(BAD).start_prefill().start_decode()
    world.push(request.frames()[:length] or [b""])
    if length < 2:
        assert [sender.poll() for sender in request.senders] == [KVPoll.Bootstrapping]
    else:
        for sender in request.senders:
            if sender.poll() == KVPoll.WaitingForInput:
                sender.init(request.num_pages, 1)
                sender.send(np.arange(request.num_pages, dtype=np.int32))
        # There is nobody to tell without a name, nor a decode worker without the flag, whose wire stays the engine's.
        request.assert_fails("refused decode's request|transfer over NIXL failed: .", 4 < length < 8 or length == 10)
    world.assert_healthy()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({9: b"12", 5: 4}, "ranks disagree: prefixes .8, 12"),
        # With as many pages each.
        ({9: b"12"}, "ranks disagree: prefixes .8, 12"),
        ({5: 4}, "ranks disagree: .* pages .4, 5"),
        ({9: None}, "ranks disagree: prefixes .0, 8"),
    ],
)
def test_decode_ranks_that_contradict_each_other_fail_the_request(monkeypatch, changed, reason):
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    request = world.request(BAD).start_prefill().start_decode()
    first, second = request.frames(0), request.frames(1)
    assert first[4] != second[4] and first[7] == second[7] == b"2"
    for at, value in changed.items():
        if value is None:
            del second[at:]
        else:
            second[at] = value if isinstance(value, bytes) else second[at][: 4 * value]
    world.push(first, second)
    if 9 in changed and changed[9] is None:
        # A rank without the flag is not told: its wire is the engine's.
        request.receivers.pop()
    request.assert_fails(reason)
    world.assert_healthy()


@pytest.mark.parametrize("second_says", [b"1", b"3", b"-1"])
def test_decode_ranks_that_count_each_other_differently_do_not_wait_for_ever(monkeypatch, second_says):
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    request = world.request(BAD).start_prefill().start_decode()
    first, second = request.frames(0), request.frames(1)
    second[7] = second_says
    world.push(first, second)
    request.assert_fails("decode")
    world.assert_healthy()


def test_a_repeated_request_changes_nothing(world, caplog):
    request = world.request(BAD).bootstrap()
    frames = request.frames()
    with caplog.at_level(logging.ERROR):
        world.push(frames, [*frames[:9], b"0", b"1"])
    assert f"room {BAD}" in caplog.text and "repeated" in caplog.text
    assert [sender.poll() for sender in request.senders] == [KVPoll.WaitingForInput]
    request.send()
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    kv = [t for t in world.wire.transfers if b"_kv_" in t.notification]
    assert len(kv) == 1
    # Five pages of the delta, two layers, in one run: to where the first message said.
    assert kv[0].targets[:, 0].tolist() == [(1 << 20) + 34 * ITEM, (2 << 20) + 34 * ITEM]
    assert set(kv[0].targets[:, 1].tolist()) == {5 * ITEM}


@pytest.mark.parametrize("tp", [1, 2])
def test_another_decode_worker_that_asks_for_a_room_fails_alone(world, tp):
    """Chunks begin where the first one's prefix ends; the other had pages that nobody had filled, and a success."""
    first = world.request(7).bootstrap()
    (one,) = world.decode
    world.decode = [Rank(world, DisaggregationMode.DECODE, rank, tp) for rank in range(tp)]
    for two in world.decode:
        for name in ("prefill_info_table", "prefills"):
            setattr(two.manager, name, getattr(one.manager, name))
        two.manager._resolve_rank_mapping(two.manager.prefill_info_table[ADDR])
    other = world.request(7, prefix_len=0).start_decode().ask()
    other.wait_receivers(KVPoll.Failed)
    with pytest.raises(Exception, match="another decode worker has asked for this room"):
        other.receivers[0].failure_exception()
    # Nor does one that nobody knows fail the first.
    world.push(message(7, "stranger"))
    first.send()
    first.wait_senders(KVPoll.Success)
    first.wait_receivers(KVPoll.Success)
    assert {transfer.peer for transfer in world.wire.transfers} == {one.agent.name}


# ---- writes ----


@pytest.mark.parametrize("fails", [False, True])
def test_handles_are_given_back_when_their_writes_have_ended(world, fails):
    """Of one that is under way NIXL would try to call the bytes back. With a lock: another thread uses the agent."""
    world.wire.held = True
    request = world.request(BAD).bootstrap().send(4)
    if fails:
        request.senders[0].fail("lost")
    for transfer in world.wire.transfers:
        assert request.senders[0].poll() == KVPoll.WaitingForInput and not transfer.released
        transfer.finish()
    request.wait_senders(KVPoll.Failed if fails else KVPoll.Success)
    assert world.wire.transfers and all(transfer.released for transfer in world.wire.transfers)
    assert request.senders[0].poll() == (KVPoll.Failed if fails else KVPoll.Success)


def test_a_peer_that_is_gone_fails_its_request_and_not_the_worker(world, monkeypatch):
    """NIXL says so by an exception of every later question about the write, and not by a state."""
    world.wire.held = True
    request, other = world.request(BAD).bootstrap().send(), world.request(GOOD).bootstrap()
    lost = set(map(id, world.wire.transfers))

    def ask(agent: Agent, transfer: Transfer) -> str:
        if id(transfer) in lost:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return transfer.state

    monkeypatch.setattr(Agent, "check_xfer_state", ask)
    request.assert_fails("NIXL reports an error", decode_too=False)
    world.wire.held = False
    other.send()
    other.wait_senders(KVPoll.Success)


def test_a_failed_request_is_over_only_when_nothing_of_it_is_being_written(monkeypatch):
    """One decode rank is being written when the write to the next cannot be posted: its pages are not free yet."""
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    world.wire.held = True
    request = world.request(BAD).bootstrap()
    prefill = world.prefill[0]
    second = list(prefill.manager.transfer_infos[BAD])[1]
    prefill.agent.known.discard(second)
    request.send()
    under_way = list(world.wire.transfers)
    assert under_way and not any(second == transfer.peer for transfer in under_way)
    for _ in range(3):
        assert [sender.poll() for sender in request.senders] != [KVPoll.Failed]
        assert not prefill.told("_fail_")
    for transfer in under_way:
        transfer.finish()
    request.wait_senders(KVPoll.Failed)
    assert prefill.told(f"{BAD}_fail_")


def test_a_failure_on_one_prefill_rank_is_answered_by_all(monkeypatch):
    """The scheduler drops the request on all ranks; decode keeps its pages until each has said that it is done."""
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    request = world.request(BAD).start_prefill().start_decode()
    for receiver in request.receivers:
        receiver.fenced = True
    frames = request.frames(0)
    world.push([*frames[:9], b"-4", b"0"], rank=0)
    request.ask_of(1)
    until(lambda: BAD in world.prefill[1].manager.transfer_infos, "the message is read")
    # What the schedulers do: polls are reduced by MIN, and every rank fails the request.
    until(lambda: min(sender.poll() for sender in request.senders) == KVPoll.Failed, "prefill fails the request")
    for sender in request.senders:
        with pytest.raises(Exception):  # noqa: B017
            sender.failure_exception()
    until(lambda: min(receiver.poll() for receiver in request.receivers) == KVPoll.Failed, "decode fails the request")
    for receiver in request.receivers:
        receiver.cancel()
    for receiver in request.receivers:
        until(receiver.writers_done, "every prefill rank has said that it writes no more")
    for rank in world.prefill:
        assert BAD not in rank.manager.transfer_infos and BAD not in rank.manager.rooms.live


def test_an_idle_prefill_answers_when_the_last_write_of_a_dropped_request_has_ended(world):
    """The engine has let go of the request, and no other comes whose poll could look after it."""
    world.wire.held = True
    request = world.request(BAD).bootstrap()
    for receiver in request.receivers:
        receiver.fenced = True
    request.send()
    prefill = world.prefill[0]
    scheduler = SchedulerDisaggregationPrefillMixin()
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=prefill.manager)
    scheduler.disagg_prefill_inflight_queue = []
    step = scheduler.process_disagg_prefill_inflight_queue

    # As when another prefill rank failed.
    with pytest.raises(RuntimeError):
        request.senders[0].failure_exception()
    step()
    assert not prefill.told("_fail_")
    for transfer in world.wire.transfers:
        transfer.finish()
    step()
    assert prefill.told(f"{BAD}_fail_") and not prefill.manager.rooms.given_up


def test_a_sender_that_has_sent_does_not_end_the_next_request_of_its_room(world):
    """Decode, and with it the client, may have the answer before prefill looks whether all is written."""
    first = world.request(7).bootstrap().send()
    first.wait_receivers(KVPoll.Success)
    first.receivers[0].clear()
    second = world.request(7).start_prefill().start_decode().ask()
    until(lambda: 7 in world.prefill[0].manager.transfer_infos, "decode's request is read")
    first.wait_senders(KVPoll.Success)
    second.begin().send().wait_receivers(KVPoll.Success)


# ---- foreign messages ----


@pytest.mark.parametrize("frames", [[b""], [b"GET / HTTP/1.1\r\n"], [b"NixlMsgGuard"], [b"NixlMsgGuard", b"room"]])
def test_a_foreign_message_is_ignored_with_a_line_in_the_log(world, caplog, frames):
    request = world.request(BAD).start_prefill()
    manager = world.prefill[0].manager
    with caplog.at_level(logging.ERROR):
        world.push(frames)
    assert any("Ignored a message" in record.message for record in caplog.records)
    assert [sender.poll() for sender in request.senders] == [KVPoll.Bootstrapping]
    assert not manager.transfer_infos and not manager.rooms.refused and not manager.decode_kv_args_table
    world.assert_healthy()


@pytest.mark.parametrize("length", [2, 6, 12])
def test_a_truncated_registration_is_ignored(world, length):
    receiver = world.request(GOOD).start_decode().receivers[0]
    frames = sent_frames(receiver, receiver._register_kv_args)[0]
    assert len(frames) == 13
    frames[4] = b"another agent"
    world.push(frames[:length])
    assert "another agent" not in world.prefill[0].manager.decode_kv_args_table
    world.assert_healthy(BAD)


def test_a_registration_that_nixl_refuses_can_be_made_good(world):
    """Half a registration would let requests in that cannot be served, and keep the right one out."""
    receiver = world.request(GOOD).start_decode().receivers[0]
    frames = sent_frames(receiver, receiver._register_kv_args)[0]
    Agent(world.wire, "late")
    frames[4], frames[5] = b"late", b"garbage"
    manager = world.prefill[0].manager
    world.push(frames)
    assert "late" not in manager.decode_kv_args_table
    frames[5] = b"late"
    world.push(frames)
    assert "late" in manager.decode_kv_args_table and "late" in manager.agent.known


# ---- notifications ----


def status_of(*texts: str | tuple[str, str], expected: int = 1, state: bool = False) -> tuple[TransferStatus, Any]:
    """A decode manager's status of one room after these notifications, of agent "p" where a text names none."""
    manager = object.__new__(NixlKVManager)
    status = TransferStatus(expects_state=state)
    manager.transfer_statuses = {BAD: status}
    manager.required_prefill_response_num_table = {BAD: expected}
    manager.failure_records, manager.failure_lock = {}, threading.Lock()
    inbox: list[tuple[str, str]] = [text if isinstance(text, tuple) else ("p", text) for text in texts]
    for agent, text in inbox:
        manager.agent = SimpleNamespace(get_new_notifs=lambda a=agent, t=text: {a: [t.encode()]})
        manager.update_transfer_status()
    return status, manager


KV, AUX = f"{BAD}_kv_0_1_0", f"{BAD}_aux"


def test_two_prefill_ranks_of_one_pipeline_stage_both_count():
    """The engine tells senders apart by their pipeline rank, which is 0 for both."""
    both = [("p0", KV), ("p0", AUX), ("p1", KV), ("p1", AUX)]
    for order in itertools.permutations(both):
        assert status_of(*order, expected=2)[0].is_done()
    for missing in both:
        assert not status_of(*(one for one in both if one != missing), expected=2)[0].is_done()
    bare_status = conn.__pd_radix__["originals"]["TransferStatus"](num_pp_ranks_expected=2)
    bare_status.received_aux = True
    bare_status.received_kvs_per_pp[0].add(0)
    bare_status.expected_kvs_per_pp[0] = 1
    assert not bare_status.is_done(), "the engine would wait for ever"


def test_notifications_may_come_while_the_watch_of_prefills_asks():
    """An error there left all other requests of a prefill that was lost to their time-out."""

    class Arriving(dict):
        def __getitem__(self, agent: str) -> set[int]:
            self.setdefault(f"{agent} and another", set())
            status.num_chunks[f"{agent} and another"] = 1
            return super().__getitem__(agent)

    status = TransferStatus(num_expected=2, num_chunks={"a": 1, "b": 2}, chunks=Arriving(a={0}, b={0}))
    assert not status.is_done() and not status.is_quiet()


def test_pieces_of_two_agents_do_not_make_one_transfer():
    assert not status_of(("p", KV), ("somebody else", AUX))[0].is_done()
    assert not status_of(("p", KV), ("p", AUX), ("q", KV), ("r", AUX), expected=2)[0].is_done()


def test_an_agent_that_says_too_little_does_not_hold_up_those_that_matter():
    assert status_of(("somebody else", f"{BAD}_kv_5_1_0"), ("p", KV), ("p", AUX))[0].is_done()


GARBLED = [
    b"",
    b"_",
    b"kv",
    b"x_kv_0_1_0",
    b"\xff_aux",
    b"%d" % BAD,
    b"%d_" % BAD,
    b"%d_nonsense" % BAD,
    b"%d_kv" % BAD,
    b"%d_kv_0" % BAD,
    b"%d_kv_0_1" % BAD,
    b"%d_kv_0_1_0_0" % BAD,
    b"%d_kv_a_1_0" % BAD,
    b"%d_kv_-1_1_0" % BAD,
    b"%d_kv_0_2_0" % BAD,
    b"%d_AUX" % BAD,
]


def test_a_garbled_notification_is_ignored_with_a_line_in_the_log(world, caplog):
    request = world.request(BAD).bootstrap()
    statuses = world.decode[0].manager.transfer_statuses
    before = repr(statuses[BAD])
    for text in GARBLED:
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            world.wire.deliver("somebody", world.decode[0].agent.name, text)
            assert request.receivers[0].poll() == KVPoll.WaitingForInput
        assert repr(statuses[BAD]) == before, text
        assert "Ignored a notification of prefill agent somebody" in caplog.text, text
    request.send()
    request.wait_receivers(KVPoll.Success)


def test_notifications_of_rooms_that_nobody_waits_for_leave_nothing_behind(world):
    request = world.request(BAD).bootstrap().send()
    request.wait_receivers(KVPoll.Success)
    manager, waiting = world.decode[0].manager, world.request(GOOD).bootstrap()
    for text in (KV, AUX, f"{BAD}_fail_late", f"{BAD}_state_0", "777_kv_0_1_0", "777_fail_never asked"):
        world.wire.deliver("p", world.decode[0].agent.name, text.encode())
    assert waiting.receivers[0].poll() == KVPoll.WaitingForInput
    assert set(manager.transfer_statuses) <= {GOOD} and not manager.failure_records
    waiting.send()
    waiting.wait_receivers(KVPoll.Success)


# ---- whatever comes ----

_texts = st.one_of(
    st.sampled_from([b"", b"None", b"0", b"-1", b"1", b"\xff", b"%d" % BAD, b"%d" % GOOD, b"a stranger", b"cancel"]),
    st.binary(max_size=12),
)


@st.composite
def requests_for_kv(draw) -> list[bytes]:
    """A good message with some frames replaced, cut off, doubled or added."""
    frames = message(draw(st.sampled_from([BAD, 777])), draw(st.sampled_from(["registered", "a stranger"])))
    for at in draw(st.lists(st.integers(0, len(frames) - 1), max_size=3)):
        frames[at] = draw(_texts)
    frames = frames[: draw(st.integers(1, 11))] if draw(st.booleans()) else frames
    return frames + draw(st.lists(_texts, max_size=2))


_fuzz = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def test_whatever_message_comes_only_the_room_it_names_is_touched(world):
    """The thread that reads messages survives all of them, and a request for another room does not notice."""
    manager, other = world.prefill[0].manager, world.request(GOOD).bootstrap()
    books = ("transfer_infos", "request_status", "rooms.refused", "rooms.ended", "failure_records")

    def read(book: str) -> dict:
        return dict(operator.attrgetter(book)(manager))

    registered = manager.decode_kv_args_table[world.decode[0].agent.name]
    manager.decode_kv_args_table["registered"] = registered
    manager.agent.known.add("registered")
    Agent(world.wire, "registered")

    @_fuzz
    @given(requests_for_kv())
    def throw(frames):
        before = {book: read(book) for book in books}
        agents = dict(manager.decode_kv_args_table)
        try:
            manager._on_message(frames)
        except Exception as e:
            # The thread logs it and goes on; nothing may have changed.
            assert {book: read(book) for book in books} == before, e
            assert manager.decode_kv_args_table == agents
            return
        try:
            named = int(frames[1])
        except ValueError:
            named = None
        if named == GOOD:
            return
        for book in books:
            after = read(book)
            assert {room for room in {*before[book], *after} if before[book].get(room) != after.get(room)} <= {named}

    throw()
    # Messages that named it may have failed it; then it says why. Otherwise it goes on.
    if other.senders[0].poll() == KVPoll.WaitingForInput:
        other.send()
        other.wait_receivers(KVPoll.Success)
    world.assert_healthy(555)


def test_whatever_notification_comes_only_the_room_it_names_is_touched(world):
    manager = world.decode[0].manager
    waiting = [world.request(room).bootstrap() for room in (GOOD, BAD)]
    parts = st.one_of(
        st.sampled_from(["", "kv", "aux", "state", "fail", "0", "1", "-1", str(BAD), "777", "x", "9" * 30]),
        st.text(max_size=4),
    )
    texts = st.one_of(st.binary(max_size=20), st.lists(parts, max_size=7).map(lambda p: "_".join(p).encode()))

    @_fuzz
    @given(st.lists(texts, max_size=4))
    def throw(notifications):
        good = repr(manager.transfer_statuses[GOOD])
        manager.agent.inbox["p"] = list(notifications)
        manager.update_transfer_status()
        if not any(text.split(b"_")[0].strip() == b"%d" % GOOD for text in notifications):
            assert repr(manager.transfer_statuses[GOOD]) == good
        assert set(manager.transfer_statuses) <= {GOOD, BAD}
        assert set(manager.failure_records) <= {BAD}

    throw()
    waiting[0].send()
    waiting[0].wait_receivers(KVPoll.Success)
