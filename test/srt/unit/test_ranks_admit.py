"""Admission over two TP ranks: long queues, clocks and paces that differ, peers of which one rank knows more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decode_world import World, aborted, end_patience
from ranks import assert_same
from sglang.srt.disaggregation import admission_step, decode_admission, decode_schedule
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_sender import NO_REASON
from sglang.srt.disaggregation.decode_agreement import DISAGREEMENTS, SHARED_FIGURES, WINDOW, agree
from sglang.srt.mem_cache.prefix_reader import NOTHING
from test_followers import asked, queue, sent
from test_traps import Rank, serve, serve_to_end, tokens


def cold_behind_hot(rank: int, backlog: int, bound: int) -> list[Any]:
    """One request runs at a time, as at --max-running-requests, and requests of a prefix that is there keep coming."""
    me = Rank(rank, 4096)
    world = me.world
    world.queue.policy.max_overtaken = bound
    hot = tokens(1, 64)
    (first,) = queue(world, hot + tokens(2, 4))
    me.step()
    world.complete(first)
    me.step()
    rows, world.pool.free_slots[:] = world.pool.free_slots[:], []
    (cold,) = queue(world, tokens(9, 64))
    waiting: list[Any] = []
    served = 0
    for step in range(6 * bound):
        while len([dr for dr in waiting if not dr.wire.asked]) < backlog:
            n = len(waiting)
            waiting += queue(world, hot + [n % 200, n // 200, 3, 3])
        if step == 1:
            # All have shaken hands.
            world.pool.free_slots[:] = rows[:1]
        world.step()
        if cold.wire.asked:
            return [step, cold.entry.overtaken, served]
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
        for req in list(world.running):
            if req is not first.req:
                world.finish(req)
                served += 1
    return ["never", cold.entry.overtaken, served]


@pytest.mark.parametrize("backlog", [7, 9, 40])
def test_who_shares_nothing_is_admitted_however_many_share(pair, backlog):
    """Ranks look at the first of the order; whoever stood behind these was overtaken for ever and never counted."""
    bound = 16
    steps, overtaken, served = assert_same(pair.run(cold_behind_hot, backlog, bound))
    assert steps != "never" and overtaken == served == bound


def set_clock(clock: Callable[[], float]) -> None:
    """Of admission alone, in this process."""

    class Clock:
        monotonic = staticmethod(clock)
        perf_counter = time.perf_counter

    for module in (decode_admission, decode_schedule, admission_step):
        module.time = Clock  # type: ignore[attr-defined]


def restore_clock() -> None:
    set_clock(time.monotonic)


def ticks_between(rank: int, ahead: int) -> list[Any]:
    """The patience of two followers ends in adjacent steps; in the first, on one rank only."""
    me = Rank(rank, 512)
    now = [100.0]
    set_clock(lambda: now[0])
    try:
        (leader,) = queue(me.world, tokens(1, 32) + tokens(2, 4))
        me.step()
        # Of two prefills, or the second would wait for the first.
        (first,) = queue(me.world, tokens(1, 32) + tokens(3, 4), prefill="b:1")
        (second,) = queue(me.world, tokens(1, 32) + tokens(4, 4), prefill="c:1")
        me.step()
        assert first.entry.coming == second.entry.coming == 32
        if rank == ahead:
            end_patience(first.entry)
        me.step()
        end_patience(first.entry)
        end_patience(second.entry)
        held = me.world.tree.evictable_size()
        worst = 0
        for _ in range(admission_step.ABORT_INTERVAL):
            me.step()
            worst = max(worst, me.world.queue.ranks.disagreements)
        return [asked([leader, first, second]), worst, held == me.world.tree.evictable_size(), me.decisions]
    finally:
        restore_clock()


@pytest.mark.parametrize("ahead", [0, 1])
def test_patience_that_ends_on_one_rank_first(pair, ahead):
    """Each rank kept an order of its own then, and after 64 steps the whole unlocked tree was dropped on both."""
    admitted, worst, kept, _ = assert_same(pair.run(ticks_between, ahead))
    assert admitted == [True, True, True] and worst == 0 and kept


def herd_gives_up(rank: int) -> list[Any]:
    """A leader takes longer than its herd waits, three times over."""
    me = Rank(rank, 2048)
    now = [100.0]
    set_clock(lambda: now[0])
    try:
        herd = queue(me.world, tokens(1, 32), *(tokens(1, 32) + tokens(n, 4) for n in range(2, 7)))
        me.step()
        copies, worst = [], 0
        for _ in range(3):
            # Ahead on the second rank, which does not decide.
            now[0] += 5.1 * (1 + rank)
            for wait in (0.0, 5.1 * (1 - rank), 0.0):
                now[0] += wait
                # By a clock of one rank, all look every few steps.
                for _ in range(admission_step.ABORT_INTERVAL):
                    me.step()
                    worst = max(worst, me.world.queue.ranks.disagreements)
            copies.append(sum(asked(herd)))
        me.world.complete(herd[0])
        for _ in range(3):
            me.step()
        return [copies, worst, all(asked(herd)), me.decisions]
    finally:
        restore_clock()


def test_a_herd_gives_up_its_leader_one_by_one(pair):
    copies, worst, admitted, _ = assert_same(pair.run(herd_gives_up))
    assert copies == [2, 3, 4] and worst == 0 and admitted


def patience_ends_beside_one_that_does_not_fit(rank: int) -> list[Any]:
    world = World(group=dist.group.WORLD, size=128, max_reqs=8)
    now = [100.0]
    set_clock(lambda: now[0])
    try:
        queue(world, tokens(1, 16) + tokens(70, 4))
        world.step()
        (follower,) = queue(world, tokens(1, 24) + tokens(9, 4))
        world.step()
        queue(world, tokens(30, 110))
        world.step()
        assert follower.entry.coming == 16 and world.queue.admission.blocked is not None
        now[0] += 61
        steps = 0
        while not follower.wire.asked and steps < 3 * admission_step.ABORT_INTERVAL:
            world.step()
            steps += 1
        return [steps]
    finally:
        restore_clock()


def test_who_has_waited_long_enough_is_admitted_in_the_next_step(pair):
    """Steps are left out while another does not fit, but not the one in which this one is a candidate again."""
    assert assert_same(pair.run(patience_ends_beside_one_that_does_not_fit))[0] <= admission_step.ABORT_INTERVAL + 1


def paces_differ(rank: int, faster: int) -> list[Any]:
    """The ranks have measured paces of a prefill that are 3% apart; a step takes 1 ms."""
    me = Rank(rank, 4096)
    now = [100.0]
    set_clock(lambda: now[0])
    try:
        me.world.queue.policy.transfers.done("b:1", 256, 1.00 if rank == faster else 1.03)
        (leader,) = queue(me.world, tokens(1, 1024), prefill="a:1")
        me.step()
        (follower,) = queue(me.world, tokens(1, 1020) + tokens(3, 4), prefill="b:1")
        me.step()
        assert follower.entry.coming == 1020
        # 1020 tokens at that pace: 3.98 s on one rank and 4.1 s on the other.
        now[0] += 3.9
        worst = steps = 0
        while not follower.wire.asked and steps < 400:
            now[0] += 0.001
            steps += 1
            me.step()
            worst = max(worst, me.world.queue.ranks.disagreements)
        return [steps, worst]
    finally:
        restore_clock()


@pytest.mark.parametrize("faster", [0, 1])
def test_paces_that_differ_between_ranks(pair, faster):
    steps, worst = assert_same(pair.run(paces_differ, faster))
    assert worst == 0
    # As the first rank says, in one of the next steps.
    late = admission_step.ABORT_INTERVAL
    assert 80 <= steps <= 84 + late if faster == 0 else 200 <= steps <= 204 + late


def prefill_known_on_one(rank: int, knows: int) -> list[Any]:
    """One rank has learnt that the follower's prefill takes a prefix, and the other has not."""
    me = Rank(rank, 512)
    (leader,) = queue(me.world, tokens(1, 32))
    me.step()
    (follower,) = queue(me.world, tokens(1, 32) + tokens(2, 4), peer_takes_prefix=rank == knows, prefill="b:1")
    # What it asks for depends on what this rank knows, so it is told without.
    follower.kv_receiver.peer_takes_prefix = rank == knows
    (other,) = queue(me.world, tokens(9, 20))
    worst = 0
    for _ in range(4):
        me.step()
        worst = max(worst, me.world.queue.ranks.disagreements)
    return [asked([leader, follower, other]), follower.req.decode_prefix_len, worst]


