"""Requests that wait for another's transfer, and the order of admission."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World, aborted, asked, queue, sent
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation import prefix_admission, prefix_policy, prefix_schedule
from sglang.srt.disaggregation.decode_radix import admission, policy
from sglang.srt.disaggregation.decode_radix.admission import Added
from sglang.srt.disaggregation.decode_radix.budget import Memory
from sglang.srt.disaggregation.decode_radix.tp_agreement import WINDOW
from sglang.srt.disaggregation.prefix_admission import PrefixAdder
from sglang.srt.disaggregation.prefix_policy import (
    Candidate,
    PrefixEntry,
    PrefixPolicy,
    Transfers,
    Turns,
    WaitLimit,
    admission_order,
)
from test_decode_adder import Step
from test_traps import serve, serve_to_end, tokens

CLOCKS = policy, prefix_policy, prefix_schedule, prefix_admission
FCFS = {"disaggregation_decode_admission": "fcfs"}


# ---- following ----


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_herd_gets_one_copy_and_its_own_ends(page_size):
    world = World(size=1024, page_size=page_size, max_reqs=32)
    herd = queue(world, *(tokens(1, 32) + tokens(n, 8) for n in range(2, 18)))
    world.step()
    assert asked(herd) == [True] + [False] * 15
    for _ in range(5):
        world.step()
    assert sum(asked(herd)) == 1
    world.complete(herd[0])
    world.step()
    # In the step in which it has arrived, not in the one after.
    assert all(asked(herd))
    assert [dr.req.decode_prefix_len for dr in herd[1:]] == [32] * 15
    assert sent(herd) == (32 + 16 * 8) // page_size
    world.check()


def test_thousands_of_followers():
    world = World(size=16384, page_size=4, max_reqs=2048)
    herd = queue(world, *(tokens(1, 64) + [n % 200, n // 200, 1, 1] for n in range(2000)))
    while not all(asked(herd)):
        before = sum(asked(herd))
        world.step()
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        assert sum(asked(herd)) > before or world.transfer.queue
    assert sent(herd) == 16 + 2000
    world.check()


@pytest.mark.parametrize("how", ["fails", "aborted", "handshake of a follower fails", "retracted"])
def test_when_the_leader_is_lost_one_follower_leads(how):
    world = World(size=512)
    herd = queue(world, *(tokens(1, 32) + tokens(n, 8) for n in range(2, 8)))
    world.step()
    leader, rest = herd[0], herd[1:]
    if how == "handshake of a follower fails":
        rest[0].kv_receiver.abort()
        # While nothing changes, nobody is looked at but in every few steps.
        for _ in range(admission.ABORT_INTERVAL):
            world.step()
        assert aborted(rest[0].req) and not any(asked(rest))
        return
    if how == "retracted":
        # It has been committed, so its KV is in the tree whatever becomes of it.
        world.complete(leader)
        world.step()
        world.retract(leader.req)
        world.check()
        world.step()
        assert all(asked(rest)) and {dr.req.decode_prefix_len for dr in rest} == {32}
        return
    world.deliver(leader, 3)
    leader.kv_receiver.abort()
    world.step()
    assert aborted(leader.req)
    # At once, and the pages in which something of the old leader's may have arrived are nobody's.
    assert asked(rest) == [True] + [False] * 4
    assert rest[0].req.decode_prefix_len == 0
    world.check()
    world.complete(rest[0])
    world.step()
    assert all(asked(rest)) and {dr.req.decode_prefix_len for dr in rest[1:]} == {32}
    world.check()


def test_a_chain_keeps_none_that_have_gone(monkeypatch):
    """Each extends the one before, comes while that is in transfer, and gives up waiting for it."""
    world = World(size=4096, page_size=4, max_reqs=8, watermark=0)
    clock = 100.0
    for module in CLOCKS:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))
    prompt, flying = tokens(1, 40), []
    for n in range(20):
        prompt = [*prompt, *[n + 2] * 4]
        (decode_req,) = queue(world, prompt, prefill=f"10.0.0.{n % 4}:1", max_new=1)
        world.step()
        clock += 30
        world.step()
        world.step()
        assert decode_req.wire.asked
        flying.append(decode_req)
        if len(flying) > 3:
            world.complete(flying.pop(0))
            world.step()
            for req in [*world.running]:
                world.finish(req)
    entry, before = flying[-1].entry, 0
    while entry.leader is not None:
        entry, before = entry.leader.owner, before + 1
    assert before <= 3


def test_the_paces_of_prefills_that_are_gone_are_forgotten():
    transfers = Transfers()
    for n in range(2 * Transfers.PREFILLS):
        transfers.done(f"10.0.0.1:{n}", 1000, 1.0)
        transfers.done("10.0.0.2:1", 1000, 1.0)
    assert transfers.pace("10.0.0.2:1") and transfers.pace(f"10.0.0.1:{n}") and not transfers.pace("10.0.0.1:0")
    assert len(transfers._done) == Transfers.PREFILLS


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_chains(order):
    """A extends B extends C: what is sent of them together is A, whoever comes first."""
    world = World(size=512)
    a = tokens(1, 48)
    chain = [a, a[:40], a[:28]]
    arrived = queue(world, *(chain[i] for i in order))
    for _ in range(8):
        world.step()
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.check()
    assert all(asked(arrived))
    assert sent(arrived) == len(a) // world.page_size


@pytest.mark.parametrize(("shared", "waits"), [(12, False), (16, True)])
def test_who_shares_little_does_not_wait(shared: int, waits: bool):
    """Of the 32 tokens on the way it must be half."""
    world = World(size=512)
    first, second = queue(world, tokens(1, 32), tokens(1, shared) + tokens(2, 8))
    world.step()
    assert asked([first, second]) == [True, not waits]


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"extra_key": "other"}),
        ({}, {"warmup": True}),
        ({"warmup": True}, {}),
        ({}, {"peer_takes_prefix": False}),
    ],
)
def test_who_cannot_share_does_not_wait(first, second):
    world = World(size=512)
    requests = queue(world, tokens(1, 32), **first) + queue(world, tokens(1, 32) + tokens(2, 4), **second)
    world.step()
    assert asked(requests) == [True, True]
    world.check()


def test_a_prefill_that_sends_whole_prompts_can_lead():
    world = World(size=512)
    requests = queue(world, tokens(1, 32), peer_takes_prefix=False) + queue(world, tokens(1, 32) + tokens(2, 4))
    world.step()
    assert asked(requests) == [True, False]
    world.complete(requests[0])
    world.step()
    assert requests[1].req.decode_prefix_len == 32


def test_first_come_first_served_waits_for_nobody():
    world = World(size=512, options=FCFS)
    herd = queue(world, *(tokens(1, 32) + tokens(n, 8) for n in range(2, 6)))
    world.step()
    assert all(asked(herd))


@pytest.mark.parametrize("same", [True, False])
def test_nobody_waits_longer_than_a_copy_of_its_own_would_take(same, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    world = World(size=1024)
    # Both prefills are known: 10 ms for each token.
    for prefill in ("a:1", "b:1"):
        (known,) = queue(world, tokens(ord(prefill[0]), 256), prefill=prefill)
        world.step()
        now[0] += 2.56
        world.complete(known)
        world.step()
        world.finish(known.req)
    (leader,) = queue(world, tokens(1, 400), prefill="a:1")
    (follower,) = queue(world, tokens(1, 400) + tokens(2, 8), prefill="a:1" if same else "b:1")
    world.step()
    allowed = 2 * 400 * 0.01 if same else 400 * 0.01
    now[0] += allowed - 0.1
    world.step()
    assert asked([leader, follower]) == [True, False]
    now[0] += 0.2
    world.step()
    assert asked([leader, follower]) == [True, True]


@pytest.mark.parametrize("apart", [0.0, 0.25])
@pytest.mark.parametrize("known", [True, False])
def test_a_herd_whose_leader_takes_long_asks_for_one_more_copy_at_a_time(known: bool, apart: float, monkeypatch):
    """All asked for a copy of their own in one step, or one after another as they had come, and filled the pool."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    world = World(size=4096, page_size=4, max_reqs=32)
    limit = WaitLimit().unknown_same
    if known:
        world.queue.policy.transfers.done("10.0.0.1:1", 256, 0.04 * 256)
        limit = 2 * 0.04 * 164
    herd = queue(world, tokens(1, 164))
    world.step()
    for n in range(16):
        herd += queue(world, tokens(1, 164) + tokens(2 + n, 4))
        world.step()
        now[0] += apart
    copies = []
    while now[0] < 100 + 3.9 * limit:
        now[0] += 0.25
        world.step()
        copies.append(sum(asked(herd)))
        assert copies[-1] <= 1 + (now[0] - 100) / limit, "the first leads the others"
    assert copies[-1] == 4
    # What has come of any of them is for all.
    world.complete(herd[2])
    world.step()
    assert all(asked(herd)) and {dr.req.decode_prefix_len for dr in herd[4:]} == {164}
    world.check()


