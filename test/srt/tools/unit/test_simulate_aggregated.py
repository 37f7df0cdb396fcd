"""benchmark/simulate.py: ordinary servers beside a pair, and where a pair loses."""

from __future__ import annotations

import pytest
from sim import times
from sim.aggregated import Aggregated, Memory
from sim.balance import loses, vary
from sim.scale import Agents, Many
from sim.workload import Churn, Request, Workload
from simulate import MODES, simulate, turns_table


def of(requests: list[Request], **more) -> Workload:
    """One prefill and one decode worker, so two servers; all times but the tokens' own are simple."""
    took = times.this_machine()
    took.step, took.step_request, took.step_token = 0.01, 0.0, 0.0
    took.batch, took.token, took.attention, took.prefill_cache = 0.5, 0.001, 0.0, 10_000
    return Workload("by hand", [requests], None, 10_000, 0, 1, 1, took, **more)


def served(requests: list[Request], mode: str = "aggregated", **options) -> Aggregated:
    made = Aggregated(of(requests), False, MODES[mode] | {"router": "affine"} | options)
    made.run()
    return made


@pytest.mark.parametrize("mode", ["aggregated", "mixed"])
@pytest.mark.parametrize("kind", [Churn, Many])
def test_all_requests_are_served_and_all_memory_comes_back(mode, kind):
    if kind is Churn:
        workload = Churn(requests=48, prefixes=4, shared=96, own=16, answer=8, concurrency=16, pool=640).make()
        workload.times.prefill_cache = 640
    else:
        workload = Many(
            requests=60, documents=6, document=1024, concurrency=16, decodes=2, prefills=1, pool=64_000
        ).make()
        workload.times.prefill_cache = 64_000
    made = Aggregated(workload, False, MODES[mode])
    figures = made.run()
    assert len(made.decodes) == workload.prefills + workload.decodes
    for record in made.records:
        assert record.arrived <= record.admitted < record.first < record.done
        assert record.tokens == record.request.answer
    for server in made.decodes:
        assert not server.busy and not server.running and not server.jobs and server.memory.held == 0
        idle = sum(server.memory._here.values())
        assert server.memory._idle == idle <= server.memory.capacity
    assert figures["peak_held"] <= made.decodes[0].memory.capacity
    assert 0.3 < figures["hit"] < 1 and figures["pages_sent"] == 0


def test_a_prompt_alone_takes_its_chunks_and_then_steps():
    (record,) = served([Request(((1, 1000),), 11, arrival=0.0)], chunk=600).records
    assert record.first == pytest.approx(2 * 0.5 + 1000 * 0.001)
    assert record.done == pytest.approx(record.first + 10 * 0.01)


@pytest.mark.parametrize("mode, gap", [("aggregated", 0.5 + 0.1), ("mixed", 0.1)])
def test_a_prompt_holds_up_who_decodes_there_for_its_step(mode, gap):
    """Mixed, both are in one step: the fixed part of a prompt's own is spared, and the decoder gets its token."""
    first = Request(((1, 100),), 101, arrival=0.0)
    second = Request(((1, 100), (2, 100)), 2, arrival=1.0)  # of its prefix, so on the same server
    record, other = served([first, second], mode).records
    assert other.prefix_len == 100 and other.first > record.first
    assert record.done - record.first == pytest.approx(100 * 0.01 + gap, abs=0.011)


def test_memory_is_of_those_used_last_and_never_more_than_there_is():
    memory = Memory(100)
    one, two, big = Request(((1, 40), (2, 20)), 5), Request(((1, 40), (3, 20)), 5), Request(((4, 90),), 10)
    assert memory.take(one) and memory.take(two) and memory.held == 40 + 20 + 20 + 2 * 5
    memory.computed(one)
    assert memory.match(two) == 40 and not memory.take(big)
    memory.release(one)
    memory.computed(two)
    memory.release(two)
    assert memory.held == 0 and memory.match(one) == 60 == memory.match(two)
    assert memory.take(big) and memory.match(one) == 0, "all others are evicted"
    memory.release(big)
    assert memory.match(Request(((4, 90),), 10)) == 0, "it was never computed"


# ---- agents ----

