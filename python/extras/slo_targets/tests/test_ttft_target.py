"""A target for TTFT: who is late goes after those that are not, none waits for ever, and ranks have one order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World, asked, queue, serve, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from ranked_world import Rank
from ranks import assert_same
from sglang.srt.disaggregation import ttft_target
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from sglang.srt.disaggregation.prefix_policy import admission_order
from sglang.srt.disaggregation.ttft_target import EVERY, LATE_INTERVAL, LateLines, TtftTarget, late_by_turns
from test_followers import candidates_of
from test_overlap_guard import Play, scripts


def target(ms: float, **more: Any) -> dict[str, Any]:
    return {"disaggregation_decode_ttft_target": ms, **more}


@contextmanager
def own_clock() -> Iterator[Any]:
    """Seconds that a test sets, by which the target goes."""
    found = SimpleNamespace(now=100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ttft_target, "time", SimpleNamespace(monotonic=lambda: found.now))
        yield found


@pytest.fixture
def clock() -> Iterator[Any]:
    with own_clock() as found:
        yield found


def told(world: World) -> dict[str, Any]:
    """What ``kv_pool`` has of it."""
    world.scheduler.disagg_decode_prealloc_queue = world.queue
    return {name: figures for state in world.transfer.hooks.state for name, figures in state().items()}


def target_of(world: World) -> TtftTarget | None:
    return world.transfer.ttft_target


def admitted(waiting: list[Any]) -> list[int]:
    """Which of ``waiting`` have been asked for, by their numbers."""
    return [n for n, dr in enumerate(waiting) if dr.wire.asked]


def test_what_leaves_without_an_admission_is_kept_no_longer():
    world = World(size=32, page_size=4, reserved=0, options=target(1e9))
    first, *rest = queue(world, *(tokens(n + 1, 24) for n in range(5)))
    world.step()
    assert admitted([first, *rest]) == [0] and len(target_of(world)._in_time) == 4
    for decode_req in rest:
        decode_req.kv_receiver.abort()
    for _ in range(LATE_INTERVAL):
        world.step()
    assert not world.queue.queue and not target_of(world)._in_time


# ---- who is late ----


def test_who_has_waited_for_longer_than_is_left_of_the_target(clock):
    target = TtftTarget(2.0)
    for number in range(4):
        target.joined(number)
        clock.now += 0.5
    # The first came 2 s ago, just in time.
    assert target.own() == [0]
    clock.now += 0.01
    assert target.own() == [1]
    # Between its admission and its first token one takes 0.6 s: who came 1.5 s ago is late as well.
    for _ in range(3):
        target.arrived(0.6)
    assert target.own() == [2]
    # It goes by the slower ones of the last, not by the slowest.
    for n in range(64):
        target.arrived(1.9 if n < 15 else 0.1)
    assert target.state(0)["takes_ms"] == 100.0
    # Who is late remains so.
    assert target.own() == [2]


# ---- the order ----


@given(st.lists(st.booleans(), max_size=12), st.lists(st.booleans(), max_size=12), st.integers(0, EVERY))
def test_every_fourth_is_late(in_time, late, since):
    """Of those that take a place: who waits for the transfer of another (True) takes none."""
    follow = [*in_time, *late]
    ours, theirs = [*range(len(in_time))], [*range(len(in_time), len(follow))]
    order = late_by_turns(ours, theirs, since, follow.__getitem__)
    assert sorted(order) == [*ours, *theirs] and [one for one in order if one in ours] == ours
    for which in (True, False):
        found = [one for one in order if one in theirs and follow[one] is which]
        assert found == [one for one in theirs if follow[one] is which]
        # What is kept for a late one while it waits is not taken from those in time.
        assert not (which and found and ours) or order.index(found[0]) > order.index(ours[-1])
    places = [one for one in order if not follow[one]]
    for n, one in enumerate(places):
        if one in ours:
            assert since < EVERY - 1 or not any(other in theirs for other in places[n:])
            since += 1
        else:
            assert since >= EVERY - 1 or not any(other in ours for other in places[n:])
            since = 0


@given(
    candidates_of(),
    st.integers(0, 31),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(0, 8),
    st.lists(st.integers(0, EVERY), min_size=3, max_size=3),
)
def test_a_higher_priority_goes_first_and_each_part_keeps_its_order(candidates, late_before, follow, bound, since):
    def mixed(late_before: int) -> list[int]:
        target = SimpleNamespace(is_late=late_before.__gt__, since_late=since.__getitem__)
        entries = [
            SimpleNamespace(arrival=c.arrival, priority=c.priority, coming=one)
            for c, one in zip(candidates, follow, strict=False)
        ]
        return LateLines(target).mix(admission_order(candidates, bound), entries)

    order = mixed(late_before)
    assert sorted(order) == list(range(len(candidates)))
    priorities = [candidates[i].priority for i in order]
    assert priorities == sorted(priorities)
    # The late ones, and the others, have the order that they have without each other; and nobody is late: as before.
    for late, follows in itertools.product((False, True), repeat=2):
        which = [i for i, c in enumerate(candidates) if (c.arrival < late_before, follow[i]) == (late, follows)]
        alone = [which[n] for n in admission_order([candidates[i] for i in which], bound)]
        assert [i for i in order if i in which] == alone
    assert mixed(0) == admission_order(candidates, bound)


# ---- on a worker ----


def overload(world: World, clock: Any, waiting: list[Any], steps: int, come: int = 2, goes: int = 1) -> None:
    """In each step ``come`` requests come and ``goes`` of those that run end, whose place another has."""
    for _ in range(steps):
        clock.now += 0.1
        waiting += queue(world, *(tokens(len(waiting) + n + 1, 4) for n in range(come)))
        world.step()
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
        for req in list(world.running)[:goes]:
            world.finish(req)


def test_more_come_than_can_be_served_and_few_are_late_not_all(clock):
    """Twice as many: by arrival each is as late as the last, with a target most that are served are in time."""
    served: dict[bool, list[float]] = {}
    for on in (False, True):
        world = World(size=512, page_size=4, reserved=2, max_reqs=2, options=target(1000.0) if on else {})
        waiting: list[Any] = []
        at: dict[int, float] = {}
        came: dict[int, float] = {}
        for _ in range(120):
            overload(world, clock, waiting, 1)
            for n, one in enumerate(waiting):
                came.setdefault(n, clock.now)
                if one.wire.asked:
                    at.setdefault(n, clock.now)
        served[on] = [at[n] - came[n] for n in at]
        assert len(at) >= 119
        if on:
            state = told(world)["ttft"]
            assert state["target_ms"] == 1000 and state["late"] > 20 and state["late_requests"] >= 10
    in_time = {on: sum(wait <= 1.0 for wait in waits) for on, waits in served.items()}
    assert in_time[False] <= 30 and in_time[True] >= 80, in_time


def test_nobody_waits_for_ever(clock):
    """However many come that are in time: each fourth place is a late one's, and late ones pass it 32 times at most."""
    world = World(size=512, page_size=4, reserved=2, max_reqs=1, options=target(300.0))
    waiting: list[Any] = []
    overload(world, clock, waiting, 20, come=3)
    behind = len([one for one in waiting if not one.wire.asked])
    assert behind > 30
    overload(world, clock, waiting, EVERY * (behind + world.transfer.policy.max_overtaken + 1), come=3)
    assert all(one.wire.asked for one in waiting[: 20 * 3])


