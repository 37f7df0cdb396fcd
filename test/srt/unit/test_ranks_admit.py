"""Admission over two TP ranks: long queues, clocks and paces that differ, peers of which one rank knows more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from decode_world import World, end_patience
from ranks import assert_same
from sglang.srt.disaggregation import admission_step, decode_admission, decode_schedule
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_agreement import DISAGREEMENTS, SHARED_FIGURES, WINDOW, agree
from test_followers import asked, queue, sent
from test_traps import Rank, serve_to_end, tokens


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
    """Each rank kept an order of its own then, and no step admitted anybody."""
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


def differ_for_long(rank: int, differing: int) -> list[Any]:
    """One rank's tree has lost 4 tokens, and a request waits."""
    world = World(size=256, page_size=4, group=dist.group.WORLD)
    serve_to_end(world, tokens(1, 32))
    if rank == differing:
        world.tree.evict_shortfall(4)
    queue(world, tokens(2, 8))
    for step in range(2 * DISAGREEMENTS):
        try:
            world.step()
        except RuntimeError as error:
            return [step, str(error)]
    return ["goes on", ""]


@pytest.mark.parametrize("differing", [0, 1])
def test_ranks_that_differ_for_long_end_together(pair, differing):
    """They skip steps, and would for ever: nothing brings them together again."""
    steps, why = assert_same(pair.run(differ_for_long, differing))
    assert steps == DISAGREEMENTS - 1 and "TP ranks have disagreed for 64 steps" in why
