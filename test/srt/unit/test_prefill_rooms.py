"""What is left on a prefill of requests that are aborted, of decode workers that are gone, and of others: nothing."""

from __future__ import annotations

import pytest
import test_nixl_wire as nixl_wire
from prefill_loop import PrefillLoop
from sglang.srt.disaggregation.common.peer_sockets import Loss
from sglang.srt.managers.io_struct import AbortReq

ROOM, OTHER = 7001, 7002
LOOPS = [(ranks, overlap) for ranks in (1, 2) for overlap in (True, False)]


@pytest.fixture(params=LOOPS, ids=[f"tp{ranks}-{'overlap' if overlap else 'normal'}" for ranks, overlap in LOOPS])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLoop:
    return PrefillLoop(monkeypatch, *request.param)


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
