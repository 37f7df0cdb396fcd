"""Admission by prefix over two TP ranks: clocks and paces that differ, peers of which one rank knows more."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import test_step_costs
import torch.distributed as dist
from decode_world import World, asked, end_patience, queue, sent, tokens
from ranked_world import Rank
from ranks import assert_same
from sglang.srt.disaggregation.decode_radix import admission
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from sglang.srt.disaggregation.prefix_policy import Expired
from test_followers import CLOCKS


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

    for module in CLOCKS:
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
        for _ in range(admission.ABORT_INTERVAL):
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


def test_a_wait_ends_once_it_is_agreed_to_be_long_enough():
    world = World(size=256)
    _, follower = queue(world, tokens(1, 40), tokens(1, 40) + tokens(2, 8))
    world.step()
    rules, waits, now = world.queue.policy, follower.entry, time.monotonic()
    assert not rules.find_leader(waits, now) and waits.coming == 40
    # Long enough by this rank's clock; it waits until the others say so too.
    assert rules.find_leader(waits, now + 3600) and waits.coming == 40
    rules.give_up(waits)
    assert waits.coming == 0
    assert not rules.find_leader(waits, now + 3600), "it does not wait any more"
    assert waits.coming == 0


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
                for _ in range(admission.ABORT_INTERVAL):
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
        while not follower.wire.asked and steps < 3 * admission.ABORT_INTERVAL:
            world.step()
            steps += 1
        return [steps]
    finally:
        restore_clock()


def test_who_has_waited_long_enough_is_admitted_in_the_next_step(pair):
    """Steps are left out while another does not fit, but not the one in which this one is a candidate again."""
    assert assert_same(pair.run(patience_ends_beside_one_that_does_not_fit))[0] <= admission.ABORT_INTERVAL + 1


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
    late = admission.ABORT_INTERVAL
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


def herd(rank: int, lost: str) -> list[tuple]:
    """Four requests of one prefix and one that shares nothing. The leader is lost on one rank only, or on none."""
    me = Rank(rank, 256)
    requests = [me.arrive(tokens(1, 32) + tokens(n, 4)) for n in range(2, 6)] + [me.arrive(tokens(9, 20))]
    for decode_req in requests:
        me.world.handshake(decode_req)
    wires = [decode_req.kv_receiver for decode_req in requests]

    def lose() -> None:
        if rank == 1:
            wires[0].abort()

    def arrive() -> None:
        for decode_req in list(me.world.transfer.queue):
            me.world.complete(decode_req)

    def patience_ends() -> None:
        # One rank's clock is ahead: it would no longer wait.
        if rank == 1:
            for decode_req in me.world.queue.queue:
                end_patience(decode_req.entry)

    plan: dict[int, list] = {4: [arrive], 8: [arrive], 12: [arrive]}
    if lost == "leader":
        plan[2] = [lose]
    if lost == "patience":
        plan[2] = [patience_ends]
    return me.run(plan)


@pytest.mark.parametrize("lost", ["nothing", "leader", "patience"])
def test_ranks_follow_alike(pair, lost):
    """Who waits for whom is the same on all ranks, also when one rank loses the leader, or its patience, first."""
    decisions = assert_same(pair.run(herd, lost))
    admitted = [(n, rid, prefix) for n, decision in enumerate(decisions) for rid, prefix in decision[0]]
    alone = [(rid, prefix) for n, rid, prefix in admitted if n < 4]
    leaders = ["r1", "r2"] if lost == "leader" else ["r1"]
    assert sorted(alone) == sorted([(rid, 0) for rid in [*leaders, "r5"]])
    assert sorted(admitted) == admitted and {prefix for n, _, prefix in admitted if n >= 4} == {32}
    assert len(admitted) == 5


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


@pytest.mark.parametrize("expired", [[n] for n in (0, 1, 31, 32, WINDOW - 1)] + [[*range(WINDOW)], []])
def test_every_request_has_its_bit(expired):
    gave_up: list[int] = []
    entries: Any = [SimpleNamespace(give_up=lambda n=n: gave_up.append(n)) for n in range(WINDOW)]
    first, other = Expired(), Expired()
    first.note(entries, expired)
    assert len(first.own()) == Expired.width and min(first.own()) >= 0
    other.note(entries, [7])
    other.take(first.own())
    assert gave_up == expired


@pytest.mark.parametrize(
    ("case", "at_once", "most"),
    [
        # All fit, and are admitted in the first step; the others reduce the polls of their transfers.
        ((64, 0, 0, 64, 64), 64, 15),
        # As many fit as well where each has to evict for it.
        ((64, 16, 0, 12, 520), 12, 15),
    ],
    ids=["memory is free", "each evicts"],
)
def test_ranks_admit_at_once_what_fits_and_meet_at_most_once_a_step(pair, case, at_once, most):
    admitted, collectives = zip(*assert_same(pair.run(test_step_costs.ranks, *case)), strict=True)
    assert admitted == (at_once, *[0] * 14) and max(collectives) <= 1, f"admitted {admitted}, {collectives}"
    assert sum(collectives) <= most, collectives
