"""The traps of TP ranks: rows 16 to 19 of the list that `test_traps.py` has the rest of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decode_world import aborted, tokens
from ranked_world import Rank, serve_in_step
from ranks import assert_same
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.mem_cache import decode_radix_cache, radix_cache

PAGE = 4


def lagging(rank: int, behind: int, polls_only: bool) -> list[tuple]:
    """Rank 1 learns of handshakes and of data some steps after rank 0, or the other way round."""
    me = Rank(rank)
    late = behind if rank == 1 else 0
    if behind < 0:
        late = -behind if rank == 0 else 0
    # They share too little for the second to wait for the first.
    one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(1, 8) + tokens(2, 14))

    def data(decode_req: DecodeRequest) -> None:
        me.world.complete(decode_req)

    def notified(decode_req: DecodeRequest) -> None:
        """Success is there before the metadata."""
        data(decode_req)
        me.world.meta.bootstrap_room[decode_req.kv_receiver.aux_index, 0] = 0

    def metadata(decode_req: DecodeRequest) -> None:
        me.world.meta.bootstrap_room[decode_req.kv_receiver.aux_index, 0] = decode_req.req.bootstrap_room

    plan: dict[int, list] = {}

    def at(n: int, act: Callable, decode_req: DecodeRequest) -> None:
        plan.setdefault(n, []).append(lambda: act(decode_req))

    at(1 + late, me.world.handshake, one)
    at(2, me.world.handshake, two)
    if polls_only:
        at(9 + late, data, one)
        at(9, data, two)
    else:
        at(9, notified, one)
        at(9 + late, metadata, one)
        at(9, data, two)
    return me.run(plan)


def lengths_differ(rank: int, before: int) -> list[tuple]:
    """For some steps rank 0 has a request more in its queue than rank 1."""
    me = Rank(rank)
    for n in range(before):
        me.world.handshake(me.arrive(tokens(n, 9)))

    def another() -> None:
        me.world.handshake(me.arrive(tokens(99, 9)))

    return me.run({0 if rank == 0 else 3: [another]}, steps=8)


def crowd(rank: int, size: int) -> list[tuple]:
    """So many requests at once that share nothing."""
    me = Rank(rank, size=256)
    for n in range(size):
        me.world.handshake(me.arrive(tokens(n, 9)))
    return me.run({}, steps=4)


def fails_on_one(rank: int, phase: str) -> list[tuple]:
    """One rank loses a request that the other rank has no complaints about."""
    me = Rank(rank)
    one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(2, 22))
    plan: dict[int, list] = {1: [lambda: me.world.handshake(two)], 5: [lambda: me.world.complete(two)]}

    def fail() -> None:
        if rank == 1:
            one.kv_receiver.abort()

    def quiet() -> None:
        one.kv_receiver.quiet = True

    def foreign_metadata() -> None:
        me.world.complete(one)
        if rank == 1:
            me.world.meta.bootstrap_room[one.kv_receiver.aux_index, 0] = 99

    if phase == "handshake":
        plan[3] = [fail]
    else:
        plan[1].append(lambda: me.world.handshake(one))
        plan[3] = [fail if phase == "transfer" else foreign_metadata]
        plan[6 + 2 * rank] = [quiet]
    decisions = me.run(plan)
    assert aborted(one.req) and not me.world.transfer.quarantine
    assert two.req in me.world.running
    return decisions


def dp_ranks(rank: int, neighbour: str) -> list[tuple]:
    """Two attention-DP ranks of one TP rank each. Rank 0 serves two requests, rank 1 none, or loses one."""
    own = [dist.new_group([each]) for each in range(2)][rank]
    me = Rank(rank, group=own)
    plan: dict[int, list] = {}
    if rank == 0:
        one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(1, 22) + tokens(2, 9))
        plan = {
            1: [lambda: me.world.handshake(one)],
            4: [lambda: me.world.complete(one), lambda: me.world.handshake(two)],
            7: [lambda: me.world.complete(two)],
        }
    elif neighbour != "nothing":
        lost = me.arrive(tokens(3, 30))
        plan = {9: [lambda: setattr(lost.kv_receiver, "quiet", True)], 3: [lost.kv_receiver.abort]}
        if neighbour != "handshake":
            plan[1] = [lambda: me.world.handshake(lost)]
        if neighbour == "raises":
            plan[3] = [lambda: setattr(lost.kv_receiver, "poll", lambda: 1 // 0)]
    for n in range(12):
        for act in plan.get(n, []):
            act()
        me.step()
        # What the engine has all ranks do once in each turn of its loop, whether they have requests or not.
        turns = torch.tensor([n, -n])
        dist.all_reduce(turns, op=dist.ReduceOp.MIN)
        assert turns.tolist() == [n, -n], "the ranks are in different turns"
    assert not me.world.queue.queue and not me.world.transfer.queue and not me.world.transfer.quarantine
    assert neighbour == "nothing" or rank == 0 or aborted(lost.req)
    return me.decisions


def raises_on_one(rank: int, method: str) -> list[tuple]:
    """On one rank something raises that concerns one request; the other rank has no complaints about it."""
    me = Rank(rank)
    one, two = me.arrive(tokens(1, 22)), me.arrive(tokens(2, 22))

    def broken(*args: Any, **more: Any) -> None:
        raise ValueError("broken on this rank")

    def brake() -> None:
        if rank == 1:
            setattr(one.kv_receiver, method, broken)

    def quiet() -> None:
        one.kv_receiver.quiet = True

    plan = {
        0: [brake, lambda: me.world.handshake(one)],
        2: [lambda: me.world.handshake(two)],
        6 + 2 * rank: [quiet],
        12: [lambda: me.world.complete(two)],
    }
    decisions = me.run(plan, steps=16)
    assert aborted(one.req) and not me.world.transfer.quarantine
    assert two.req in me.world.running
    return decisions


def peer_capable_on_one(rank: int) -> list[tuple]:
    """One rank has learnt that the prefill takes a prefix, the other has not."""
    me = Rank(rank)
    serve_in_step(me, tokens(1, 16))
    request = me.arrive(tokens(1, 22), peer_takes_prefix=rank == 0)
    me.world.handshake(request)
    return me.run({}, steps=2)


def trees_differ(rank: int, size: int) -> list[tuple]:
    """The trees hold different prompts of equal length, as if the ranks had evicted in a different order."""
    me = Rank(rank, size=size)
    world = me.world
    serve_in_step(me, tokens(1 + rank, 40))
    me.decisions.clear()
    request = me.arrive(tokens(1, 44))
    world.handshake(request)
    return me.run({}, steps=8)


def sizes_differ(rank: int) -> list[tuple]:
    """One rank has lost a page of its tree that the other still holds."""
    me = Rank(rank)
    serve_in_step(me, tokens(1, 40))
    me.decisions.clear()
    if rank == 1:
        me.world.tree.evict_shortfall(PAGE)
    request = me.arrive(tokens(1, 44))
    me.world.handshake(request)
    return [(admitted, ready) for admitted, ready, *_ in me.run({}, steps=8)]


def evictions(rank: int) -> list[tuple]:
    """Many prompts through a small pool, on ranks whose clocks are far apart and run at different speeds."""
    real = radix_cache.time
    if rank == 1:
        ticks = itertools.count(10**9)
        clock = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3, perf_counter=real.perf_counter)
        radix_cache.time = decode_radix_cache.time = clock
    try:
        me = Rank(rank, size=96)
        for n in range(24):
            serve_in_step(me, tokens(n % 7, 12 + n % 5))
        return me.decisions
    finally:
        radix_cache.time = decode_radix_cache.time = real


def rids_of(decisions: list[tuple], at: int) -> list[str]:
    return [one[0] if at == 0 else one for decision in decisions for one in decision[at]]


@pytest.mark.parametrize("before", [1, 2])
def test_trap_16_ranks_with_queues_of_different_length_wait_for_each_other(pair, before):
    """Ranks reduced tensors of different size, as one had a request in its queue for a step longer, and hung.

    That one queue is empty and another is not cannot be here: a request enters the queues of all ranks in the step of
    its broadcast, whether its prefill is known yet or not, and leaves them by what the ranks have agreed on.
    """
    decisions = assert_same(pair.run(lengths_differ, before))
    assert sorted(rids_of(decisions, 0)) == [f"r{n}" for n in range(1, before + 2)]
    assert decisions[0][0] == [], "the step in which they differ is left out"


def test_trap_16_ranks_agree_on_more_requests_than_a_step_admits(pair):
    """A figure more than the agreement had places for: from 8 requests on, nobody was ever admitted again."""
    decisions = assert_same(pair.run(crowd, 12))
    assert rids_of(decisions, 0) == [f"r{n}" for n in range(1, 13)]


@pytest.mark.parametrize("phase", ["handshake", "transfer", "metadata"])
def test_trap_16_a_request_that_one_rank_loses_is_lost_on_all(pair, phase):
    """What one rank alone knows makes the queues differ for good if the others do not act upon it."""
    assert_same(pair.run(fails_on_one, phase))


@pytest.mark.parametrize("neighbour", ["handshake", "transfer", "raises"])
def test_what_a_dp_rank_loses_costs_the_other_nothing(pair, neighbour):
    """Nor does a rank without requests have to answer for anything but its turns."""
    alone, _ = pair.run(dp_ranks, "nothing")
    decisions, _ = pair.run(dp_ranks, neighbour)
    assert decisions == alone
    admitted = [taken for step in alone for taken in step[0]]
    # The second came when the first was committed, and took from it.
    assert [prefix for _, prefix in admitted] == [0, 20]
    assert sum(len(step[1]) for step in alone) == 2


@pytest.mark.parametrize("method", ["poll", "send_metadata"])
def test_trap_16_an_error_on_one_rank_fails_its_request_on_all(pair, method):
    """Handled where it came it would take that rank out of step for good."""
    decisions = pair.run(raises_on_one, method)
    assert [decision[1:3] for decision in decisions[0]] == [decision[1:3] for decision in decisions[1]]


@pytest.mark.parametrize("behind", [1, 4, -3])
def test_trap_17_a_request_is_committed_when_its_metadata_is_on_all_ranks(pair, behind):
    """Success on one rank only: the metadata had not come on the others, they kept the request, and all hung."""
    decisions = assert_same(pair.run(lagging, behind, False))
    assert sorted(rids_of(decisions, 1)) == ["r1", "r2"]
    when = {rid: n for n, decision in enumerate(decisions) for rid in decision[1]}
    assert when["r1"] == 9 + abs(behind) and when["r2"] == 9


@pytest.mark.parametrize("behind", [1, 4, -3])
def test_trap_18_a_rank_that_lags_holds_the_others_up_and_no_more(pair, behind):
    """A rank came back early, with nothing to do, from where the others were waiting for it."""
    decisions = assert_same(pair.run(lagging, behind, True))
    assert sorted(rids_of(decisions, 0)) == ["r1", "r2"] == sorted(rids_of(decisions, 1))
    when = {rid: n for n, decision in enumerate(decisions) for rid, _ in decision[0]}
    assert when == {"r1": 1 + abs(behind), "r2": 2}


@pytest.mark.parametrize("size", [128, 64])
def test_trap_19_ranks_whose_trees_differ_do_not_take_different_prefixes(pair, size):
    """Ranks had evicted different prompts and matched different lengths. In a small pool only one can admit then."""
    decisions = [[decision[:2] for decision in answer] for answer in pair.run(trees_differ, size)]
    assert_same(decisions)


def test_trap_19_ranks_whose_trees_differ_in_size_admit_nothing(pair):
    decisions = assert_same(pair.run(sizes_differ))
    assert not rids_of(decisions, 0)


def test_trap_19_a_prefix_is_named_only_if_all_ranks_may(pair):
    decisions = assert_same(pair.run(peer_capable_on_one))
    assert decisions[-1][0] or decisions[-2][0]
    assert all(length == 0 for decision in decisions[2:] for _, length in decision[0])


def test_trap_19_ranks_evict_alike_whatever_their_clocks_say(pair):
    """The order of eviction came from each rank's own clock."""
    decisions = assert_same(pair.run(evictions))
    assert len(rids_of(decisions, 1)) == 24
