"""benchmark/simulate.py: what comes out adds up, and does so again."""

from __future__ import annotations

import pytest
from sim.deployment import Deployment, Router, turns
from sim.figures import Least
from sim.scale import Many
from sim.workload import Churn, Crowd, Request
from simulate import MODES, simulate

PAIRS = [mode for mode in MODES if mode not in ("aggregated", "mixed")]
SMALL = ["requests=48", "prefixes=4", "shared=96", "own=16", "answer=8", "reserve=8", "concurrency=16"]


def small(key: str, pool: int) -> list[str]:
    return [f"{key}.{setting}" for setting in (*SMALL, f"pool={pool}")]


@pytest.mark.parametrize("mode", PAIRS)
@pytest.mark.parametrize("key", ["g", "h"])
def test_all_requests_are_served_and_all_memory_comes_back(key, mode):
    kind = {"g": Churn, "h": Crowd}[key]
    sizes = kind(requests=48, prefixes=4, shared=96, own=16, answer=8, reserve=8, concurrency=16, pool=640)
    deployment = Deployment(sizes.make(), mode == "off", MODES[mode])
    figures = deployment.run()
    assert figures["requests"] == 48 * sizes.rounds
    for record in deployment.records:
        assert record.arrived <= record.admitted < record.first < record.done
        assert record.tokens == record.request.answer
    worker = deployment.decodes[0]
    assert not worker.records and not worker.running and not worker.queue.queue and not worker.transfer.queue
    assert worker.allocator.available_size() + worker.tree.evictable_size() == worker.size
    assert figures["peak_held"] <= worker.size
    if mode != "off":
        assert worker.tree.audit([]) == []


def test_the_same_again():
    def figures():
        return {k: v for k, v in simulate("h", "today", small("h", 640)).items() if k != "cpu_seconds"}

    assert figures() == figures()


def test_without_the_cache_every_page_is_sent():
    figures = simulate("h", "off", small("h", 640))
    assert figures["hit"] == 0
    assert figures["pages_sent"] == 48 * -(-(96 + 16) // 16)
    # 4 prefixes of 6 pages once, and the page that each request has of its own.
    assert figures["pages_least"] == 4 * 6 + 48


def test_with_room_for_all_the_cache_sends_less():
    off, today = (simulate("h", mode, small("h", 16384)) for mode in ("off", "today"))
    assert today["pages_sent"] < off["pages_sent"] and today["pages_least"] == off["pages_least"]
    assert today["hit"] > 0


def test_a_setting_that_there_is_not():
    with pytest.raises(ValueError, match=r"h\.poll=3"):
        simulate("h", "off", ["h.poll=3"])


SMALL_MANY = dict(requests=60, documents=6, document=1024, concurrency=16, decodes=2, prefills=1, pool=64_000)


@pytest.mark.parametrize("mode", PAIRS)
def test_every_turn_of_every_conversation_is_answered_after_the_one_before(mode):
    workload = Many(**SMALL_MANY).make()
    deployment = Deployment(workload, mode == "off", MODES[mode])
    figures = deployment.run()
    assert figures["requests"] == 60
    at = {id(r.request): r for r in deployment.records}
    for first in workload.rounds[0]:
        asked = [at[id(request)] for request in turns(first)]
        for before, after in zip(asked, asked[1:], strict=False):
            assert after.arrived == pytest.approx(before.done + workload.think)
    if mode != "off":
        # What decode has of the answer before counts: no turn sends it again while there is room.
        assert 0.9 < figures["sent_over_least"] < 2
        for worker in deployment.decodes:
            assert worker.allocator.available_size() + worker.tree.evictable_size() == worker.size


def test_a_cache_aware_router_follows_the_prompt_until_the_loads_differ_too_much():
    router = Router("cache_aware", 2)
    first, second, other = (Request(((1, 512), (key, 512)), 1) for key in (2, 3, 4))
    assert router.choose(first, [1, 0]) == 1
    assert router.choose(second, [0, 64]) == 1
    assert router.choose(other, [0, 65]) == 0


def test_the_least_is_that_of_the_bench():
    from sglang_pd_radix.tools.bench.least import Keeper, PageIndex

    for page in (1, 16):
        mine, keeper = Least(page), Keeper(PageIndex(page), overlapped=False)  # as these workers
        # Blocks of numbers that stand for all before them.
        prompts = [[*range(1, 101)], [*range(1, 71), *range(200, 240)], [*range(1, 101), *range(500, 530)]]
        for prompt in prompts:
            assert mine.asked(prompt) == keeper.send(prompt)
            answer = range(prompt[-1] + 1000, prompt[-1] + 1040)
            mine.answered(prompt, answer)
            keeper.answered(prompt, answer)
            assert mine.asked([*prompt, *answer]) == keeper.send([*prompt, *answer])


A = ["requests=160", "prefixes=4", "shared=200", "own=16", "answer=40", "reserve=8", "concurrency=48", "pool=16384"]
SMALL_A = [f"a.{setting}" for setting in A]


def test_what_is_shared_is_read_once():
    """4 prefixes of 200 tokens are read for 48 requests, of which each has a few more of its own."""
    slow = [*SMALL_A, "times.step_token=1e-6", "times.step_request=0"]
    each, once = (simulate("a", "new", [*slow, f"times.shares={shares}"])["itl_mean"] for shares in (0, 1))
    assert once < 0.6 * each


def test_who_has_the_same_cores_takes_longer():
    alone, beside = (simulate("a", "new", [*SMALL_A, f"times.beside={more}"]) for more in (0, 2))
    assert beside["requests_per_s"] < 0.9 * alone["requests_per_s"]


def test_turns_behind_others_prompts():
    """Computed on decode, their first tokens come sooner; on a GPU of prefill's the others' prompts pay for that."""
    ran = {}
    for beside in ("0.5", "0"):
        settings = ["i.turns=8", f"times.beside={beside}"]
        ran[beside] = {mode: simulate("i", mode, settings) for mode in ("off", "new", "local")}
        assert [f["requests"] for f in ran[beside].values()] == [8 * 7] * 3
        off, new, local = ran[beside].values()
        assert local["ttft_p50"] < 0.85 * new["ttft_p50"] < 0.85 * off["ttft_p50"]
    assert ran["0.5"]["local"]["requests_per_s"] < 0.95 * ran["0.5"]["new"]["requests_per_s"]
    assert ran["0"]["local"]["requests_per_s"] > 0.98 * ran["0"]["new"]["requests_per_s"]


def test_a_step_over_prompts_has_a_fixed_part_of_its_own():
    short, long = (simulate("i", "local", ["i.turns=4", f"times.computed={s}"]) for s in ("0.004", "0.016"))
    assert short["ttft_p50"] < long["ttft_p50"] - 0.008