def test_first_come_first_served_has_it_too(clock):
    options = target(300.0, disaggregation_decode_admission="fcfs")
    world = World(size=512, page_size=4, reserved=2, max_reqs=1, options=options)
    waiting: list[Any] = []
    overload(world, clock, waiting, 20, come=3)
    late = told(world)["ttft"]["late"]
    numbers = admitted(waiting)
    assert late > 20 and numbers[-1] > 40


def test_those_in_time_are_seen_behind_hundreds_that_are_late(clock):
    """A step looks at a part of a long queue: at those first whose turn it is."""
    world = World(size=4096, page_size=4, reserved=2, max_reqs=500, options=target(1000.0))
    rows = [*world.pool.free_slots]
    world.pool.free_slots.clear()
    late = queue(world, *([1 + n % 90, 1 + n // 90, 1, 1] for n in range(2 * WINDOW)))
    for _ in range(40):
        world.step()
    clock.now += 5
    in_time = queue(world, *(tokens(100 + n, 4) for n in range(3)))
    for _ in range(20):
        world.step()
    world.pool.free_slots.extend(rows[:4])
    world.step()
    # The fourth place is that of the one who came first.
    assert asked(in_time) == [True] * 3 and admitted(late) == [0]


def test_a_higher_priority_goes_before_all_that_are_in_time(clock):
    world = World(size=512, page_size=4, reserved=2, max_reqs=1, options=target(1000.0))
    world.scheduler.enable_priority_scheduling, world.scheduler.schedule_low_priority_values_first = True, True
    (runs,) = queue(world, tokens(9, 4), priority=5)
    world.step()
    late = queue(world, *(tokens(n, 4) for n in (1, 2, 3)), priority=1)
    world.step()
    clock.now += 5
    (in_time,) = queue(world, tokens(4, 4), priority=5)
    world.complete(runs)
    world.step()
    world.finish(runs.req)
    world.step()
    assert asked(late)[0] and not in_time.wire.asked


def test_each_priority_has_turns_of_its_own(clock):
    """One of two has only late ones, which took the turns of the other's late ones."""
    target = TtftTarget(1.0)
    target.take([10])
    target.begin_step()
    for n in range(12):
        target.admitted(100 + n, priority=1)
        target.admitted(n % 10, priority=0)
        assert target.since_late(1) == min(n + 1, EVERY) and target.since_late(0) == 0
    # However many priorities clients make up.
    for n in range(3 * ttft_target.PRIORITIES):
        target.admitted(100, priority=n)
    assert len(target._since_late) <= ttft_target.PRIORITIES


def test_what_is_computed_here_is_measured_too():
    pytest.importorskip("sglang.srt.disaggregation.local_prefill")
    options = target(2000.0, disaggregation_decode_local_prefill="40")
    loop = Loop(options=options, size=512, page_size=4, reserved=0, max_reqs=8)
    took: list[float] = []
    target_of(loop).arrived = took.append

    def between() -> None:
        if loop.iterations in range(1, 20, 3):
            loop.handshake(loop.arrive([loop.iterations, *range(2, 9)], max_new=2))
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.iterations > 30 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 300

    loop.run(between)
    assert len(took) == 7 and all(0 < seconds < 30 for seconds in took)


@pytest.mark.parametrize("before", [0, 3, 10])
def test_one_in_time_that_fits_does_not_wait_for_long_behind_a_late_one_that_does_not(clock, before):
    """While nobody ends most steps are left out; that the one whose turn it was is late by now is seen soon.

    before: requests that were served while nobody was late, which earn no late one its turn.
    """
    world = World(size=128, page_size=4, reserved=2, max_reqs=8, options=target(1000.0))
    for n in range(before):
        serve(world, tokens(10 + n, 4))
        for req in list(world.running):
            world.finish(req)
    for _ in range(2):
        world.step()
    (runs,) = queue(world, tokens(1, 64))
    world.step()
    world.complete(runs)
    world.step()
    (large,) = queue(world, tokens(2, 100))
    world.step()
    clock.now += 5
    (small,) = queue(world, tokens(3, 8))
    for _ in range(LATE_INTERVAL + 1):
        world.step()
    assert small.wire.asked and not large.wire.asked


def test_without_the_option_nothing_is_measured_or_told():
    world = World()
    measured = [of() for of in world.transfer.hooks.measured]
    assert target_of(world) is None and not any(isinstance(one, TtftTarget) for one in measured)
    assert "ttft" not in told(world)
    # With it, ranks agree on it, and steps are not its matter.
    world = World(options=target(5.0))
    assert target_of(world) in [measured() for measured in world.transfer.hooks.measured]
    assert not world.transfer.hooks.note_step


@given(script=scripts, ms=st.sampled_from([0.001, 1.0, 20.0]))
@settings(max_examples=30, deadline=None)
def test_every_life_ends_whoever_is_late(script, ms):
    """The real loop and clock: invariants after each step, right answers, and nobody is left."""
    Play(Loop(options=target(ms), size=64, page_size=4, reserved=0, max_reqs=4), script).run()


# ---- ranks ----


def by_the_first_clock(rank: int) -> list[Any]:
    me = Rank(rank, 512, options=target(1000.0))
    # One at a time.
    del me.world.pool.free_slots[1:]
    with own_clock() as clock:
        waiting = []
        for n in range(1, 9):
            waiting += queue(me.world, tokens(n, 4))
            # The clock of the second rank goes ten times as fast.
            clock.now += 0.3 if rank == 0 else 3.0
            me.world.step()
        order = []
        for _ in range(40):
            for decode_req in list(me.world.transfer.queue):
                me.world.complete(decode_req)
            me.world.step()
            for req in list(me.world.running):
                me.world.finish(req)
            order += [n for n in range(8) if waiting[n].wire.asked and n not in order]
        return [order, me.world.queue.ranks.disagreements]


def overloaded(rank: int, options: dict[str, Any]) -> list[Any]:
    """Twice as many come as can be served, for 20 s of a clock that goes on between two steps."""
    me = Rank(rank, 512, options=options)
    del me.world.pool.free_slots[1:]
    waiting: list[Any] = []
    with own_clock() as clock:
        for _ in range(200):
            clock.now += 0.05
            waiting += queue(
                me.world, *([1 + n % 90, 1 + n // 90, 1, 1] for n in range(len(waiting), len(waiting) + 2))
            )
            me.world.step()
            for decode_req in list(me.world.transfer.queue):
                me.world.complete(decode_req)
            me.world.step()
            for req in list(me.world.running):
                me.world.finish(req)
            # Its place is given away when the clock has gone on.
            clock.now += 0.05
            me.world.step()
    ttft = target_of(me.world)
    served = [n for n, one in enumerate(waiting) if one.wire.asked]
    oldest = next(n for n in range(len(waiting)) if n not in served)
    overtaken = max(one.entry.overtaken for one in waiting)
    return [len(served), oldest, ttft.late_requests, overtaken, me.world.queue.ranks.disagreements]


def test_late_requests_have_their_places_on_several_ranks(pair):
    """Who was in time in the order of a step, and late when it was admitted, took the late ones' turns: for ever."""
    served, oldest, late, overtaken, disagreements = assert_same(pair.run(overloaded, target(1000.0)))
    assert disagreements == 0 and served >= 199
    # A fourth of them, by arrival as far as the bound goes; and nobody is overtaken by others that are late too often.
    assert served // 5 <= late <= served // 3 and oldest >= served // 5 and overtaken <= 32


def test_ranks_agree_on_all_that_is_measured_at_once(pair):
    options = target(1000.0, disaggregation_decode_itl_target=1000.0, disaggregation_decode_local_prefill="1")
    served, *_, disagreements = assert_same(pair.run(overloaded, options))
    assert served and disagreements == 0


def test_ranks_have_the_order_of_the_first_ones_clock(pair):
    order, disagreements = assert_same(pair.run(by_the_first_clock))
    assert disagreements == 0 and sorted(order) == list(range(8)) and order != sorted(order)
