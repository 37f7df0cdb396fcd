"""A client of prefill is answered once, when its prompt has been computed; its times are logged when it has ended."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import test_nixl_wire as nixl_wire
from prefill_loop import PrefillLoop
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.peer_sockets import Loss
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixCache

ROOM, OTHER = 7001, 7002
LOOPS = [(ranks, overlap) for ranks in (1, 2) for overlap in (True, False)]


@pytest.fixture(params=LOOPS, ids=[f"tp{ranks}-{'overlap' if overlap else 'normal'}" for ranks, overlap in LOOPS])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLoop:
    return PrefillLoop(monkeypatch, *request.param)


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_answered_once_and_logged_when_its_kv_has_been_sent(monkeypatch, caplog, overlap, logs):
    caplog.set_level("INFO")
    loop = PrefillLoop(monkeypatch, 1, overlap)
    (scheduler,) = loop.schedulers
    scheduler.stream_output = MethodType(Scheduler.stream_output, scheduler)
    scheduler.get_load, scheduler.stream_interval, scheduler.dp_rank = (lambda *args: None), 1, 0
    scheduler.server_args.enable_request_time_stats_logging = logs
    outputs: list[tuple[list[str], list[dict]]] = []
    scheduler.send_to_detokenizer = SimpleNamespace(
        send_output=lambda output: outputs.append((output.rids, output.finished_reasons))
    )
    (req,) = loop.arrive(20, ROOM)
    loop.wire.wire.held = True
    loop.run(6)

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if "Req Time Stats" in record.getMessage()]

    answer = [([req.rid], [{"type": "length", "length": 0}])]
    assert outputs == answer and not logged() and not req.finished()
    for transfer in loop.wire.wire.transfers:
        transfer.finish()
    loop.run(4)
    assert outputs == answer and len(logged()) == logs
    assert not any("forward_duration=-" in line for line in logged())
    scheduler.assert_nothing_held()


def told_by(loop: PrefillLoop) -> list[Any]:
    """The messages that the one rank of a prefill will send to its detokenizer, of which the engine makes them."""
    (scheduler,) = loop.schedulers
    messages: list[Any] = []
    scheduler.dp_rank, scheduler.stream_interval = None, 1
    scheduler.server_args.dp_size = 2
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=lambda message, *_: messages.append(message))
    scheduler.stream_output = MethodType(Scheduler.stream_output, scheduler)
    assert isinstance(scheduler.tree_cache, RadixCache)
    return messages


def test_what_a_decode_that_is_gone_has_asked_for_is_forgotten(loop: PrefillLoop, monkeypatch: pytest.MonkeyPatch):
    """Also of requests that have not come here, and may never; those of others stay."""
    loop.arrive(100, ROOM)
    for room in (OTHER, OTHER + 1):
        loop.wire.request(room, 100).start_decode().ask()
    manager = loop.wire.prefill[0].manager
    nixl_wire.until(lambda: {OTHER, OTHER + 1} <= {*manager.transfer_infos}, "decode has asked")
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


def test_what_is_not_lost_is_computed_and_sent(loop: PrefillLoop):
    loop.arrive(100, ROOM)
    loop.run(12)
    for scheduler in loop.schedulers:
        assert sum(sum(step.values()) for step in scheduler.steps) == 100
        assert [type(req.finished_reason).__name__ for req, _ in scheduler.told] == ["FINISH_LENGTH"]
        scheduler.assert_nothing_held()


def test_a_prefill_tells_nothing_of_what_fails_while_it_is_sent(monkeypatch):
    """Its clients were answered when their prompts had been computed. Decode reports the failure."""
    loop = PrefillLoop(monkeypatch, 1, False)
    messages, rooms = told_by(loop), [*range(7001, 7005)]
    loop.wire.wire.held = True
    reqs = [loop.arrive(12, room)[0] for room in rooms]
    loop.run(8)
    assert len(loop.schedulers[0].disagg_prefill_inflight_queue) == len(rooms)
    assert sorted(rid for message in messages for rid in message.rids) == [req.rid for req in reqs]
    messages.clear()
    for req in reqs:
        req.disagg_kv_sender.fail("NIXL reports an error of the transfer")
    for transfer in loop.wire.wire.transfers:
        transfer.finish()
    loop.run(4)
    assert not any(message.rids for message in messages)
    assert all(req.disagg_kv_sender.poll() == KVPoll.Failed for req in reqs)
    loop.schedulers[0].assert_nothing_held()


def test_what_is_aborted_while_it_waits_leaves_no_room(loop: PrefillLoop):
    """The engine polls it no more; decode would wait for it."""
    reqs = loop.arrive(100, ROOM)
    loop.arrive(100, OTHER)
    turns = dict.fromkeys(range(len(loop.schedulers)), 0)

    def before(scheduler) -> None:
        turns[scheduler.tp_rank] += 1
        if turns[scheduler.tp_rank] == 2:
            waiting = [req.bootstrap_room for req in scheduler.waiting_queue]
            scheduler.abort_request(AbortReq(rid=f"request-{waiting[-1]}"))
            assert waiting[-1] not in scheduler.kv_manager().rooms.live

    loop.before = before
    loop.run(16)
    assert reqs
    for scheduler in loop.schedulers:
        assert not scheduler.kv_manager().rooms.live
        scheduler.assert_nothing_held()