@pytest.mark.parametrize("knows", [0, 1])
def test_who_may_follow_is_agreed(pair, knows):
    """Else one rank has it wait and the other does not, and neither goes on with anybody."""
    admitted, prefix_len, worst = assert_same(pair.run(prefill_known_on_one, knows))
    assert admitted == [True, True, True] and prefix_len == 0 and worst == 0


def decides(rank: int) -> list[Any]:
    expired = [[0, 31, 32, WINDOW - 1], [1, 2, 32]][rank]
    n = WINDOW if rank == 0 else WINDOW
    told = agree(dist.group.WORLD, [0] * SHARED_FIGURES, [], [KVPoll.WaitingForInput] * n, [True] * n, expired)
    return [told.expired, told.in_step, min(told.polls), min(told.capable)]


def test_what_goes_by_a_clock_the_first_rank_decides(pair):
    expired, in_step, poll, capable = assert_same(pair.run(decides))
    assert expired == [0, 31, 32, WINDOW - 1] and in_step and poll == KVPoll.WaitingForInput and capable


def fails_to_admit(rank: int) -> list[Any]:
    """An admission fails on one rank, which then has more memory than the other, in the middle of a step."""
    me = Rank(rank, 128)
    real = me.world.queue.memory.give

    def admit(req, *args):
        if rank == 1 and req.rid == "r1":
            raise RuntimeError("out of memory on this rank")
        real(req, *args)

    me.world.queue.memory.give = admit  # type: ignore[method-assign]
    one, two = queue(me.world, tokens(1, 60), tokens(2, 60))
    three = queue(me.world, tokens(3, 60))
    me.world.step()
    first = [len(me.world.transfer.queue), asked([two, *three])]
    one.kv_receiver.quiet = True
    me.world.step()
    return first


