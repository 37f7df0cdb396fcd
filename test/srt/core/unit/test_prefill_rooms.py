"""What is left on a prefill of requests that are aborted, and of others: nothing."""

from __future__ import annotations

import pytest
from prefill_loop import PrefillLoop
from sglang.srt.managers.io_struct import AbortReq

ROOM, OTHER = 7001, 7002
LOOPS = [(ranks, overlap) for ranks in (1, 2) for overlap in (True, False)]


@pytest.fixture(params=LOOPS, ids=[f"tp{ranks}-{'overlap' if overlap else 'normal'}" for ranks, overlap in LOOPS])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLoop:
    return PrefillLoop(monkeypatch, *request.param)


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
