"""benchmark/simulate.py: what comes out adds up, and does so again."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from sim.deployment import Deployment, Router, turns
from sim.figures import Least
from sim.plot import charts
from sim.scale import Many, Trace
from sim.workload import Churn, Crowd, Request
from simulate import MODES, simulate

SMALL = ["requests=48", "prefixes=4", "shared=96", "own=16", "answer=8", "reserve=8", "concurrency=16"]


def small(key: str, pool: int) -> list[str]:
    return [f"{key}.{setting}" for setting in (*SMALL, f"pool={pool}")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["g", "h"])
def test_all_requests_are_served_and_all_memory_comes_back(key, mode):
    kind = {"g": Churn, "h": Crowd}[key]
    sizes = kind(requests=48, prefixes=4, shared=96, own=16, answer=8, reserve=8, concurrency=16, pool=640)
    deployment = Deployment(sizes.make(), mode == "off", MODES[mode], share=mode == "share")
    figures = deployment.run()
    assert figures["requests"] == 48 * sizes.rounds
    for record in deployment.records:
        assert record.arrived <= record.admitted < record.first < record.done
        assert record.tokens == record.request.answer
    worker = deployment.decodes[0]
    assert not worker.records and not worker.running and not worker.queue.queue and not worker.transfer.queue
    assert worker.allocator.available_size() + worker.tree.evictable_size() == worker.size
    assert figures["peak_held"] <= worker.size
    assert not worker.landing
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


@pytest.mark.parametrize("mode", MODES)
def test_every_turn_of_every_conversation_is_answered_after_the_one_before(mode):
    workload = Many(**SMALL_MANY).make()
    deployment = Deployment(workload, mode == "off", MODES[mode], share=mode == "share")
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


def test_a_trace(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1200, "output_length": 30, "hash_ids": [0, 1, 2]},
        {"timestamp": 90_000, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 3]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (asked,) = Trace(file=str(file), decodes=4, speed=1.5).make().rounds
    assert [r.length for r in asked] == [1200, 1300]
    assert [r.arrival for r in asked] == [0, 15]
    assert asked[0].blocks[:2] == asked[1].blocks[:2] and asked[0].blocks[2] != asked[1].blocks[2]
    figures = simulate("trace4", "new", [f"trace4.file={file}"])
    # The second brings what its 1024 tokens in common do not have, in slots of 64 tokens.
    assert figures["pages_sent"] == figures["pages_least"] == math.ceil(1200 / 64) + math.ceil(276 / 64)
    with pytest.raises(ValueError, match="--trace"):
        simulate("trace", "new")


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


def test_who_shares_pages_in_flight_decodes_after_these_have_come():
    workload = Crowd(pool=32_000, page=1).make()
    leader, follower = Request(((1, 96), (2, 16_000)), 8), Request(((1, 96), (3, 16)), 8)
    # The follower's own prefill and link are done long before the leader's.
    workload.rounds, workload.prefills, workload.prefill_router = [[leader, follower]], 2, "round_robin"
    deployment = Deployment(workload, False, MODES["share"], share=True)
    figures = deployment.run()
    first, second = deployment.records
    assert (first.prefix_len, second.prefix_len) == (0, 96)
    assert second.admitted < first.first <= second.first
    assert figures["pages_sent"] == figures["pages_least"]


def test_charts():
    results = [simulate("h", mode, small("h", 640)) for mode in ("off", "new")]
    drawn = charts(results)
    assert set(drawn) == {"sim-rate.svg", "sim-ttft.svg", "sim-bytes.svg"}
    for chart in drawn.values():
        assert ElementTree.fromstring(chart.picture()).tag.endswith("svg")
