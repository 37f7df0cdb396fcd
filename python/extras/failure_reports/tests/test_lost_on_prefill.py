"""A prefill computes no further what nobody waits for, from the same step on all its ranks, and tells it at once."""

from __future__ import annotations

import pytest
from prefill_loop import CHUNK, PrefillLoop, PrefillScheduler
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.peer_sockets import Loss
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.lost_requests import LostReqs
from sglang.srt.disaggregation.refused_pairs import AskedReqs
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT

ROOM, OTHER = 7001, 7002
LOOPS = [(ranks, overlap) for ranks in (1, 2) for overlap in (True, False)]


@pytest.fixture(params=LOOPS, ids=[f"tp{ranks}-{'overlap' if overlap else 'normal'}" for ranks, overlap in LOOPS])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLoop:
    return PrefillLoop(monkeypatch, *request.param)


def lose(loop: PrefillLoop, room: int = ROOM, rank: int = 0) -> None:
    """Its decode worker is gone, and a rank of prefill has seen that."""
    loop.wire.prefill[rank].manager.rooms.lose_decode([room], "decode is gone")


def lose_during(loop: PrefillLoop, step: int) -> None:
    """Have the first rank lose it once so many steps have begun there."""

    def during(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == step and scheduler.tp_rank == 0:
            lose(loop)

    loop.during = during


def assert_told(scheduler: PrefillScheduler, why: str = "decode is gone") -> int:
    """It was told once that it has failed; after how many steps."""
    ((req, steps),) = [told for told in scheduler.told if told[0].bootstrap_room == ROOM]
    assert isinstance(req.finished_reason, FINISH_ABORT)
    # The client hears of the first rank alone.
    assert scheduler.tp_rank or why in req.finished_reason.message
    assert req.finished_reason.status_code == 500
    return steps


def assert_ends(loop: PrefillLoop, turns: int, why: str) -> None:
    """What is being written comes to its end, and with that the request, on all ranks."""
    for transfer in loop.wire.wire.transfers:
        transfer.finish()
    loop.run(turns)
    for scheduler in loop.schedulers:
        assert_told(scheduler, why)
        scheduler.assert_nothing_held()


def test_a_prompt_that_nobody_waits_for_is_computed_no_further(loop: PrefillLoop):
    """The engine computes it to its end before it tells the client. A second rank sees it in another step, or never."""
    loop.arrive(100, ROOM)
    loop.arrive(20, OTHER)

    lose_during(loop, 2)
    loop.run(12)
    for scheduler in loop.schedulers:
        # The step in which it was seen is the last one of it, and the client is told before the next one.
        assert sum(step.get(f"request-{ROOM}", 0) for step in scheduler.steps) == 2 * CHUNK
        assert assert_told(scheduler) == 2
        assert [req.bootstrap_room for req, _ in scheduler.told] == [ROOM, OTHER]
        assert scheduler.told[1][0].finished_reason.to_json()["type"] == "length"
        scheduler.assert_nothing_held()
    assert [scheduler.steps for scheduler in loop.schedulers] == [loop.schedulers[0].steps] * loop.ranks.size


def test_who_has_the_rid_of_one_that_is_lost_goes_on(loop: PrefillLoop):
    """A gateway's that has tried again, or another client's: it failed with the reason of the first."""
    for reqs in (loop.arrive(100, ROOM), loop.arrive(100, OTHER)):
        for req in reqs:
            req.rid = "same"

    lose_during(loop, 2)
    loop.run(30)
    for scheduler in loop.schedulers:
        assert_told(scheduler)
        ((other, _),) = [told for told in scheduler.told if told[0].bootstrap_room == OTHER]
        assert other.finished_reason.to_json()["type"] == "length"
        scheduler.assert_nothing_held()


def messages_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the ranks count, each of them as if it were the one that does."""
    counted: list[str] = []
    events = hooks.Events()
    monkeypatch.setattr(
        events, "ended", lambda reason: counted.append(reason.message) if isinstance(reason, FINISH_ABORT) else None
    )
    monkeypatch.setitem(hooks._makers, hooks.Events, [lambda args: events])
    return counted


@pytest.mark.parametrize("asked", [False, True], ids=["bootstrap", "computed"])
def test_each_rank_notes_a_failure_once(loop: PrefillLoop, monkeypatch: pytest.MonkeyPatch, asked: bool):
    """Whichever queue it ends in; the counters leave it to one rank to count it."""
    counted = messages_counted(monkeypatch)
    reqs = loop.arrive(100, ROOM, asked)

    lose_during(loop, 2)
    if not asked:
        reqs[0].disagg_kv_sender.fail("decode is gone")
    loop.run(8)
    assert len(counted) == loop.ranks.size
    assert any("decode is gone" in message for message in counted)


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


@pytest.mark.parametrize("late", [False, True])
def test_what_waits_for_its_turn_is_not_computed_at_all(loop: PrefillLoop, late: bool):
    """late: decode stands still, or is slow to give it up itself."""
    loop.arrive(60, OTHER)
    reqs = loop.arrive(100, ROOM)

    def during(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == 1 and scheduler.tp_rank == 0:
            assert [req.bootstrap_room for req in scheduler.waiting_queue] == [ROOM]
            if late:
                reqs[0].disagg_kv_sender.state.due_at = 0.0
            else:
                lose(loop)

    loop.during = during
    loop.run(12)
    for scheduler in loop.schedulers:
        assert not any(f"request-{ROOM}" in step for step in scheduler.steps)
        assert assert_told(scheduler, "all of its KV" if late else "decode is gone") == 1
        scheduler.assert_nothing_held()


def test_a_last_chunk_that_is_lost_is_told_before_the_next_step(loop: PrefillLoop):
    """Overlapped, its result is processed only when that has been computed."""
    loop.arrive(CHUNK, ROOM)
    loop.arrive(60, OTHER)

    lose_during(loop, 1)
    sockets = [scheduler.recv_from_tokenizer for scheduler in loop.schedulers]
    loop.run(12)
    for scheduler, socket in zip(loop.schedulers, sockets, strict=True):
        assert assert_told(scheduler) == 1
        scheduler.assert_nothing_held()
        # What it was told of comes before all else once.
        assert scheduler.recv_from_tokenizer is socket


def test_pages_of_what_is_lost_are_kept_while_they_are_read(loop: PrefillLoop):
    """A chunk is still being written to decode; the client need not wait for the end of that."""
    loop.arrive(100, ROOM)
    loop.wire.wire.held = True

    lose_during(loop, 3)
    loop.run(8)
    for scheduler in loop.schedulers:
        assert assert_told(scheduler) == 3
        assert scheduler.tree_cache.protected_size() > 0
        assert scheduler.disagg_prefill_inflight_queue[0].disagg_kv_sender.poll() != KVPoll.Failed
    assert_ends(loop, 4, "decode is gone")


def test_kv_that_decode_does_not_take_is_given_up_in_time(loop: PrefillLoop):
    """Decode stands still: no write over NIXL ends by itself. Its pages are kept until one does.

    The client was answered when its prompt had been computed: decode, which hears of the failure, reports it.
    """
    for scheduler in loop.schedulers:
        scheduler.kv_manager().transfer_timeout = 1000
    reqs = loop.arrive(20, ROOM)
    loop.wire.wire.held = True
    loop.run(6)
    assert all(scheduler.answers == ["FINISH_LENGTH"] for scheduler in loop.schedulers)
    assert not any(req.finished() for req in reqs)
    for req in reqs:
        req.disagg_kv_sender.state.due_at -= 1001
    loop.run(2)
    for scheduler in loop.schedulers:
        ((req, _),) = scheduler.told
        assert "not all of its KV has been sent in the 1000 s" in req.finished_reason.message
        assert scheduler.tree_cache.protected_size() == 20
    for transfer in loop.wire.wire.transfers:
        transfer.finish()
    loop.run(4)
    for scheduler, rank in zip(loop.schedulers, loop.wire.prefill, strict=True):
        assert len(scheduler.told) == 1 and scheduler.answers == ["FINISH_LENGTH"]
        scheduler.assert_nothing_held()
        # Decode keeps its own pages until it hears that.
        assert rank.told(f"{ROOM}_fail")


def test_what_fails_on_one_rank_alone_ends_when_decode_has_heard_of_it(loop: PrefillLoop):
    """It tells decode, which gives the request up at all ranks."""
    reqs = loop.arrive(100, ROOM)

    def during(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == 2 and scheduler.tp_rank == loop.ranks.size - 1:
            reqs[-1].disagg_kv_sender.fail("decode is gone, says one write")
        if len(scheduler.steps) == 4 and scheduler.tp_rank == 0:
            assert loop.ranks.size == 1 or loop.wire.prefill[-1].told(f"{ROOM}_fail")
            lose(loop)

    loop.during = during
    loop.run(12)
    for scheduler in loop.schedulers:
        assert assert_told(scheduler) == (2 if loop.ranks.size == 1 else 4)
        scheduler.assert_nothing_held()


def test_what_is_lost_reaches_the_ranks_of_one_dp_rank_alone(loop: PrefillLoop):
    """With DP attention the engine has control messages of the first of all ranks only, and sends them to all."""
    own, update = [LostReqs({}), AskedReqs([7])], UpdateWeightFromDiskReqInput(model_path="")
    assert loop.schedulers[0]._split_work_and_control_reqs([*own, update]) == (own, [update])
