"""A prefill reads what it lacks of a prompt out of decode's pages, or goes on without; the real loops of its ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import nixl_world as nixl_wire
import numpy as np
import pytest
from prefill_loop import PAGE, POOL, PrefillScheduler
from reading_worlds import ReadLoop
from sglang.srt.disaggregation import decode_reads
from sglang.srt.disaggregation.dropped_rooms import ComputedReq
from sglang.srt.disaggregation.nixl import page_reads
from sglang.srt.disaggregation.nixl.page_reads import PostedRead
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import SchedulePolicy

ROOM, OTHER, THIRD = 7001, 7002, 7003
LEAST = 16
LOOPS = [(1, False), (2, True)]


@pytest.fixture(params=LOOPS, ids=[f"tp{ranks}-{'overlap' if overlap else 'normal'}" for ranks, overlap in LOOPS])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReadLoop:
    return ReadLoop(monkeypatch, *request.param, reads=LEAST)


def reads(loop: ReadLoop, rank: int | None = None) -> list[nixl_wire.Transfer]:
    """The reads that have been posted, of a rank or all."""
    names = [one.agent.name for one in loop.wire.prefill]
    posted = [t for t in loop.wire.wire.transfers if t.kind == "READ"]
    return [t for t in posted if rank is None or t.sender == names[rank]]


def computed(scheduler: PrefillScheduler, room: int) -> int:
    """Tokens of its prompt that this rank has computed."""
    return sum(step.get(f"request-{room}", 0) for step in scheduler.steps)


def finish(loop: ReadLoop) -> None:
    for transfer in loop.wire.wire.transfers:
        transfer.finish()


def assert_served(loop: ReadLoop, *rooms: int) -> None:
    """All of them have been answered well, and nothing is held."""
    for scheduler in loop.schedulers:
        ended = {req.bootstrap_room: req.finished_reason for req, _ in scheduler.told}
        assert set(ended) == set(rooms)
        assert not any(isinstance(reason, FINISH_ABORT) for reason in ended.values()), ended
        assert_rests(scheduler)


def assert_rests(scheduler: PrefillScheduler) -> None:
    assert not scheduler.has_reads()
    scheduler.assert_nothing_held()


def hold_reads(loop: ReadLoop) -> None:
    loop.wire.wire.held = True


def begin_to_read(loop: ReadLoop) -> None:
    loop.arrive(100, ROOM, held=80)
    hold_reads(loop)
    loop.run(3)


def release(loop: ReadLoop, turns: int = 0) -> None:
    loop.wire.wire.held = False
    finish(loop)
    if turns:
        loop.run(turns)


def test_the_pages_read_are_those_that_are_lacking(loop: ReadLoop):
    """The first part of the prompt it has computed for another request."""
    loop.arrive(48, OTHER, token=9)
    loop.run(8)
    loop.arrive(100, ROOM, held=80, first_page=64, token=9)
    loop.run(12)
    for rank, scheduler in enumerate(loop.schedulers):
        assert computed(scheduler, ROOM) == 20
        (read,) = reads(loop, rank)
        item, buffers = nixl_wire.ITEM // loop.ranks.size, 2
        # K and V, one run of pages each: those of tokens 48 to 80.
        theirs = [(int(a), int(n)) for a, n, _ in read.targets]
        bases = [nixl_wire.kv_address(kind, 0) for kind in range(buffers)]
        assert theirs == [(base + (64 + 48 // PAGE) * item, 32 // PAGE * item) for base in bases]
        # Into the pages in which its tree then has them.
        tree = scheduler.tree_cache
        match = tree.match_prefix(decode_reads.MatchPrefixParams(key=decode_reads.RadixKey([9] * 80, None)))
        slots = match.device_indices[48:80].numpy()
        ours = sorted(slots[::PAGE] // PAGE)
        covered = [
            page
            for address, length, _ in read.sources
            if address < nixl_wire.kv_address(1, 0)
            for page in range((address - bases[0]) // item, (address - bases[0] + length) // item)
        ]
        assert sorted(covered) == ours
    assert_served(loop, OTHER, ROOM)


def test_one_that_is_late_is_computed(loop: ReadLoop, monkeypatch: pytest.MonkeyPatch):
    """Its pages are given back when NIXL says that nothing is written to them, in one step on all ranks."""
    monkeypatch.setattr(decode_reads, "LATE_S", 0.0)
    loop.arrive(100, ROOM, held=80)
    hold_reads(loop)
    loop.run(14)
    kv = [t for t in loop.wire.wire.transfers if t.kind == "WRITE"]
    for transfer in kv:
        transfer.finish()
    loop.run(4)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 100
        held = scheduler.disagg_prefill_bootstrap_queue.reads
        assert held.tokens_out == 80 and held._late
        assert not scheduler.is_fully_idle() and not scheduler.flush_cache()
    # One rank's is over first.
    reads(loop, 0)[0].finish()
    loop.run(2)
    left = [scheduler.disagg_prefill_bootstrap_queue.reads.tokens_out for scheduler in loop.schedulers]
    assert left == ([0] if loop.ranks.size == 1 else [80, 80])
    release(loop, 2)
    assert_served(loop, ROOM)


def test_after_a_late_one_nothing_is_read_from_there_for_a_while(loop: ReadLoop, monkeypatch: pytest.MonkeyPatch):
    """On one rank: then on none, and none waits for it."""
    ended: list[str] = []
    held = [scheduler.disagg_prefill_bootstrap_queue.reads for scheduler in loop.schedulers]
    monkeypatch.setattr(held[-1]._counters, "ended", lambda outcome, *_: ended.append(outcome))
    with monkeypatch.context() as late:
        late.setattr(decode_reads, "LATE_S", 0.0)
        hold_reads(loop)
        loop.arrive(100, ROOM, held=80)
        loop.run(14)
    assert ended == ["failed"] and all(each._late for each in held)
    for each in held[:-1]:
        each._late.clear()
    release(loop)
    posted = len(reads(loop))
    loop.arrive(100, OTHER, held=80, first_page=64)
    loop.run(12)
    assert [computed(scheduler, OTHER) for scheduler in loop.schedulers] == [100] * loop.ranks.size
    assert len(reads(loop)) == posted and ended == ["failed", "slow"]
    monkeypatch.setattr(decode_reads, "AVOIDED_S", 0.0)
    loop.arrive(100, THIRD, held=80)
    loop.run(12)
    assert [computed(scheduler, THIRD) for scheduler in loop.schedulers] == [20] * loop.ranks.size
    release(loop, 4)
    assert_served(loop, ROOM, OTHER, THIRD)


def test_one_that_has_been_read_may_wait_for_a_metadata_buffer(loop: ReadLoop):
    buffers = [scheduler.req_to_metadata_buffer_idx_allocator for scheduler in loop.schedulers]
    taken = [[each.alloc() for _ in range(each.available_size())] for each in buffers]
    loop.arrive(100, ROOM, held=80)
    loop.run(8)
    for scheduler in loop.schedulers:
        assert [held.tokens for held in scheduler.disagg_prefill_bootstrap_queue.reads.held] == [80]
        assert len(scheduler.disagg_prefill_bootstrap_queue.queue) == 1
    for each, indices in zip(buffers, taken, strict=True):
        for index in indices:
            each.free(index)
    loop.run(12)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 20
    assert_served(loop, ROOM)


@pytest.mark.parametrize("how", ["posted", "raises", "later", "refused", "too many runs"])
def test_what_cannot_be_read_on_one_rank_is_read_on_none(loop: ReadLoop, how: str, monkeypatch: pytest.MonkeyPatch):
    agent, failed = loop.wire.prefill[-1].agent, []
    transfer = agent.transfer

    def fail(read: nixl_wire.Transfer) -> str:
        if read.kind != "READ":
            return transfer(read)
        failed.append(read)
        read.state = "ERR"
        if how == "posted":
            return read.state
        raise RuntimeError("NIXL could not post the transfer")

    def refuse(kind: str, *args: Any) -> nixl_wire.Transfer:
        if kind == "READ":
            raise RuntimeError("no such memory is registered")
        return nixl_wire.Agent.initialize_xfer(agent, kind, *args)

    if how == "refused":
        monkeypatch.setattr(agent, "initialize_xfer", refuse)
    elif how in ("posted", "raises"):
        monkeypatch.setattr(agent, "transfer", fail)
    elif how == "too many runs":
        # To post it would hold the scheduler up.
        monkeypatch.setattr(page_reads, "MOST_REGIONS", 1)
    else:
        hold_reads(loop)
    loop.arrive(100, ROOM, held=80)
    if how == "later":
        loop.run(3)
        reads(loop, loop.ranks.size - 1)[0].state = "ERR"
        release(loop)
    loop.run(14)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 100
    assert len(failed) == (how in ("posted", "raises")) and all(read.released for read in failed)
    assert_served(loop, ROOM)


def test_what_one_rank_is_not_offered_is_read_on_none(loop: ReadLoop):
    """Its decode rank shook hands with this prefill before it had been started with the option."""
    reqs = loop.arrive(100, ROOM, asked=False, held=80)
    wire = loop.not_asked
    assert wire is not None
    wire.start_decode()
    for receiver in wire.receivers[:-1]:
        receiver.offered = loop.pages[wire.room]
    wire.ask()
    for req in reqs:
        nixl_wire.until(lambda req=req: req.disagg_kv_sender.poll() >= 2, "decode has asked")
    loop.run(14)
    assert not reads(loop)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 100
    assert_served(loop, ROOM)


@pytest.mark.parametrize("how", ["aborted", "decode gone", "computed by decode", "given up"])
def test_a_request_that_ends_while_it_is_read(loop: ReadLoop, how: str):
    """Nothing of it enters the tree, and its pages stay out of others' hands until the read is over."""
    begin_to_read(loop)
    assert len(reads(loop)) == loop.ranks.size
    for scheduler in loop.schedulers:
        if how == "aborted":
            scheduler.abort_request(AbortReq(rid=f"request-{ROOM}"))
        elif how == "computed by decode":
            scheduler.drop_computed(ROOM)
    if how == "decode gone":
        loop.wire.prefill[0].manager.rooms.give_up(ROOM, "decode is gone")
    elif how == "given up":
        for rank in loop.wire.prefill:
            rank.manager.rooms.give_up(ROOM)
    loop.run(3)
    for scheduler in loop.schedulers:
        assert not scheduler.disagg_prefill_bootstrap_queue.queue
        assert scheduler.token_to_kv_pool_allocator.available_size() == POOL - 80
        assert scheduler.tree_cache.evictable_size() == 0
    # Others are served meanwhile.
    loop.wire.wire.held = False
    loop.arrive(40, OTHER)
    loop.run(8)
    release(loop, 3)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 0
        assert [req.bootstrap_room for req, _ in scheduler.told].count(OTHER) == 1
        assert_rests(scheduler)


