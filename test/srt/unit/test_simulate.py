"""benchmark/simulate.py: what comes out adds up, and does so again."""

from __future__ import annotations

import pytest
from sim.deployment import Deployment, Router
from sim.figures import Least
from sim.workload import Published, Request
from simulate import MODES, simulate

SMALL = dict(requests=48, prefixes=4, shared=96, own=16, answer=8, reserve=8, concurrency=16, scale=1, page=16)


def small(pool: int) -> list[str]:
    return [f"{name}={value}" for name, value in (SMALL | {"pool": pool}).items()]


@pytest.mark.parametrize("mode", MODES)
def test_all_requests_are_served_and_all_memory_comes_back(mode):
    deployment = Deployment(Published(**SMALL, pool=640).make(), mode == "off", MODES[mode])
    figures = deployment.run()
    assert figures["requests"] == 48
    for record in deployment.records:
        assert record.arrived <= record.admitted < record.first < record.done
        assert record.tokens == record.request.answer
    worker = deployment.decode
    assert not worker.records and not worker.running and not worker.queue.queue and not worker.transfer.queue
    assert worker.allocator.available_size() + worker.tree.evictable_size() == worker.size
    assert figures["peak_held"] <= worker.size


def test_the_same_again():
    assert simulate("today", small(640)) == simulate("today", small(640))


def test_without_the_cache_every_page_is_sent():
    figures = simulate("off", small(640))
    assert figures["hit"] == 0
    assert figures["pages_sent"] == 48 * -(-(96 + 16) // 16)
    # 4 prefixes of 6 pages once, and the page that each request has of its own.
    assert figures["pages_least"] == 4 * 6 + 48


def test_with_room_for_all_the_cache_sends_less():
    off, today = (simulate(mode, small(16384)) for mode in ("off", "today"))
    assert today["pages_sent"] < off["pages_sent"] and today["pages_least"] == off["pages_least"]
    assert today["hit"] > 0


@pytest.mark.parametrize("setting", ["poll=3", "times.pool", "h.pool=3"])
def test_a_setting_that_there_is_not(setting):
    with pytest.raises(ValueError, match=setting):
        simulate("off", [setting])


def test_the_router_follows_the_prompt_until_the_loads_differ_too_much():
    router = Router(2)
    first, second, other = (Request(((1, 512), (key, 512)), 1) for key in (2, 3, 4))
    assert router.choose(first, [1, 0]) == 1
    assert router.choose(second, [0, 32]) == 1
    assert router.choose(other, [0, 33]) == 0


def test_the_least_is_that_of_the_bench():
    from sglang_pd_radix.tools.bench.least import Keeper, PageIndex

    for page in (1, 16):
        mine, keeper = Least(page), Keeper(PageIndex(page), overlapped=False)  # as these workers
        # Blocks of numbers that stand for all before them.
        for prompt in ([*range(1, 101)], [*range(1, 71), *range(200, 240)], [*range(1, 101), *range(500, 530)]):
            assert mine.asked(prompt) == keeper.send(prompt)
