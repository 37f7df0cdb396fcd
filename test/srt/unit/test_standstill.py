"""A prefill that stands still keeps nobody waiting for time in decode steps but those that wait for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import HostSizes, World
from ranks import assert_same
from sglang.srt.disaggregation import standstill
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_admission import Transfers
from sglang.srt.disaggregation.decode_budget import LiveReqs
from sglang.srt.disaggregation.standstill import FAR, LEAST_S, Standstills
from test_followers import asked, queue
from test_itl_target import estimate, known, target
from test_read_pace import Clock
from test_traps import Rank, serve, serve_to_end, tokens

HUNG, HEALTHY = "10.0.0.9:1", "10.0.0.1:1"


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Of this module alone: seconds go by as a test says."""
    clock = Clock()
    monkeypatch.setattr(standstill, "time", clock)
    return clock


def pass_by(world: World, clock: Clock, seconds: float, step_s: float = 0.1) -> None:
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        world.step()


LOCAL = {"disaggregation_decode_local_prefill": "40"}


def full_of_hung(target_ms: float = 3.5, length: int = 8, **options: str) -> tuple[World, list[Any]]:
    """1 ms and 1 ms for each request: two fit, and two are on their way from a prefill that stands still."""
    world = World(size=1024 * length // 8, max_reqs=32, options=target(target_ms) | options)
    known(world, estimate())
    hung = queue(world, *(tokens(n, length) for n in (1, 2)), prefill=HUNG)
    world.step()
    assert all(asked(hung))
    return world, hung


# ---- on a worker ----


def test_requests_of_a_healthy_prefill_go_on_beside_one_that_stands_still(clock):
    """They were held back until the transfers' time-out, with nobody decoding."""
    world, hung = full_of_hung()
    healthy = queue(world, *(tokens(n, 8) for n in range(11, 15)), prefill=HEALTHY)
    pass_by(world, clock, LEAST_S - 1)
    assert not any(asked(healthy))
    pass_by(world, clock, 5)
    # As many as fit; nobody overtakes, and what stands still counts no more, however long.
    assert asked(healthy) == [True, True, False, False]
    for _ in range(2):
        for decode_req in [dr for dr in world.transfer.queue if dr not in hung]:
            world.complete(decode_req)
        world.step()
        for req in list(world.running):
            world.finish(req)
        world.step()
    assert all(asked(healthy))
    world.check()


def test_the_next_requests_of_a_prefill_that_stands_still_do_not_count_either(clock):
    world, _ = full_of_hung()
    more = queue(world, *(tokens(n, 8) for n in (3, 4, 5)), prefill=HUNG)
    healthy = queue(world, *(tokens(n, 8) for n in (11, 12, 13)), prefill=HEALTHY)
    # In the step in which they are admitted they do.
    pass_by(world, clock, LEAST_S + 10)
    assert asked(more) == [True] * 3 and asked(healthy) == [True, True, False]


def test_one_for_which_alone_all_wait_is_waited_for(clock):
    """Its own queue came in whole, with nobody else to gain by it: slow first prompts, and much longer steps."""
    world, _ = full_of_hung()
    more = queue(world, *(tokens(n, 8) for n in range(3, 11)), prefill=HUNG)
    pass_by(world, clock, LEAST_S + 10)
    assert not any(asked(more))


def test_what_it_is_asked_for_is_no_word_of_it(clock):
    """A longer prompt made all that it owes count again."""
    standstills = Standstills(Transfers())
    coming = [sent(standstills)]
    seconds_until_left_out(standstills, clock, coming)
    coming.append(sent(standstills, tokens=100_000))
    assert not standstills.without(coming, look=True)


def test_what_comes_of_it_again_counts_at_once(clock):
    world, hung = full_of_hung()
    healthy = queue(world, *(tokens(n, 8) for n in (11, 12, 13)), prefill=HEALTHY)
    pass_by(world, clock, LEAST_S + 5)
    assert asked(healthy) == [True, True, False]
    world.complete(hung[0])
    world.step()
    for decode_req in healthy[:2]:
        world.complete(decode_req)
    world.step()
    # Three decode, and the other one of that prefill is on its way.
    world.finish(healthy[0].req)
    pass_by(world, clock, LEAST_S - 1)
    assert asked(healthy) == [True, True, False] and world.transfer.gate.left_out == 0


def test_the_end_of_one_is_seen_at_once_beside_what_does_not_count(clock):
    world, _ = full_of_hung()
    healthy = queue(world, *(tokens(n, 8) for n in (11, 12, 13)), prefill=HEALTHY)
    pass_by(world, clock, LEAST_S + 5)
    for decode_req in healthy[:2]:
        world.complete(decode_req)
    world.step()
    while world.queue._steps % 16:
        world.step()
    assert asked(healthy) == [True, True, False]
    world.finish(healthy[0].req)
    world.step()
    assert asked(healthy) == [True, True, True]


def test_a_prefill_that_delivers_now_and_then_does_not_stand_still(clock):
    """However long those behind wait: or all of a burst behind long prompts would be let in."""
    world = World(size=1024, max_reqs=32, options=target(6.5))
    known(world, estimate())
    slow = queue(world, *(tokens(n, 8) for n in range(1, 6)))
    (other,) = queue(world, tokens(11, 8), prefill=HEALTHY + "0")
    world.step()
    for decode_req in slow[:4]:
        pass_by(world, clock, LEAST_S - 2)
        world.complete(decode_req)
    pass_by(world, clock, LEAST_S - 2)
    assert all(asked(slow)) and not other.wire.asked and world.transfer.gate.left_out == 0


def test_a_short_remainder_is_computed_here_beside_a_transfer_that_stands_still(clock):
    world = World(size=512, page_size=4, reserved=0, options=target(3.0) | LOCAL)
    serve_to_end(world, tokens(1, 48))
    # 1 ms and 0.02 ms for each token, so that the first one alone takes all.
    known(world, estimate(1.0, 0.0, 0.02, answer=4))
    queue(world, tokens(100, 100), prefill=HUNG)
    world.step()
    queue(world, tokens(1, 48) + tokens(60, 8), prefill=HEALTHY)
    pass_by(world, clock, LEAST_S - 1)
    assert not world.transfer.local.waiting
    pass_by(world, clock, 5)
    assert len(world.transfer.local.waiting) == 1


def test_what_is_too_long_for_decode_waits_for_a_prefill_that_alone_is_asked(clock):
    """Where decode computes other prompts, twenty were let in for two."""
    world, _ = full_of_hung(length=100, **LOCAL)
    more = queue(world, *(tokens(n, 100) for n in range(3, 11)), prefill=HUNG)
    pass_by(world, clock, LEAST_S + 10)
    assert not any(asked(more))


def test_what_decode_may_compute_waits_for_no_prefill_that_stands_still(clock):
    """Behind a prompt that is prefill's, it is not known yet who computes it: decode idled until the time-out."""
    world = World(size=512, page_size=4, reserved=0, options=target(3.0) | LOCAL)
    known(world, estimate(1.0, 0.0, 0.02, answer=4))
    queue(world, tokens(100, 100), prefill=HUNG)
    world.step()
    queue(world, tokens(120, 100), *(tokens(n, 8) for n in (60, 61, 62, 63)), prefill=HUNG)
    pass_by(world, clock, LEAST_S + 10)
    assert world.transfer.local.waiting


def test_a_retracted_request_comes_back_beside_transfers_that_stand_still(clock):
    world = World(size=512, max_reqs=16, options=target(3.5))
    known(world, estimate())
    back = serve(world, tokens(9, 8), max_new=9).req
    queue(world, tokens(1, 8), prefill=HUNG)
    world.step()
    world.retract(back)
    known(world, estimate(per_request=2.0))
    for _ in range(round((LEAST_S - 1) / 0.1)):
        clock.now += 0.1
        world.step()
        # As the scheduler, for transfers and failures.
        world.queue.pop_preallocated()
    assert back not in world.running
    for _ in range(round(5 / 0.1)):
        clock.now += 0.1
        world.step()
    assert back in world.running


def test_it_is_the_first_estimate_too_that_it_does_not_keep_away(clock):
    """Before steps have been measured, four run; four that never come would keep them from being measured."""
    world = World(size=1024, max_reqs=32, options=target(100.0))
    queue(world, *(tokens(n, 8) for n in range(1, 5)), prefill=HUNG)
    world.step()
    healthy = queue(world, *(tokens(n, 8) for n in range(11, 13)), prefill=HEALTHY)
    pass_by(world, clock, LEAST_S - 1)
    assert not any(asked(healthy))
    pass_by(world, clock, 5)
    assert all(asked(healthy))


def test_while_nobody_is_held_back_nothing_is_looked_for(monkeypatch):
    looks: list[int] = []
    monkeypatch.setattr(Standstills, "_look", lambda self: looks.append(1))
    world = World(size=512, max_reqs=16, options=target(3.5))
    known(world, estimate())
    for n in range(1, 5):
        serve_to_end(world, tokens(n, 8))
    assert not looks and len(world.transfer.gate.standstills._sent) <= 1
    requests = queue(world, *(tokens(n, 8) for n in range(11, 14)))
    for _ in range(40):
        world.step()
    assert looks and asked(requests) == [True, True, False]


# ---- what nobody reads ----


def locked_by_a_save() -> tuple[World, Any]:
    """64 tokens of the tree, of which a save has begun; and the gate, for which a step takes 0.01 ms a token."""
    world = World(size=512, page_size=4, host=HostSizes(1024, late=True), options=target(3.0))
    gate = known(world, estimate(1, 0, 0.01))
    gate._shares = True
    serve_to_end(world, tokens(1, 64))
    world.step()
    return world, gate


def test_what_only_a_save_has_locked_no_step_reads():
    """Up to an eighth of the pool. What a request holds as well is read, and what it alone holds."""
    world, gate = locked_by_a_save()
    assert world.tier.saves.tokens == 64 == world.tree.protected_size_
    assert gate.load(LiveReqs()).shared == 0
    # One that shares half of it, by when it is on its way, and when it runs.
    (half,) = queue(world, tokens(1, 32) + tokens(50, 8))
    world.step()
    assert world.tree.protected_size_ == 64 and gate.load(world.queue.live()).shared == 32
    world.complete(half)
    world.step()
    # With its own two pages, and its first token's.
    shared = gate.load(world.queue.live()).shared
    assert world.running and shared == half.req.cache_protected_len == 40
    world.tier.memory.end(9)
    world.step()
    assert gate.load(world.queue.live()).shared == shared
    world.check()


def test_what_a_save_has_locked_is_read_once_somebody_is_let_in():
    """It counted nowhere: not as held by anybody, nor as what a newcomer would hold, since it was locked."""
    # A step over 64 tokens of the tree and 8 more takes 1.7 ms, over those of two 2.5 ms.
    world, gate = locked_by_a_save()
    (one,) = queue(world, tokens(1, 64) + tokens(50, 8))
    load = gate.load(LiveReqs())
    plan: Any = SimpleNamespace(found=world.tree.peek(one.req.origin_input_ids, None), delta=8)
    assert plan.found.evictable == 0 and gate.add(load, plan, one.req, at_once=False) and load.shared == 64


def test_what_a_failed_request_or_one_of_a_prefill_that_stands_still_holds_no_step_reads(clock):
    world = World(size=1024, max_reqs=32, options=target(4.5))
    gate = known(world, estimate())
    for n in (1, 40, 80):
        serve_to_end(world, tokens(n, 32))
    failing, *hung = queue(world, *(tokens(n, 32) + tokens(7, 8) for n in (1, 40, 80)), prefill=HUNG)
    world.step()
    gate._shares = True
    assert gate.load(world.queue.live()).shared == 96
    failing.kv_receiver.state = KVPoll.Failed
    world.step()
    assert world.transfer.quarantine and gate.load(world.queue.live()).shared == 64
    gate._shares = False
    # Two would take 5 ms of 4.5.
    known(world, estimate(per_request=2.0))
    (healthy,) = queue(world, tokens(40, 32) + tokens(9, 8), prefill=HEALTHY)
    pass_by(world, clock, LEAST_S - 1)
    assert all(asked(hung)) and not healthy.wire.asked
    pass_by(world, clock, 5)
    gate._shares = True
    # It has what one of the others has too.
    assert healthy.wire.asked and gate.load(world.queue.live()).shared == 32 and gate.left_out == 2


# ---- by itself ----


NAMES = itertools.count()


def sent(standstills: Standstills, prefill: str = HUNG, tokens: int = 8, local: bool = False) -> Any:
    req: Any = SimpleNamespace(rid=f"r{next(NAMES)}", output_ids=[])
    entry: Any = SimpleNamespace(local=local, prefill=prefill, delta=tokens)
    standstills.admitted(req, entry)
    return req


def seconds_until_left_out(standstills: Standstills, clock: Clock, coming: list[Any]) -> float:
    began = clock.now
    standstills.without(coming, look=True)
    while len(standstills.without(coming, look=True)) == len(coming):
        clock.now += 0.5
        assert clock.now - began < 10_000
    return clock.now - began


def test_how_long_a_prefill_may_send_nothing(clock):
    """At least ten seconds; longer for a long prompt, or where transfers took long of late."""
    transfers = Transfers()
    standstills = Standstills(transfers)
    within = pytest.approx
    assert seconds_until_left_out(standstills, clock, [sent(standstills)]) == within(LEAST_S, abs=1)
    standstills = Standstills(transfers)
    long = [sent(standstills), sent(standstills, tokens=100_000)]
    assert seconds_until_left_out(standstills, clock, long) == within(50, abs=1)
    transfers.done(HUNG, 3000, 40.0)
    standstills = Standstills(transfers)
    assert seconds_until_left_out(standstills, clock, [sent(standstills)]) == within(FAR * 40, abs=1)


def test_a_pause_of_decode_itself_says_nothing(clock):
    standstills = Standstills(Transfers())
    coming = [sent(standstills)]
    standstills.without(coming, look=True)
    clock.now += 1000
    assert standstills.without(coming, look=True) == coming


def test_one_whose_transfer_alone_is_lost_counts_while_its_prefill_delivers(clock):
    standstills = Standstills(Transfers())
    lost = sent(standstills)
    for _ in range(50):
        other = sent(standstills)
        standstills.without([lost, other], look=True)
        clock.now += 2
        other.output_ids.append(1)
        assert standstills.without([lost, other], look=True) == [lost, other]


def test_what_is_computed_here_is_no_word_of_a_prefill(clock):
    """Nor a request that starts over without one, under its name."""
    standstills = Standstills(Transfers())
    coming = [sent(standstills)]
    seconds_until_left_out(standstills, clock, coming)
    coming.append(sent(standstills))
    again, entry = coming[0], SimpleNamespace(local=True, prefill=None, delta=8)
    standstills.admitted(again, entry)  # type: ignore[arg-type]
    again.output_ids.append(1)
    assert standstills.without(coming, look=True) == [again]


def test_what_has_failed_is_forgotten(clock):
    standstills = Standstills(Transfers())
    coming = [sent(standstills)]
    seconds_until_left_out(standstills, clock, coming)
    standstills.without([], look=False)
    assert not (standstills._sent or standstills._heard or standstills._still)
    fresh = [sent(standstills)]
    assert standstills.without(fresh, look=True) == fresh


# ---- ranks ----


def by_clocks(rank: int, goes: int) -> list[Any]:
    """Only the clock of the rank ``goes`` goes on."""
    clock = Clock()
    real, standstill.time = standstill.time, clock  # type: ignore[attr-defined, assignment]
    try:
        me = Rank(rank, 1024, options=target(3.5))
        known(me.world, estimate())
        requests = queue(me.world, *(tokens(n, 8) for n in (1, 2)), prefill=HUNG)
        me.step()
        requests += queue(me.world, *(tokens(n, 8) for n in (11, 12, 13)), prefill=HEALTHY)
        for _ in range(150):
            clock.now += 0.1 * (rank == goes)
            me.step()
        # And its end: one fails on one rank.
        if rank == 1:
            requests[0].kv_receiver.state = KVPoll.Failed
        for _ in range(3):
            me.step()
        return [asked(requests), me.decisions, me.world.queue.ranks.disagreements]
    finally:
        standstill.time = real  # type: ignore[attr-defined]


@pytest.mark.parametrize("goes", [0, 1])
def test_ranks_go_by_the_first_ones_clock(pair, goes):
    """And leave the same requests out in the same steps."""
    requests, _, disagreements = assert_same(pair.run(by_clocks, goes))
    assert disagreements == 0
    # By the second one's alone, nobody goes but for the one whose transfer fails.
    assert requests == [True, True, True, goes == 0, False]