@pytest.mark.parametrize(("clients", "patience", "limits"), [(3, 4.0, 2), (8, 5.0, 2), (8, 12.0, 2), (25, 1e9, 6)])
def test_nobody_waits_for_ever_behind_those_that_come_later(clients: int, patience: float, limits: int, monkeypatch):
    """They find more of themselves in the tree, and so lead next. Those that hang up ask again; limits: of the wait."""
    clock = 100.0
    for module in CLOCKS:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))
    bound = {"disaggregation_decode_max_overtaken": 4}
    world = World(size=4096, page_size=4, max_reqs=32, watermark=0, options=bound)
    serve_to_end(world, tokens(1, 64), max_new=1)
    world.queue.policy.transfers = Transfers()
    prompt = tokens(1, 64) + tokens(2, 40)
    flying = [(queue(world, prompt + tokens(3, 4))[0], clock)]
    world.step()
    (follower,) = queue(world, prompt + tokens(4, 200))
    while not follower.wire.asked:
        clock += 0.25
        assert clock <= 101 + WaitLimit().unknown_same * limits
        asks = min(8, clients - len(flying))
        flying += [(decode_req, clock) for decode_req in queue(world, *[prompt + tokens(3, 4)] * asks)]
        for decode_req, came in [one for one in flying if clock - one[1] > patience][:1]:
            decode_req.wire.abort()
            flying.remove((decode_req, came))
        world.step()
        world.check()
    assert follower.entry.overtaken <= 4


