"""The decisions of `prefix_policy` one by one: whose turn it is, who was overtaken, and who waits for whom.

What becomes of them on a worker is in `test_followers.py`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from decode_world import World, asked, queue
from sglang.srt.disaggregation.decode_radix.admission import Added
from sglang.srt.disaggregation.decode_radix.budget import Memory
from sglang.srt.disaggregation.prefix_admission import PrefixAdder
from sglang.srt.disaggregation.prefix_policy import PrefixEntry as Entry
from sglang.srt.disaggregation.prefix_policy import PrefixPolicy as Policy
from sglang.srt.disaggregation.prefix_policy import Turns
from test_decode_adder import Step
from test_traps import tokens


def entry(arrival: int, priority: int = 0, **more: int) -> Entry:
    made = Entry(arrival, priority, "prefill")
    for name, value in more.items():
        setattr(made, name, value)
    return made


def policy(bound: int) -> Policy:
    return Policy(World(size=64).tree, True, bound)


def test_the_slack_is_that_of_whoever_can_be_overtaken_least():
    waiting = [entry(0, overtaken=4), entry(1, overtaken=1), entry(2)]
    assert policy(6).slack(waiting) == 2
    assert policy(5).slack(waiting) == 1
    # Who has been overtaken as often as may be goes first, and holds up nobody else.
    assert policy(4).slack(waiting) == 3
    assert policy(1).slack(waiting) == 1
    assert policy(0).slack(waiting) == 3
    assert policy(4).slack([]) == 0


def test_who_came_before_an_admitted_one_was_overtaken_by_it():
    waiting = [entry(n, overtaken=1) for n in (0, 5, 20)]
    assert policy(4).count_overtaken(waiting, [entry(1), entry(9)]) == 2
    assert [one.overtaken for one in waiting] == [3, 2, 1]
    assert policy(4).count_overtaken(waiting, []) == 0
    assert policy(4).count_overtaken([], [entry(1)]) == 0


def test_out_of_turn_as_often_as_the_slack_allows():
    first, *others = waiting = [entry(n) for n in range(4)]
    turns = Turns(policy(2), waiting)
    # Two go before the first one, the third may not; then it is the turn of that.
    assert [turns.take(one) for one in others] == [True, True, False]
    assert turns.take(first)


def test_in_turn_costs_no_slack():
    waiting = [entry(n) for n in range(3)]
    turns = Turns(policy(1), waiting)
    for one in waiting[:2]:
        assert turns.take(one)
        one.admitted_at = 1.0
    late = entry(7)
    assert turns.take(late), "there is slack for one"
    late.admitted_at = 1.0
    assert not turns.take(entry(8))
    assert turns.take(waiting[2])


@pytest.mark.parametrize("why", [{"coming": 16}, {"admitted_at": 1.0}])
def test_nobody_passes_by_whom_a_transfer_or_a_place_is_coming_to(why):
    gone, second, third = waiting = [entry(0, **why), entry(1), entry(2)]
    turns = Turns(policy(1), waiting)
    assert turns.take(second)
    second.admitted_at = 1.0
    # It would be the second out of its turn, were it the turn of the first.
    assert turns.take(third)
    third.admitted_at = 1.0
    assert turns.end([second, third]) == 0 and gone.overtaken == 0


def test_it_is_the_turn_of_a_higher_priority_however_late_it_came():
    low, high = entry(0, priority=1), entry(5, priority=0)
    turns = Turns(policy(1), [low, high])
    assert turns.take(low), "out of its turn"
    assert not turns.take(entry(6, priority=1))
    assert turns.take(high)


def test_who_waits_for_a_transfer_does_not_shorten_the_slack():
    behind = [entry(0, overtaken=3, coming=16), entry(1), entry(2), entry(3)]
    turns = Turns(policy(4), behind)
    # Of those that wait for nobody, none has been overtaken yet: four may be taken before the second.
    assert [turns.take(entry(10 + n)) for n in range(5)] == [True] * 4 + [False]


def test_the_end_of_a_step_counts_those_that_were_left():
    first, second, third = waiting = [entry(n) for n in range(3)]
    turns = Turns(policy(4), waiting)
    assert turns.take(second) and turns.take(third)
    second.admitted_at = third.admitted_at = 1.0
    assert turns.end([second, third]) == 1
    assert [one.overtaken for one in waiting] == [2, 0, 0]


# ---- following ----


def following() -> tuple[World, list]:
    """A leader in transfer and one that waits for it."""
    world = World(size=256)
    herd = queue(world, tokens(1, 40), tokens(1, 40) + tokens(2, 8))
    world.step()
    assert asked(herd) == [True, False]
    return world, herd


def test_a_wait_ends_once_it_is_agreed_to_be_long_enough():
    world, (_, follower) = following()
    rules, waits, now = world.queue.policy, follower.entry, time.monotonic()
    assert not rules.find_leader(waits, now) and waits.coming == 40
    # Long enough by this rank's clock; it waits until the others say so too.
    assert rules.find_leader(waits, now + 3600) and waits.coming == 40
    rules.give_up(waits)
    assert waits.coming == 0
    assert not rules.find_leader(waits, now + 3600), "it does not wait any more"
    rules.find_leader(waits, now + 3600)
    assert waits.coming == 0


def test_nobody_waits_when_nothing_is_on_its_way():
    world, (leader, follower) = following()
    rules, waits = world.queue.policy, follower.entry
    assert rules.may_follow and waits.leader is not None
    rules.leave(leader.entry)
    assert not rules.may_follow
    rules.stop_following([waits])
    assert waits.leader is None and waits.coming == 0


def test_another_leader_is_waited_for_anew():
    world, (leader, follower) = following()
    rules, waits, now = world.queue.policy, follower.entry, time.monotonic()
    rules.give_up(waits)
    assert not rules.find_leader(waits, now + 3600) and waits.coming == 0
    rules.leave(leader.entry)
    rules.admitted(rules.enter(tokens(1, 40) + tokens(2, 4), None, 0, "prefill"), 44)
    assert not rules.find_leader(waits, now + 3600), "from now on"
    assert waits.coming == 44
    assert rules.find_leader(waits, now + 7200)


def test_a_warm_up_shares_nothing():
    rules = policy(4)
    waits = rules.enter(None, None, 0, "prefill")
    waits.takes_prefix = True
    assert rules.held(waits) == (0, 0) and not rules.find_leader(waits, time.monotonic())
    rules.admitted(waits, 16)
    assert not rules.may_follow
    rules.committed(waits)
    assert rules.departures == 1 and rules.transfers.pace("prefill") is None


# ---- one step ----


class Adding(Step):
    """Of which each of four could be admitted."""

    def make(self, *args: Any, max_overtaken: int = 1) -> Any:
        self.entries = [entry(n) for n in range(4)]
        return PrefixAdder(policy(max_overtaken), lambda: self.entries, *args)


def test_no_more_than_half_of_what_is_free_is_kept_for_those_who_follow():
    """Their prefill may stand still, and that of the next be idle."""
    step = Adding()
    for _ in range(80):
        step.adder.wait(lambda: Memory(30))
    assert step.add(1, 51) is Added.NO_MEMORY and step.add(1, 50) is Added.YES


def test_nobody_is_overtaken_more_often_than_the_bound():
    step = Adding(max_overtaken=1)
    assert [step.add(2, 1), step.add(3, 1)] == [Added.YES, Added.NOT_ITS_TURN]
    # The first two were passed by once.
    assert step.adder.overtaken() == 2
    assert [entry.overtaken for entry in step.entries] == [1, 1, 0, 0]
