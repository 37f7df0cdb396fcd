"""Requests that decode asks nothing for leave prefill in the same step on all its ranks."""

from __future__ import annotations

from types import SimpleNamespace

import nixl_world as nixl_wire
import numpy as np
import pytest
from engine_classes import engine_class
from prefill_loop import CHUNK, PrefillLoop, PrefillScheduler
from sglang.srt.disaggregation.dropped_rooms import ComputedReq
from sglang.srt.disaggregation.room_notes import RoomNotes
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from test_lost_on_prefill import LOOPS, OTHER, ROOM, assert_told


@pytest.fixture(params=LOOPS, ids=[f"tp{ranks}-{'overlap' if overlap else 'normal'}" for ranks, overlap in LOOPS])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLoop:
    return PrefillLoop(monkeypatch, *request.param)


def test_a_prefill_hears_that_decode_computes_a_prompt_before_it_has_the_request(monkeypatch):
    """With DP attention both come one way each: it waited for decode's question until its time was up.

    Each rank hears of it. Another request of the room, there or later, is none that has been answered.
    """
    scheduler, added = object.__new__(Scheduler), []
    scheduler.tree_cache, scheduler.disaggregation_mode = None, DisaggregationMode.PREFILL
    scheduler.enable_priority_scheduling, scheduler.grammar_manager = False, SimpleNamespace(grammar_queue=[])
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[], kv_manager=None)
    scheduler.waiting_queue, scheduler.chunked_req, scheduler.last_batch = [], None, None
    scheduler.enable_overlap, scheduler.disagg_prefill_inflight_queue = False, []
    scheduler.answered = RoomNotes()
    add = lambda self, req, retracted: added.append(req)  # noqa: E731
    monkeypatch.setattr(engine_class(Scheduler), "_add_request_to_queue", add)

    def made(rid: str, room: int) -> Req:
        return Req(rid, "", [1], SamplingParams(), bootstrap_room=room)

    scheduler.handle_computed_request(ComputedReq(7, "one"))
    for rid, room in (("other", 7), ("one", 8), ("one", 7), ("one", 7)):
        scheduler._add_request_to_queue(made(rid, room))
    assert [(req.rid, req.bootstrap_room) for req in added] == [("other", 7), ("one", 8), ("one", 7)]
    # Nor is one of two of a room forgotten for the other.
    for rid in ("third", "fourth"):
        scheduler.handle_computed_request(ComputedReq(7, rid))
    for rid in ("third", "fourth"):
        scheduler._add_request_to_queue(made(rid, 7))
    assert len(added) == 3
    # Of what is here nothing is remembered, wherever it is.
    scheduler.grammar_manager.grammar_queue.append(made("waits", 9))
    scheduler.disagg_prefill_inflight_queue.append(made("is sent", 10))
    scheduler.chunked_req = made("is computed", 11)
    for rid, room in (("waits", 9), ("is sent", 10), ("is computed", 11)):
        scheduler.handle_computed_request(ComputedReq(room, rid))
    assert not scheduler.grammar_manager.grammar_queue and not scheduler.answered


@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_decode_computes_after_all_is_computed_no_further(loop: PrefillLoop, after: int):
    """Decode has asked for it and waits no longer; the client has been answered, and decode is told as of a failure."""
    loop.arrive(100, ROOM)
    loop.arrive(20, OTHER)
    heard: set[int] = set()

    def before(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == after and scheduler.tp_rank not in heard:
            heard.add(scheduler.tp_rank)
            scheduler.handle_computed_request(ComputedReq(ROOM, f"request-{ROOM}"))

    loop.before = before
    loop.run(14)
    for scheduler, rank in zip(loop.schedulers, loop.wire.prefill, strict=True):
        assert sum(step.get(f"request-{ROOM}", 0) for step in scheduler.steps) <= (after + 1) * CHUNK
        assert_told(scheduler, "decode computes it itself")
        assert [req.bootstrap_room for req, _ in scheduler.told].count(OTHER) == 1
        scheduler.assert_nothing_held()
        assert rank.told(f"{ROOM}_fail")


@pytest.mark.parametrize("heard_by_one", ["its request", "its cancel"])
def test_what_decode_computes_after_all_leaves_all_ranks_queues(loop: PrefillLoop, heard_by_one: str):
    """What decode has told one rank on its way to the others, or has taken back, changes none of them alone."""
    loop.arrive(100, ROOM, asked=heard_by_one == "its cancel")
    if heard_by_one == "its request":
        wire = loop.not_asked
        wire.start_decode()
        indices = np.arange(32, 32 + wire.num_pages, dtype=np.int32)
        wire.receivers[0].send_metadata(indices, 1, None, decode_prefix_len=0)
        nixl_wire.until(lambda: ROOM in loop.wire.prefill[0].manager.transfer_infos, "asked")
    heard: set[int] = set()

    def before(scheduler: PrefillScheduler) -> None:
        if scheduler.tp_rank not in heard:
            heard.add(scheduler.tp_rank)
            if heard_by_one == "its cancel" and scheduler.tp_rank == 0:
                manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
                manager.rooms.give_up(ROOM)
                manager.settle()
            scheduler.handle_computed_request(ComputedReq(ROOM, f"request-{ROOM}"))

    loop.before = before
    loop.run(6)
    for scheduler in loop.schedulers:
        assert not scheduler.disagg_prefill_bootstrap_queue.queue
        scheduler.assert_nothing_held()