def test_who_has_got_something_waits_for_the_rest_from_the_beginning(monkeypatch):
    now, limit, prompt = [100.0], WaitLimit().unknown_same, tokens(1, 64)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    world = World(size=1024)
    first, second = queue(world, prompt[:32], prompt)
    world.step()
    (follower,) = queue(world, prompt + tokens(2, 8))
    world.step()
    for leader, waits in ((first, second), (second, follower)):
        now[0] += limit - 0.5
        world.step()
        assert not waits.wire.asked
        world.complete(leader)
        world.step()
        world.queue.policy.transfers = Transfers()
        assert waits.wire.asked
    assert follower.req.decode_prefix_len == 64


def test_a_herd_of_three_prefills_asks_each_for_one_copy(monkeypatch):
    """Who has given up the transfer of another prefill waits for none of a third: its own copy is due."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    world = World(size=2048, page_size=4, max_reqs=32)
    herd = queue(world, tokens(1, 160), prefill="a:1")
    world.step()
    for n in range(4):
        herd += queue(world, tokens(1, 160) + tokens(2 + n, 4), prefill="b:1")
        herd += queue(world, tokens(1, 160) + tokens(12 + n, 4), prefill="c:1")
    world.step()
    now[0] += WaitLimit().least + 0.1
    world.step()
    assert asked(herd) == [True] * 3 + [False] * 6
    # It is lost with its prefill: the others wait for the copies that they have.
    herd[1].kv_receiver.abort()
    herd[2].kv_receiver.abort()
    world.step()
    assert asked(herd) == [True] * 5 + [False] * 4
    world.complete(herd[3])
    world.step()
    assert all(asked(herd))
    world.check()


def test_one_slow_transfer_counts_for_minutes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    transfers = Transfers()
    transfers.done("a", 64, 200.0)
    now[0] += Transfers.OLD_S - 1
    transfers.done("a", 64, 0.1)
    assert transfers.pace("a") == (200 / 256, 200.0)
    now[0] += 2
    assert transfers.pace("a") == (0.1 / 256, 0.1)
    now[0] += Transfers.OLD_S
    assert transfers.pace("a") is None and transfers.pace("a") is None
    transfers.done("a", 64, 0.1)
    assert transfers.pace("a") == (0.1 / 256, 0.1)


@pytest.mark.parametrize("page_size", [1, 4])
def test_two_copies_that_come_anyway_leave_one(page_size):
    world = World(size=256, page_size=page_size, options=FCFS)
    one, two = queue(world, tokens(1, 40), tokens(1, 40) + tokens(2, 4))
    world.step()
    assert world.allocator.available_size() == 256 - 40 - 44
    world.complete(one)
    world.complete(two)
    arrived = world.queue.pop_preallocated() and world.transfer.pop_transferred()
    # Before either of them is in a batch.
    assert len(arrived) == 2
    assert world.allocator.available_size() == 256 - 44
    world.waiting.extend(arrived)
    world.step()
    world.check()


def test_transfers_go_on_while_a_retracted_request_waits():
    """What it waits for is held by a transfer that nobody polled any more."""
    world = World(size=64, reserved=2)
    running = serve(world, tokens(1, 24), max_new=8).req
    (moving,) = queue(world, tokens(2, 24), max_new=1)
    world.step()
    assert moving.wire.asked
    world.retract(running)
    world.tree.evict_shortfall(64)
    world.allocator.alloc(world.allocator.available_size() - 8)
    world.complete(moving)
    world.step()
    assert moving.req in world.running and world.queue.retracted_queue


@pytest.mark.parametrize("followers", [150, 189, 260, 400])
def test_those_who_wait_for_one_transfer_hide_nobody(followers: int):
    """Who comes after hundreds of them, and did not fit in the step in which it had shaken hands."""
    world = World(size=8192, page_size=4, reserved=2, max_reqs=500)
    shared = tokens(1, 64)
    (leader,) = queue(world, shared)
    world.step()
    herd = queue(world, *(shared + tokens(2 + n % 90, 4) for n in range(followers)))
    for _ in range(5):
        world.step()
    rows = [*world.pool.free_slots]
    world.pool.free_slots.clear()
    (other,) = queue(world, tokens(99, 8))
    world.step()
    assert not other.kv_receiver.asked
    world.pool.free_slots.extend(rows)
    for _ in range(3 * followers // WINDOW + 3):
        world.step()
    assert other.kv_receiver.asked and not any(follower.kv_receiver.asked for follower in herd)
    # Nor are they forgotten.
    for _ in range(8):
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
    assert all(follower.wire.asked for follower in herd)


@pytest.mark.parametrize("others", [WINDOW, 400])
def test_followers_are_not_hidden_by_those_who_follow_nobody(others: int):
    """They go as soon as what they wait for has come."""
    world = World(size=8192, page_size=4, reserved=2, max_reqs=8)
    shared = tokens(1, 64)
    (leader,) = queue(world, shared)
    world.step()
    (follower,) = queue(world, shared + tokens(2, 4))
    world.step()
    rows = [*world.pool.free_slots]
    world.pool.free_slots.clear()
    # Of a higher place in nothing but their number.
    queue(world, *([100 + n % 50, 150 + n // 50, 1, 1] for n in range(others)))
    for _ in range(5):
        world.step()
    world.complete(leader)
    world.pool.free_slots.extend(rows)
    world.step()
    assert follower.wire.asked


# ---- the order ----


def test_room_is_kept_for_those_that_wait_for_a_transfer():
    """Else a new prefix takes it, and of each prefix one request runs."""
    world = World(size=96, page_size=4, reserved=2)
    herd = queue(world, *(tokens(1, 40) + tokens(n, 4) for n in range(2, 6)))
    (cold,) = queue(world, tokens(9, 36))
    world.step()
    assert asked([*herd, cold]) == [True, False, False, False, False]
    world.complete(herd[0])
    world.step()
    assert asked([*herd, cold]) == [True, True, True, True, False]
    world.check()


class Adding(Step):
    """Of which each of four could be admitted."""

    def make(self, *args: Any) -> PrefixAdder:
        entries = [PrefixEntry(n, 0, "prefill") for n in range(4)]
        return PrefixAdder(PrefixPolicy(World(size=64).tree, True, 1), lambda: entries, *args)


def test_no_more_than_half_of_what_is_free_is_kept_for_those_who_follow():
    """Their prefill may stand still, and that of the next be idle."""
    step = Adding()
    for _ in range(80):
        step.adder.wait(lambda: Memory(30))
    assert step.add(1, 51) is Added.NO_MEMORY and step.add(1, 50) is Added.YES


def test_out_of_turn_as_often_as_the_slack_allows():
    first, *others = waiting = [PrefixEntry(n, 0, "prefill") for n in range(4)]
    turns = Turns(PrefixPolicy(World(size=64).tree, True, 2), waiting)
    # Two go before the first one, the third may not; then it is the turn of that.
    assert [turns.take(one) for one in others] == [True, True, False]
    assert turns.take(first)


def test_nobody_waits_when_nothing_is_on_its_way():
    world = World(size=256)
    leader, follower = queue(world, tokens(1, 40), tokens(1, 40) + tokens(2, 8))
    world.step()
    rules, waits = world.queue.policy, follower.entry
    assert rules.may_follow and waits.leader is not None
    rules.leave(leader.entry)
    assert not rules.may_follow
    rules.stop_following([waits])
    assert waits.leader is None and waits.coming == 0


def test_nobody_is_overtaken_more_often_than_the_bound():
    world = World(size=96, page_size=4, reserved=2, max_reqs=32, options={"disaggregation_decode_max_overtaken": 5})
    serve_to_end(world, tokens(1, 48))
    (cold,) = queue(world, tokens(2, 72))
    overtakers = 0
    for n in range(40):
        queue(world, tokens(1, 48) + tokens(3 + n, 4), max_new=2)
        world.step()
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
        if cold.wire.asked:
            break
        overtakers += len(world.running)
        for req in list(world.running):
            world.finish(req)
    assert cold.wire.asked and overtakers == 5


def candidates_of(**more: st.SearchStrategy) -> st.SearchStrategy[list[Candidate]]:
    """Queues, whose requests also have ``more``."""
    fields = {name: st.integers(0, 40) for name in ("held", "unlocked", "coming")} | more
    fields |= {"arrival": st.integers(0, 30), "priority": st.integers(0, 2), "prompt": st.integers(1, 40)}
    one = st.builds(Candidate, overtaken=st.integers(0, 8), **fields)
    return st.lists(one, max_size=12, unique_by=lambda c: c.arrival)


@given(candidates_of(), st.integers(0, 8))
def test_the_order(candidates, bound):
    order = admission_order(candidates, bound)
    assert sorted(order) == list(range(len(candidates)))
    for i, j in zip(order, order[1:], strict=False):
        a, b = candidates[i], candidates[j]
        # A higher priority first, whatever the tree holds; then who has been overtaken too often.
        assert a.priority <= b.priority
        if a.priority == b.priority:
            assert a.standing(bound) <= b.standing(bound)
            if a.standing(bound) == b.standing(bound) or bound == 0:
                assert a.arrival < b.arrival


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=4, max_size=30), st.integers(1, 4))
def test_nobody_starves(arrivals, bound):
    """Random requests of a few prefixes, in a pool for two of these: each is admitted, and none overtaken too often."""
    world = World(size=96, page_size=4, reserved=2, max_reqs=64, options={"disaggregation_decode_max_overtaken": bound})
    coming_up, waiting = list(arrivals), []
    overtaken: dict[str, int] = {}
    for step in range(400):
        if coming_up:
            prefix, own = coming_up.pop()
            waiting += queue(world, tokens(prefix + 1, 32) + tokens(20 + step, 4 * own), max_new=2)
        elif not waiting:
            break
        following = {dr.req.rid for dr in waiting if dr.entry and dr.entry.coming}
        world.step()
        new = [dr for dr in waiting if dr.wire.asked]
        waiting = [dr for dr in waiting if not dr.wire.asked]
        for decode_req in waiting:
            if decode_req.req.rid not in following and not decode_req.entry.coming:
                later = sum(dr.entry.arrival > decode_req.entry.arrival for dr in new)
                rid = decode_req.req.rid
                overtaken[rid] = overtaken.get(rid, 0) + later
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.decode()
        world.check()
    assert not waiting, "a request is never admitted"
    assert max(overtaken.values(), default=0) <= bound


def test_a_lower_priority_never_goes_ahead():
    world = World(size=96, page_size=4, reserved=2)
    world.scheduler.enable_priority_scheduling = True
    world.scheduler.schedule_low_priority_values_first = False
    serve_to_end(world, tokens(1, 32), priority=0)
    running = serve(world, tokens(9, 40), max_new=8, priority=0).req
    (high,) = queue(world, tokens(2, 64), priority=5)
    (low,) = queue(world, tokens(1, 32) + tokens(3, 4), priority=1)
    world.step()
    assert asked([high, low]) == [False, False]
    world.finish(running)
    world.step()
    assert high.wire.asked


@pytest.mark.parametrize("options", [{}, FCFS, {"disaggregation_decode_max_overtaken": 1}])
def test_a_higher_priority_goes_ahead_however_often(options):
    world = World(size=96, page_size=4, reserved=2, options=options)
    world.scheduler.enable_priority_scheduling = True
    world.scheduler.schedule_low_priority_values_first = True
    running = serve(world, tokens(9, 60), max_new=8, priority=0).req
    (low,) = queue(world, tokens(2, 64), priority=5)
    for n in range(4):
        (high,) = queue(world, tokens(3 + n, 8), priority=1, max_new=1)
        world.step()
        assert asked([low, high]) == [False, True]
        world.complete(high)
        world.step()
        world.finish(high.req)
    world.finish(running)
    world.step()
    assert low.wire.asked


def test_a_higher_priority_is_seen_behind_any_number_of_others():
    world = World(size=1024, page_size=4, reserved=2)
    world.scheduler.enable_priority_scheduling = True
    world.scheduler.schedule_low_priority_values_first = False
    rows, world.pool.free_slots[:] = world.pool.free_slots[:], []
    queue(world, *([n % 250, n // 250, 1, 1] for n in range(600)), priority=1)
    for _ in range(12):
        world.step()
    (high,) = queue(world, tokens(3, 8), priority=5)
    for _ in range(3):
        world.step()
    world.pool.free_slots[:] = rows[:1]
    world.step()
    assert high.wire.asked
