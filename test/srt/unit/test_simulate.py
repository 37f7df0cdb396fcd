"""benchmark/simulate.py: what comes out adds up, and does so again."""

from __future__ import annotations

import pytest
from sim.deployment import Deployment
from sim.workload import Churn, Crowd
from simulate import MODES, simulate

SMALL = ["requests=48", "prefixes=4", "shared=96", "own=16", "answer=8", "reserve=8", "concurrency=16"]


def small(key: str, pool: int) -> list[str]:
    return [f"{key}.{setting}" for setting in (*SMALL, f"pool={pool}")]


@pytest.mark.parametrize("mode", MODES)
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
