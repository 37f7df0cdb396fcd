"""benchmark/dp_ranks.py and router_policies.py: what comes out is possible, and says what it should."""

from __future__ import annotations

import argparse
import asyncio
import os

import pytest
from dp_ranks import measure as simulate
from gateway_retries import REQUESTS
from gateway_retries import measure as attempts
from router_policies import measure
from routing_gateway import Routing
from routing_run import HAPPENS, text_of
from routing_workers import Held, Sent, Worker
from sim.scale import SLOT, Many
from sim.workload import Request

ARGS = argparse.Namespace(
    requests=60,
    limit=0,
    trace=None,
    log=os.devnull,
    happens=False,
    pace=1e9,
    ranks=1,
    rank_method="longest_prefix",
)


def test_by_prefix_more_is_reused_than_by_turns_and_no_more_than_there_is():
    """Real ranks, trees and choice; two ranks of half the pool each against one of all."""
    turns, prefix, one = (simulate("chat", 2, method, 0.5, ARGS) for method in ("turns", "longest_prefix", "one"))
    assert turns["requests"] == prefix["requests"] == one["requests"] == 120
    assert turns["reused"] + 0.03 < prefix["reused"] <= one["reused"] + 1e-9 <= prefix["best"] + 1e-9
    # Answers are not known to it, and nothing else is forgotten here.
    assert 0.8 < prefix["believed"] <= 1
    assert turns["believed"] == 0 and 1 <= prefix["even"] < 2


def test_what_a_worker_would_have_held():
    workload = Many(requests=1, pool=10 * SLOT).make()
    held = Held(workload.pool)
    first, second, long = (Request(((1, 2 * SLOT), (n, k * SLOT)), 64) for n, k in ((2, 2), (3, 1), (4, 7)))
    slots = {id(r): r.slots(SLOT, iter(range(1, 99))) for r in (first, second, long)}
    a, b = Sent(first, 0, 0.0), Sent(second, 0, 0.0)
    assert held.begin(a, slots[id(first)]) == 0
    assert held.begin(b, slots[id(second)]) == 2 * SLOT
    held.end(a, [*slots[id(first)], 77])
    assert held.allocator.available_size() == 10 - 2 - 2 - 1 - 1
    # What runs is kept, the rest makes room.
    assert held.begin(c := Sent(long, 0, 0.0), slots[id(long)]) == 2 * SLOT
    held.end(b, slots[id(second)])
    held.end(c, slots[id(long)])
    assert held.tree.audit([]) == [] and held.tree.evictable_size() == 9 + 1


def test_equal_prompts_have_equal_text_but_for_the_end():
    a, b = text_of([1, 2, -3], 1), text_of([1, 2, -3], 2)
    assert a[:24] == b[:24] and a[24:] != b[24:] and text_of([5, 2], 1)[8:16] == a[8:16]


def through(policy: str, decodes: int = 2, prefills: int = 1, prefill: str = "round_robin", **more) -> dict:
    routing = Routing.parse(policy, prefill, prefills, decodes)
    return asyncio.run(measure("chat", routing, argparse.Namespace(**{**vars(ARGS), **more})))


@pytest.mark.timeout(300)
def test_smg_finds_the_worker_by_the_prompt():
    """The real gateway, of decode workers and of prefill workers."""
    turns, aware = through("smg/round_robin", prefills=2), through("smg/cache_aware", prefills=2, prefill="cache_aware")
    for figures in (turns, aware):
        assert figures["requests"] == 120 and figures["failed"] == 0
        assert figures["reused"] <= figures["best"] and figures["prefill_reused"] <= figures["prefill_best"]
    assert aware["reused"] > 0.97 * aware["best"] > turns["reused"] + 0.03
    assert aware["prefill_reused"] > turns["prefill_reused"] + 0.03


@pytest.mark.timeout(300)
def test_two_levels():
    """The real gateway finds the worker, and the real choice the rank, with the memory of as many workers."""
    by_turns, both = (through("smg/cache_aware", ranks=2, rank_method=method) for method in ("turns", "longest_prefix"))
    for figures in (by_turns, both):
        assert figures["requests"] == 240 and figures["failed"] == 0
        assert figures["reused"] <= figures["best"] and 1 < figures["even_ranks"] < 4
    assert both["reused"] > 0.95 * both["best"] > by_turns["reused"] + 0.03


def test_a_rank_says_what_it_holds_and_forgets_with_its_worker():
    worker = Worker(40 * SLOT, ranks=2)
    slots = [[1, 2, 3, number] for number in (4, 5, 6)]
    sent = [Sent(Request(((number, 4 * SLOT),), 64), 0, 0.0) for number in range(3)]
    assert [worker.begin(s, at, 0.0) for s, at in zip(sent[:2], slots, strict=False)] == [0, 3 * SLOT]
    assert worker.rank_of(sent[0]) == worker.rank_of(sent[1])
    worker.end(sent[0], slots[0], 1.0)
    # What both shared counts once.
    assert max(worker.balance.loads(1.0)) == 4 * SLOT
    worker.end(sent[1], slots[1], 1.0)
    assert worker.longest(slots[2]) == 3 * SLOT and worker.sound
    worker.forget()
    assert worker.longest(slots[2]) == 0 and worker.begin(sent[2], slots[2], 2.0) == 0


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_workers_that_forget_leave_and_come():
    """smg goes on; each part has its figures."""
    found = through("smg/cache_aware", decodes=3, requests=300, happens=True)
    parts = found["parts"]
    assert list(parts) == ["beginning", *HAPPENS]
    assert sum(part["requests"] for part in parts.values()) == 900
    # Before it is left out, requests that follow a prefix there are answered 502.
    assert all(part["failed"] == 0 for name, part in parts.items() if name != "stop"), parts
    assert parts["nothing"]["reused"] > 0.95 * parts["nothing"]["best"]
    # What was there is gone, and its conversations come back to it.
    assert parts["restart"]["reused"] < 0.9 * parts["restart"]["best"] and parts["restart"]["first"] > 0.7
    for away in ("stop", "remove"):
        assert parts[away]["first"] == 0, away
    # One that is new is given something, and the one that is back too.
    assert parts["start"]["first"] > 0 < parts["add"]["first"]
    # A gateway that has just started does not know where anything is.
    assert parts["gateway"]["elsewhere"] > parts["nothing"]["elsewhere"]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_old_router():
    """Not told of prefill, it keeps conversations together; and by a key in any case."""
    reused = {p: through(f"sglang-router/{p}") for p in ("round_robin", "cache_aware:plain", "manual")}
    assert all(f["requests"] == 120 and f["reused"] <= f["best"] for f in reused.values())
    assert reused["cache_aware:plain"]["reused"] > reused["round_robin"]["reused"] + 0.05
    assert reused["manual"]["reused"] > reused["round_robin"]["reused"] + 0.05


def test_a_second_attempt_is_a_request_of_its_own():
    """smg asks another worker where one answers 500, with a room that nobody has had; without retries it says so."""
    found = {
        tuned: asyncio.run(
            attempts(Routing.parse(f"smg/round_robin{tuned}", "round_robin", 2, 2), "decode", "500", False, os.devnull)
        )
        for tuned in ("", ":no_retries")
    }
    assert found[""]["answers"] == {"200": REQUESTS} and found[":no_retries"]["answers"].keys() == {"200", "500"}
    assert found[""]["attempts"]["decode"] > REQUESTS == found[":no_retries"]["attempts"]["decode"]
    assert found[""]["twice"] == found[":no_retries"]["twice"] == 0