def test_what_has_come_when_decode_must_have_given_up_is_not_taken(loop: ReadLoop, monkeypatch: pytest.MonkeyPatch):
    """This worker stands still while it looks at a read, for as long as decode waits; then the read is over."""
    begin_to_read(loop)
    state = PostedRead.state

    def stand_still(read: PostedRead) -> str:
        finish(loop)
        for scheduler in loop.schedulers:
            for req in scheduler.disagg_prefill_bootstrap_queue.queue:
                req.disagg_kv_sender.state.due_at = 0.0
        return state(read)

    monkeypatch.setattr(PostedRead, "state", stand_still)
    loop.run(4)
    for scheduler in loop.schedulers:
        assert isinstance(scheduler.told[0][0].finished_reason, FINISH_ABORT) and computed(scheduler, ROOM) == 0
        assert scheduler.token_to_kv_pool_allocator.available_size() == POOL
        assert_rests(scheduler)


def test_too_little_is_not_read(loop: ReadLoop):
    loop.arrive(100, ROOM, held=LEAST - PAGE)
    loop.run(14)
    assert not reads(loop)
    assert_served(loop, ROOM)


def test_without_memory_it_is_computed(loop: ReadLoop):
    """At most half of the pool is taken for reads at once."""
    hold_reads(loop)
    loop.arrive(220, ROOM, held=200)
    loop.arrive(120, OTHER, held=100)

    def during(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == 2 and scheduler.tp_rank == 0:
            assert len(reads(loop)) == loop.ranks.size
            release(loop)

    loop.during = during
    loop.run(40)
    for scheduler in loop.schedulers:
        assert (computed(scheduler, ROOM), computed(scheduler, OTHER)) == (20, 120)
    assert_served(loop, ROOM, OTHER)


@pytest.mark.parametrize("how", ["read", "aborted", "late", "no memory"])
def test_what_prefill_has_of_it_is_locked_for_as_long_as_the_rest_is_read(
    loop: ReadLoop, how: str, monkeypatch: pytest.MonkeyPatch
):
    """What is read is put behind it in the tree, and would otherwise be put behind what others have got by then."""
    loop.arrive(48, OTHER, token=9)
    loop.run(8)
    if how == "late":
        monkeypatch.setattr(decode_reads, "LATE_S", 0.0)
    for scheduler in loop.schedulers if how == "no memory" else ():
        scheduler.disagg_prefill_bootstrap_queue.reads._most = 0
    hold_reads(loop)
    loop.arrive(100, ROOM, held=80, token=9)
    loop.run(3 if how in ("read", "aborted") else 14)
    for scheduler in loop.schedulers if how in ("read", "aborted") else ():
        tree = scheduler.tree_cache
        tree.evict(decode_reads.EvictParams(num_tokens=POOL))
        assert tree.protected_size() == 48 and tree.evictable_size() == 0
        if how == "aborted":
            scheduler.abort_request(AbortReq(rid=f"request-{ROOM}"))
    release(loop, 12)
    assert len(reads(loop)) == (0 if how == "no memory" else loop.ranks.size)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == {"read": 20, "aborted": 0}.get(how, 52)
        assert_rests(scheduler)


def test_what_is_cached_goes_for_it(loop: ReadLoop):
    for room in (OTHER, THIRD):
        loop.arrive(240, room)
    loop.run(50)
    loop.arrive(120, ROOM, held=100)
    loop.run(20)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 20
    assert_served(loop, OTHER, THIRD, ROOM)


def test_two_that_read_the_same(loop: ReadLoop):
    """The second finds the first's in the tree when its own has been read, and gives its pages back."""
    loop.arrive(100, ROOM, held=80, token=9)
    loop.arrive(96, OTHER, held=80, token=9)
    loop.run(14)
    assert len(reads(loop)) == 2 * loop.ranks.size
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) + computed(scheduler, OTHER) <= 36
    assert_served(loop, ROOM, OTHER)