AGENTS = ["conversations=4", "turns=14", "concurrency=4", "begin=1", "think=1", "document=6400", "question=64"]
SMALL_AGENTS = [f"k.{size}" for size in (*AGENTS, "longest_question=320", "longest_answer=128")]


def test_later_turns_send_what_is_new_as_long_as_the_pool_holds_all():
    ran = {mode: simulate("k", mode, SMALL_AGENTS) for mode in ("off", "new", "aggregated")}
    assert all(figures["requests"] == 4 * 14 for figures in ran.values())
    assert ran["new"]["sent_over_least"] == pytest.approx(1, abs=0.02) and ran["off"]["sent_over_least"] > 5
    for part in ("early", "late"):
        assert ran["new"][f"{part}_ttft_p50"] < ran["off"][f"{part}_ttft_p50"]
    assert ran["new"]["late_ttft_p50"] < ran["new"]["first_ttft_p50"]
    rows = turns_table(list(ran.values())).splitlines()
    assert len(rows) == 2 + 3 and rows[3].startswith("| k | new | ")
    assert turns_table([simulate("g", "new", ["g.requests=12", "g.prefixes=4"])]) == ""


def test_turns_within_the_limit_are_computed_on_decode():
    short = [*SMALL_AGENTS, "k.longest_question=64", "k.longest_answer=64"]
    auto, none = (simulate("k", mode, short) for mode in ("local", "new"))
    assert auto["without_prefill"] > 0.8 and none["without_prefill"] == 0
    longer = [*short, "k.question=448", "k.longest_question=448"]
    assert simulate("k", "local", longer)["without_prefill"] == 0
    given = [*longer, "args.disaggregation_decode_local_prefill=1024"]
    assert simulate("k", "local", given)["without_prefill"] > 0.3


def test_agents_ask_forty_turns_of_whole_slots():
    (asked,) = Agents(conversations=2).make().rounds
    first, turns = asked[0], [asked[0]]
    while turns[-1].then:
        turns.append(turns[-1].then)
    assert [request.turn for request in turns] == list(range(1, 41)) and first.length == 98_304
    new = [b.length - a.length - a.answer for a, b in zip(turns, turns[1:], strict=False)]
    assert all(192 <= n <= 2048 and n % 64 == 0 for n in new) and len(set(new)) > 10


# ---- where a pair loses ----


def figures(**changed):
    return dict(requests_per_s=10.0, ttft_p50=1.0, ttft_p99=1.0, itl_p50=1.0, itl_p99=1.0) | changed


def test_a_loss_is_more_than_noise():
    assert loses(figures(requests_per_s=9.6, ttft_p50=1.04), figures()) == []
    assert loses(figures(requests_per_s=9.4, ttft_p50=1.06, itl_p99=0.5), figures()) == ["requests/s", "TTFT p50"]


def test_each_value_has_a_row_that_says_in_what_the_pair_loses():
    asked = []

    def one(mode, setting):
        asked.append((mode, setting))
        return figures(requests_per_s={"new": 5.0, "aggregated": 5.0 + int(setting[-1])}[mode])

    text = vary("x.y=0,3", ["new", "aggregated"], one, lambda figures: None)
    assert asked == [(mode, f"x.y={n}") for n in "03" for mode in ("new", "aggregated")]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| x.y | requests/s |") and rows[0].endswith("| new loses in |")
    assert rows[2].startswith("| 0 | 5.00, 5.00 |") and rows[2].endswith("| nothing |")
    assert rows[3].startswith("| 3 | 5.00, 8.00 |") and rows[3].endswith("| requests/s |")


def test_where_nothing_is_shared_two_servers_that_compute_prompts_serve_more_than_one_that_does():
    """The published run in small, with 2 servers for 1 prefill: prompts are most of the work."""
    shape = ["shared=1000", "own=1000", "answer=4", "requests=120", "concurrency=32", "pool=200000"]
    sized = [f"a.{size}" for size in shape]
    ratios = {}
    for prefixes in (2, 120):
        ran = {m: simulate("a", m, [*sized, f"a.prefixes={prefixes}"]) for m in ("new", "aggregated")}
        ratios[prefixes] = ran["new"]["requests_per_s"] / ran["aggregated"]["requests_per_s"]
        assert ran["new"]["itl_p99"] < ran["aggregated"]["itl_p99"]
    assert ratios[120] < 0.8