def test_an_admission_that_fails_on_one_rank_changes_no_other_decision(pair):
    queued, admitted = assert_same(pair.run(fails_to_admit))
    assert queued == 2 and admitted == [True, False]


def silent_prefill(rank: int, silent: int) -> list[Any]:
    """So many requests of a prefill that does not answer came first; those of another prefill keep coming."""
    me = Rank(rank, 1024)
    for n in range(silent):
        me.world.arrive([n % 250, n // 250, 1, 1])
    others: list[Any] = []
    for n in range(24):
        others += queue(me.world, [n, 251, 1, 1], prefill="b:1", max_new=1)
        me.world.step()
        for decode_req in list(me.world.transfer.queue):
            me.world.complete(decode_req)
        for req in list(me.world.running):
            me.world.finish(req)
    waited = [n for n, dr in enumerate(others) if not dr.wire.asked]
    return [waited, me.world.queue.ranks.disagreements, len(me.world.queue.queue) - silent]


@pytest.mark.parametrize("silent", [100, 300, 1000])
def test_a_prefill_that_does_not_answer_hides_no_other(pair, silent):
    """A step looked at the first 256 of the queue, whoever they waited for, and nobody behind them was admitted."""
    waited, disagreements, queued = assert_same(pair.run(silent_prefill, silent))
    assert disagreements == 0
    # Some steps until it is their turn to be asked about.
    assert len(waited) == queued <= 1 + silent // 128


def test_a_leader_that_does_not_pay_hides_none_that_does():
    """A long prompt of the same document came first; nobody waits for that, and nobody waited for the short one."""
    world = World(size=4096, page_size=4, max_reqs=64)
    doc = tokens(1, 64)
    requests = queue(world, doc + tokens(2, 400))
    world.step()
    requests += queue(world, doc + tokens(3, 8))
    world.step()
    requests += queue(world, *(doc + tokens(n, 8) for n in range(10, 18)))
    for _ in range(3):
        world.step()
    assert asked(requests) == [True, True] + [False] * 8
    for _ in range(2):
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
    assert all(asked(requests))
    assert sent(requests[1:]) == (64 + 9 * 8) // 4
    world.check()


def test_a_retracted_request_that_is_aborted_holds_nobody_up():
    """It did not fit, was aborted, and what waits in the queue was not looked at for some steps."""
    world = World(size=128, page_size=4, reserved=2)
    queue(world, tokens(1, 40), tokens(2, 40), max_new=8)
    for _ in range(2):
        world.step()
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
    assert len(world.running) == 2
    req = world.running[1]
    for _ in range(4):
        world.decode()
    world.retract(req)
    (other,) = queue(world, tokens(5, 4), max_new=1)
    # What it takes to come back, others hold; for the other there is enough.
    world.tree.evict_shortfall(world.tree.evictable_size())
    taken = world.allocator.alloc(world.allocator.available_size() - 16)
    world.step()
    assert req in world.queue.retracted_queue and not other.wire.asked
    world.abort_retracted(req)
    world.step()
    assert other.wire.asked
    world.allocator.free(taken)
    world.check()


def break_admission(world: World, broken: bool, rid: str) -> None:
    """Have the admission or resume of ``rid`` raise on this rank."""
    real = world.queue.memory.give

    def admit(req, *args):
        if broken and req.rid == rid:
            raise RuntimeError("out of memory on this rank")
        real(req, *args)

    world.queue.memory.give = admit  # type: ignore[method-assign]


def break_allocation(world: World, broken: bool, rid: str) -> None:
    """Have the pool have no slots for ``rid`` on this rank."""
    memory, real = world.queue.memory, world.queue.memory._allocate

    def allocate(req, *args):
        with pytest.MonkeyPatch.context() as patch:
            if broken and req.rid == rid:
                patch.setattr(world.tree.pool, "alloc_long_runs", lambda size: None)
            return real(req, *args)

    memory._allocate = allocate  # type: ignore[method-assign]


def fails_before_one_of_its_prefix(rank: int, failing: int) -> list[Any]:
    """Where memory is short, two requests of one prefix that nobody holds come in one step, and one behind them."""
    world = World(size=64, page_size=4, reserved=2, group=dist.group.WORLD)
    (first,) = queue(world, [1] * 40, max_new=1)
    world.step()
    world.complete(first)
    world.step()
    for req in list(world.running):
        world.finish(req)
    break_allocation(world, rank == failing, "r2")
    queue(world, [1] * 40 + [2] * 8, [1] * 40 + [3] * 8, max_new=4)
    world.step()
    admitted = [dr.req.rid for dr in world.transfer.queue]
    world.step()
    return admitted


def fails_beside_windows(rank: int, failing: int) -> list[Any]:
    """Windows are short, and what others keep of them goes by the lengths of those that are admitted."""
    world = World(size=512, page_size=4, windows=(8, 64), reserved=16, group=dist.group.WORLD)
    break_allocation(world, rank == failing, "r1")
    queue(world, *([n] * 9 for n in range(1, 9)), max_new=16)
    world.step()
    admitted = [dr.req.rid for dr in world.transfer.queue]
    world.step()
    return admitted


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("play", [fails_before_one_of_its_prefix, fails_beside_windows])
def test_who_could_not_get_its_memory_counts_for_the_rest_of_the_step(pair, play, failing):
    """What it would have locked was counted once more for the next; the ranks then polled different requests."""
    admitted = assert_same(pair.run(play, failing))
    assert len(admitted) > 1


def fails_before_a_blocked_one(rank: int, failing: int) -> list[Any]:
    """A warm-up fails on one rank, and behind it a request is found not to fit."""
    me = Rank(rank, 128)
    serve(me.world, tokens(9, 64), max_new=8)
    break_admission(me.world, rank == failing, "r2")
    requests = queue(me.world, tokens(1, 4), warmup=True) + queue(me.world, tokens(2, 80))
    for _ in range(4):
        me.step()
    return [aborted(requests[0].req), asked(requests[1:]), me.world.queue.ranks.disagreements]


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_leave_out_the_same_steps_when_an_admission_has_failed_on_one(pair, failing):
    """One took the lock that was given back later for news and asked the others, who had nothing to ask: both hung."""
    assert assert_same(pair.run(fails_before_a_blocked_one, failing)) == [True, [False], 0]


def fails_where_no_row_is_left(rank: int, failing: int, fails: Callable) -> list[Any]:
    """One rank has a row and a buffer more, until the other gives its own back."""
    world = World(size=512, page_size=4, max_reqs=2, group=dist.group.WORLD)
    fails(world, rank == failing, "r2")
    rows = world.pool.available_size()
    requests = queue(world, *(tokens(n, 16) for n in range(rows + 2)))
    for _ in range(6):
        world.step()
    seen = [sum(asked(requests)) - rows, world.pool.available_size()]
    for decode_req in world.transfer.quarantine:
        decode_req.kv_receiver.quiet = True
    for _ in range(6):
        world.step()
    return [*seen, sum(asked(requests)) - rows, world.pool.available_size()]


@pytest.mark.parametrize("fails", [break_admission, break_allocation])
@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_leave_out_the_same_steps_where_no_row_is_left_on_one(pair, failing, fails):
    by_rank = pair.run(fails_where_no_row_is_left, failing, fails)
    assert by_rank[1 - failing] == [0, 0, 1, 0] and by_rank[failing] == [-1, 1, 0, 0]


def fails_before_it_has_evicted(rank: int, failing: int) -> list[Any]:
    """What it evicts on the other rank is what the next of the step has in the tree on this one."""
    world = World(size=160, page_size=4, reserved=4, max_reqs=8, watermark=0, group=dist.group.WORLD)
    for held in ([1] * 16, [2] * 64):
        serve_to_end(world, held, max_new=1)
    break_admission(world, rank == failing, f"r{next(world._ids) + 1}")
    queue(world, [9] * 92, max_new=4)
    others = queue(world, [1] * 16 + [3] * 32, [2] * 64 + [4] * 80, max_new=4)
    for _ in range(4):
        world.step()
    return [(decode_req.wire.asked, decode_req.wire.prefix_len) for decode_req in others]


@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_is_admitted_with_a_prefix_that_one_rank_has_evicted(pair, failing):
    assert_same(pair.run(fails_before_it_has_evicted, failing))


def full_hit_fails(rank: int, failing: int) -> list[Any]:
    """An admission that takes no memory fails on one rank, which then has a row that the other has not."""
    me = Rank(rank, 128)
    serve(me.world, tokens(9, 64), max_new=8)
    break_admission(me.world, rank == failing, "r2")
    (one,) = queue(me.world, tokens(9, 64))
    me.world.pool.free_slots = me.world.pool.free_slots[:1]
    me.world.step()
    (two,) = queue(me.world, tokens(2, 8))
    for _ in range(3):
        me.world.step()
    before = asked([two])
    one.kv_receiver.quiet = True
    for _ in range(2):
        me.world.step()
    return [before, asked([two]), me.world.queue.ranks.disagreements]


@pytest.mark.parametrize("failing", [0, 1])
def test_rows_that_one_rank_has_more_are_seen(pair, failing):
    assert assert_same(pair.run(full_hit_fails, failing)) == [[False], [True], 0]


def resumes_beside_a_failed_one(rank: int, failing: int) -> list[Any]:
    """An admission has failed on one rank, on which a retracted request fits before its writers have gone."""
    me = Rank(rank, 128)
    running = serve(me.world, tokens(9, 40), max_new=8).req
    break_admission(me.world, rank == failing, "r2")
    (one,) = queue(me.world, tokens(1, 60))
    me.world.step()
    me.world.retract(running)
    me.world.tree.evict_shortfall(me.world.tree.evictable_size())
    taken = me.world.allocator.alloc(48)
    resumed = []
    for step in range(4):
        one.kv_receiver.quiet = step == 2
        me.world.step()
        resumed.append(running in me.world.running)
        me.world.queue.pop_preallocated()
        me.world.waiting.extend(me.world.transfer.pop_transferred())
    me.world.allocator.free(taken)
    me.world.check()
    return resumed


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_resume_the_same_when_one_has_more_memory(pair, failing):
    assert assert_same(pair.run(resumes_beside_a_failed_one, failing)) == [False, False, False, True]


def lacks_memory(world: World, part: str) -> None:
    """Have this rank lack the memory for a part of the next admission: once, or in one piece."""
    memory, real = world.queue.memory, world.queue.memory.give
    owner, name, times = {
        "lock": (torch.Tensor, "clone", 1),
        "pages": (world.tree.pool, "alloc_long_runs", 1),
        "slots": (torch, "add", 1),
        "evicted": (torch, "cat", 1),
        "row": (world.pool, "alloc", 1),
        "table": (torch, "cat", 9),
        "host memory": (world.queue.admission, "_loads", 1),
    }[part]
    if part == "host memory":
        world.queue.admission._loads = NoHostMemory()
        return
    usual, raised = getattr(owner, name), []

    def once(*args: Any, **more: Any) -> Any:
        if len(raised) < times:
            raised.append(name)
            raise torch.OutOfMemoryError("out of memory on this rank")
        return usual(*args, **more)

    def give(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, once)
            return real(*args)

    memory.give = give  # type: ignore[method-assign]


class NoHostMemory:
    """Loads from host memory that cannot be locked."""

    def found(self, entry: Any, found: Any) -> Any:
        return NOTHING

    def lock(self, decode_req: Any, held: int) -> None:
        raise RuntimeError("out of memory on this rank")

    def begin(self, decode_req: Any, held: int) -> int:
        return held


def retracts_beside_a_failed_one(rank: int, failing: int, part: str, shared: int) -> list[Any]:
    """An admission has failed on one rank, and its prefill takes long to say that it writes no more."""
    me = Rank(rank, 96)
    world = me.world
    running = queue(world, tokens(1, 20), tokens(2, 20), max_new=30)
    me.step()
    for decode_req in running:
        world.complete(decode_req)
    me.step()
    if rank == failing:
        lacks_memory(world, part)
    (lost,) = queue(world, tokens(1, shared) + tokens(3, 20 - shared), max_new=4)
    lost.kv_receiver.writers_done = lambda: False
    seen: list[Any] = []
    for _ in range(26):
        me.step()
        world.decode()
        seen.append((len(world.running), world.allocator.available_size(), world.pool.available_size()))
    told = [aborted(lost.req), len(world.transfer.quarantine)]
    lost.kv_receiver.writers_done = lambda: True
    world.step()
    world.check()
    return [*told, seen, world.allocator.available_size(), world.tree.evictable_size()]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("part", "shared"),
    [
        ("lock", 8),
        ("pages", 0),
        ("pages", 16),
        ("slots", 0),
        ("slots", 16),
        ("row", 0),
        ("table", 16),
        ("host memory", 0),
    ],
)
def test_ranks_retract_the_same_when_an_admission_has_failed_on_one(pair, failing, part, shared):
    """What it had been given was back at once there: only the others retracted, and ran another batch from then on."""
    failed, quarantined, seen, *_ = assert_same(pair.run(retracts_beside_a_failed_one, failing, part, shared))
    assert failed and quarantined == 1 and min(running for running, *_ in seen) == 1


def evicts_in_a_failed_one(rank: int, failing: int, part: str) -> list[Any]:
    """One rank lacks memory in the middle of an eviction: to split the last victim, or to free them all at once."""
    world = World(size=64, page_size=4, group=dist.group.WORLD)
    prompts = [tokens(n, 16) for n in (1, 2, 3)]
    for prompt in prompts:
        serve_to_end(world, prompt)
    if rank == failing:
        lacks_memory(world, part)
    (lost,) = queue(world, tokens(7, 38))
    world.step()
    lost.kv_receiver.abort()
    lost.kv_receiver.quiet = True
    for _ in range(2):
        world.step()
    world.check()
    held = [world.tree.peek(prompt, None).length for prompt in prompts]
    (other,) = queue(world, tokens(8, 60))
    world.step()
    return [aborted(lost.req), held, asked([other]), world.queue.memory.figures()]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("part", ["lock", "evicted"])
def test_ranks_evict_the_same_when_one_lacks_memory_for_it(pair, failing, part):
    """What had been evicted there was never free again, and what was to be split never went."""
    lost, held, admitted, _ = assert_same(pair.run(evicts_in_a_failed_one, failing, part))
    assert lost and sum(held) == 24 and admitted == [True]


def resume_fails(rank: int, failing: int, where: str) -> list[Any]:
    """A retracted request cannot be brought back on one rank; another can."""
    me = Rank(rank, 128)
    reqs = [serve(me.world, tokens(n, 20), max_new=8).req for n in (1, 2)]
    for req in reversed(reqs):
        me.world.retract(req)
    lost, kept = me.world.queue.retracted_queue
    if where == "admit":
        break_admission(me.world, rank == failing, lost.rid)
    elif rank == failing:
        lost.restore_kv_cache = None
    me.world.step()
    me.world.check()
    return [aborted(lost), lost in me.world.running, kept in me.world.running]


@pytest.mark.parametrize("where", ["admit", "restore"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_request_that_one_rank_cannot_resume_is_aborted_on_all(pair, failing, where):
    """Else they go on with different batches."""
    assert assert_same(pair.run(resume_fails, failing, where)) == [True, False, True]


def retracted_beside_another_tree(rank: int, differing: int) -> tuple[int, int]:
    """A retracted request, nobody in the queue, and 4 tokens that one rank's tree has lost."""
    world = World(size=256, page_size=4, group=dist.group.WORLD)
    serve_to_end(world, tokens(1, 32))
    world.retract(serve(world, tokens(90, 24), max_new=60).req)
    if rank == differing:
        world.tree.evict_shortfall(4)
    steps = 0
    while world.queue.retracted_queue and steps < 4 * DISAGREEMENTS:
        world.step()
        steps += 1
    return steps, len(world.queue.retracted_queue)


@pytest.mark.parametrize("differing", [0, 1])
def test_ranks_that_differ_resume_after_all(pair, differing):
    """Nobody else is there to find out that they do, and who has been retracted waited for ever."""
    steps, left = assert_same(pair.run(retracted_beside_another_tree, differing))
    assert DISAGREEMENTS <= steps <= DISAGREEMENTS + 2 and not left


def fails_for_what_one_knows(rank: int, knowing: int, asked_for: bool) -> list[Any]:
    """A request fails, and only one rank knows why; what it told of that on each."""
    me = Rank(rank, 128)
    (decode_req,) = queue(me.world, tokens(1, 60))
    other = queue(me.world, tokens(2, 20))

    def knows_nothing() -> None:
        raise RuntimeError(NO_REASON)

    decode_req.kv_receiver.failure_exception = knows_nothing
    if asked_for:
        me.world.step()
    if rank == knowing:
        decode_req.lose("prefill reported: its disk is on fire")
    me.world.step()
    me.world.step()
    return [decode_req.req.finished_reason.message, [dr.is_aborted for dr in other]]


@pytest.mark.parametrize("asked_for", [False, True], ids=["handshake", "transfer"])
@pytest.mark.parametrize("knowing", [0, 1])
def test_the_rank_that_answers_a_client_hears_why_a_request_has_failed(pair, knowing, asked_for):
    told, others = zip(*pair.run(fails_for_what_one_knows, knowing, asked_for), strict=True)
    cause = "prefill reported: its disk is on fire"
    assert told[0].endswith(f": {cause} (on TP rank 1)" if knowing else f": {cause}")
    # The other counts it as a failure of another rank.
    assert told[1].endswith(f": {cause}") == bool(knowing)
    assert others == ([False], [False])