@pytest.mark.parametrize("theirs, ours", [(1, 2), (None, 1), (1, None), (None, None)])
def test_kv_of_other_weights_is_not_read(loop: ReadLoop, theirs: int | None, ours: int | None, caplog):
    """None: updated. Of which nothing is offered; of what is, it is counted, and told once until they are alike."""
    counted = count_outcomes(loop)
    set_weights(loop, ours, theirs)
    for room in (ROOM, THIRD):
        loop.arrive(100, room, held=80)
        loop.run(14)
    assert not reads(loop)
    told = [record for record in caplog.records if "is of other weights than those here" in record.message]
    assert len(told) == (theirs is not None) * loop.ranks.size
    for outcomes in counted:
        assert outcomes == ["weights"] * 2 * (theirs is not None)
    set_weights(loop, 3, 3)
    loop.arrive(100, OTHER, held=80)
    loop.run(14)
    assert len(reads(loop)) == loop.ranks.size
    assert all(outcomes[-1] == "read" for outcomes in counted)
    assert_served(loop, ROOM, OTHER, THIRD)


def count_outcomes(loop: ReadLoop) -> list[list[str]]:
    """Of each rank what comes of its reads from here on."""
    counted: list[list[str]] = []
    for scheduler in loop.schedulers:
        outcomes: list[str] = []
        counters = SimpleNamespace(ended=lambda outcome, *args, outcomes=outcomes: outcomes.append(outcome))
        scheduler.disagg_prefill_bootstrap_queue.reads._counters = counters
        counted.append(outcomes)
    return counted


def set_weights(loop: ReadLoop, ours: int | None, theirs: int | None) -> None:
    for ranks, weights in ((loop.wire.prefill, ours), (loop.wire.decode, theirs)):
        for rank in ranks:
            rank.manager.kv_weights = SimpleNamespace(current=lambda weights=weights: weights)


def test_what_is_read_is_for_requests_of_the_same_salt(loop: ReadLoop):
    """Of tenants, or of adapters: what tells the KV of the same tokens apart."""
    loop.arrive(100, ROOM, held=80, token=9, salt="one")
    loop.run(12)
    loop.arrive(100, OTHER, token=9, salt="another")
    loop.arrive(100, THIRD, token=9, salt="one")
    loop.run(14)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 20
        assert computed(scheduler, OTHER) == 100 and computed(scheduler, THIRD) <= PAGE
    assert_served(loop, ROOM, OTHER, THIRD)


def test_what_has_been_read_stays_until_it_is_used(loop: ReadLoop):
    """While others are computed that would have it evicted."""
    loop.arrive(400, OTHER)
    loop.arrive(100, ROOM, held=80)

    def during(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == 8:
            tree = scheduler.tree_cache
            tree.evict(decode_reads.EvictParams(num_tokens=POOL))
            assert scheduler.has_reads() and tree.protected_size() >= 80

    loop.during = during
    loop.run(50)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 20
    assert_served(loop, OTHER, ROOM)


@pytest.mark.parametrize("readers", [0, 2], ids=["without reads", "with reads"])
def test_a_transfer_that_stands_still_stops_nobody_who_waits(loop: ReadLoop, readers: int):
    """It may for as long as decode waits. What is locked for those behind the first one is what that one lacks."""
    loop.arrive(20, THIRD)
    loop.wire.wire.held = True
    loop.run(6)
    loop.wire.wire.held = False
    stalled = [transfer for transfer in loop.wire.wire.transfers if transfer.kind == "WRITE"]
    loop.arrive(400, OTHER)
    behind = [ROOM + 10 + i for i in range(readers)]
    for room in behind:
        loop.arrive(140, room, held=120)
    loop.run(80)
    assert len(reads(loop)) == readers * loop.ranks.size
    for scheduler in loop.schedulers:
        assert [req.bootstrap_room for req in scheduler.disagg_prefill_inflight_queue] == [THIRD]
        assert [req.bootstrap_room for req, _ in scheduler.told] == [THIRD, OTHER, *behind]
    for transfer in stalled:
        transfer.finish()
    loop.run(4)
    assert_served(loop, THIRD, OTHER, *behind)


@pytest.mark.parametrize("overlap", [True, False])
def test_who_waits_for_memory_does_not_wait_for_all_that_come_to_read(monkeypatch: pytest.MonkeyPatch, overlap: bool):
    """It wants more than reads leave of the pool, and there is always one more of these."""
    loop = ReadLoop(monkeypatch, 1, overlap, reads=LEAST)
    loop.arrive(40, THIRD)
    loop.arrive(POOL - 60, OTHER)
    hold_reads(loop)
    began: dict[int, int] = {}
    turn, came = 0, 0

    def before(scheduler: PrefillScheduler) -> None:
        nonlocal turn, came
        turn += 1
        for transfer in loop.wire.wire.transfers:
            # A read takes six turns.
            if transfer.kind == "WRITE" or turn - began.setdefault(id(transfer), turn) >= 6:
                transfer.finish()
        if turn % 3 == 0 and not computed(scheduler, OTHER) and came < 30:
            came += 1
            loop.arrive(100, ROOM + 10 + came, held=80)

    loop.before = before
    loop.run(100)
    assert 2 < came < 10
    loop.before = lambda scheduler: finish(loop)
    loop.run(100)
    assert_served(loop, THIRD, OTHER, *range(ROOM + 11, ROOM + 11 + came))


def test_pages_that_a_step_in_flight_may_write_to_are_read_into_when_it_is_over(monkeypatch: pytest.MonkeyPatch):
    loop = ReadLoop(monkeypatch, 1, True, reads=LEAST)
    loop.arrive(64, OTHER)
    posted: list[tuple[int, int]] = []

    def during(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == 2:
            loop.arrive(100, ROOM, held=80)
        posted.append((len(scheduler.steps), len(reads(loop))))

    loop.during = during
    loop.run(14)
    # It has its pages before step 3, while 2 is in flight; and is posted before step 4.
    assert dict(posted)[3] == 0 and dict(posted)[4] == 1
    assert_served(loop, OTHER, ROOM)


def test_a_flush_waits_for_a_read(loop: ReadLoop):
    """And a weight update, which takes requests that have not begun for none."""
    begin_to_read(loop)
    for scheduler in loop.schedulers:
        queue = scheduler.disagg_prefill_bootstrap_queue
        asked, queue.queue = queue.queue, []
        assert not scheduler.is_fully_idle()
        queue.queue = asked
        assert scheduler.has_reads() and not scheduler.flush_cache()
        # Nothing is computed that would answer it in passing, and a decode worker may stand still for long.
        assert scheduler.is_fully_idle(for_health_check=True)
    release(loop, 10)
    assert_served(loop, ROOM)
    assert all(scheduler.flush_cache() for scheduler in loop.schedulers)


def test_an_offer_that_cannot_be_right_fails_its_request(loop: ReadLoop):
    loop.arrive(100, ROOM, asked=False, held=80)
    wire = loop.not_asked
    assert wire is not None
    wire.start_decode()
    for receiver in wire.receivers:
        receiver.offered = np.arange(3, dtype=np.int32)
    wire.ask()
    for sender in wire.senders:
        nixl_wire.until(lambda sender=sender: sender.poll() == 0, "it is refused")
    loop.run(4)
    for scheduler in loop.schedulers:
        ((req, _),) = scheduler.told
        assert scheduler.tp_rank or "it offers 3 pages of a prefix of 80 tokens" in req.finished_reason.message
        assert_rests(scheduler)


def test_a_word_that_decode_computes_it_ends_what_was_read(loop: ReadLoop):
    """It comes when all has been read and the request waits for its turn."""
    loop.arrive(200, OTHER)
    loop.arrive(100, ROOM, held=80)
    heard: set[int] = set()

    def before(scheduler: PrefillScheduler) -> None:
        if len(scheduler.steps) == 5 and scheduler.tp_rank not in heard:
            heard.add(scheduler.tp_rank)
            assert scheduler.has_reads()
            scheduler.handle_computed_request(ComputedReq(ROOM, f"request-{ROOM}"))

    loop.before = before
    loop.run(30)
    for scheduler in loop.schedulers:
        assert computed(scheduler, ROOM) == 0
        assert_rests(scheduler)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_turn_posts_no_more_than_one_read_may(monkeypatch: pytest.MonkeyPatch, ranks: int):
    """That of a request that comes with others is posted a turn later, and none goes without."""
    loop = ReadLoop(monkeypatch, ranks, True, reads=LEAST)
    monkeypatch.setattr(page_reads, "MOST_REGIONS", 5)
    rooms = [ROOM + 10 + i for i in range(3)]
    hold_reads(loop)
    for room in rooms:
        # Two buffers.
        loop.arrive(60, room, held=40)
    posted: list[int] = []
    loop.before = lambda scheduler: posted.append(len(reads(loop, 0))) if scheduler.tp_rank == 0 else None
    loop.run(6)
    assert [now - before for before, now in itertools.pairwise(posted)] == [2, 1, 0, 0, 0]
    loop.wire.wire.held, loop.before = False, lambda scheduler: None
    release(loop, 20)
    assert all(computed(scheduler, room) == 20 for scheduler in loop.schedulers for room in rooms)
    assert_served(loop, *rooms)


@pytest.mark.parametrize(("order", "held"), [("priority", 80), ("lpm", 80), ("lpm", 0)])
def test_who_may_overtake_does_not_wait_to_read(loop: ReadLoop, order: str, held: int):
    """The first one waits for memory, for as long as a transfer stands still: no read begins, but others may."""

    def arrive(prompt_len: int, room: int, priority: int, **options: Any) -> None:
        for req in loop.arrive(prompt_len, room, **options):
            req.priority = priority

    for scheduler in loop.schedulers:
        by_priority = scheduler.enable_priority_scheduling = order == "priority"
        scheduler.schedule_low_priority_values_first = False
        policy = "fcfs" if by_priority else order
        scheduler.policy = SchedulePolicy(policy, scheduler.tree_cache, False, by_priority, False)
    # Of which the tree has something, which the longest prefix goes by.
    arrive(40, ROOM + 10, 0, token=9)
    loop.run(10)
    arrive(20, THIRD, 0)
    loop.wire.wire.held = True
    loop.run(6)
    loop.wire.wire.held = False
    arrive(POOL - 10, OTHER, 0)
    loop.run(6)
    arrive(100, ROOM, 9, held=held, token=9)
    loop.run(40)
    for scheduler in loop.schedulers:
        assert [req.bootstrap_room for req, _ in scheduler.told] == [ROOM + 10, THIRD, ROOM]
    release(loop, 60)
    assert_served(loop, ROOM + 10, ROOM, THIRD, OTHER)
