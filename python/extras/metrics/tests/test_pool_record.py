"""What a decode worker tells of its KV pool: the most tokens that requests have held, with the flag and without it."""

from __future__ import annotations

import os
import threading
import time
import zlib
from types import SimpleNamespace

import pytest
from engine_classes import engine_class
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
from sglang.srt.observability import thread_time
from test_pool_state import scheduler  # noqa: F401


@pytest.mark.parametrize("flag", [False, True])
def test_the_peak_is_seen_although_it_is_over_before_anybody_asks(scheduler, flag):  # noqa: F811
    allocator, taken, seen = scheduler.token_to_kv_pool_allocator, [], []
    if not flag:
        scheduler.tree_cache = object.__new__(ChunkCache)
    for step in (
        lambda: taken.append(allocator.alloc(8)),
        lambda: taken.append(allocator.alloc(24)),
        lambda: allocator.free(taken.pop()),
        lambda: None,
    ):
        scheduler.step = step
        scheduler.process_decode_queue()
        seen.append(scheduler.kv_used_peak)
    assert seen == [8, 32, 32, 32]
    assert scheduler.flush_cache() and scheduler.kv_used_peak == 0


def test_the_longest_step_is_remembered_until_a_flush(scheduler, monkeypatch):  # noqa: F811
    now = [100.0]
    monkeypatch.setattr("sglang.srt.observability.thread_time.now", lambda: now[0])
    for seconds in (0.01, 0.4, 0.02):
        scheduler.step = lambda seconds=seconds: now.__setitem__(0, now[0] + seconds)
        scheduler.process_decode_queue()
    assert scheduler.longest_queue_step == pytest.approx(0.4)
    assert scheduler.flush_cache() and scheduler.longest_queue_step == 0


def test_a_step_is_not_longer_for_a_core_that_others_have():
    """Two threads on one core: each waits for half of the time, and to neither a step has taken twice as long."""
    allowed, results = os.sched_getaffinity(0), []

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})
        began, at, ran = time.monotonic(), thread_time.now(), time.thread_time()
        while time.monotonic() - began < 1:
            # Without the interpreter's lock, for which it would wait too.
            zlib.crc32(data)
        results.append((thread_time.now() - at, time.thread_time() - ran))

    data = bytes(20_000_000)
    threads = [threading.Thread(target=work, args=(min(allowed),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for took, ran in results:
        assert ran < 0.8 and took == pytest.approx(ran, abs=0.2)
    at, began = time.monotonic(), thread_time.now()
    time.sleep(0.3)
    assert 0.25 < thread_time.now() - began < time.monotonic() - at + 0.05


def test_what_only_the_tree_keeps_is_not_held(scheduler):  # noqa: F811
    world = scheduler.world
    scheduler.step = world.step
    decode_req = world.arrive(list(range(1, 13)))
    world.handshake(decode_req)
    scheduler.process_decode_queue()
    world.complete(decode_req)
    scheduler.process_decode_queue()
    assert scheduler.kv_used_peak == 12
    world.finish(decode_req.req)
    assert world.tree.evictable_size() == 12
    scheduler.flush_cache()
    scheduler.process_decode_queue()
    assert scheduler.kv_used_peak == 0


def test_pools_of_several_kinds_are_left_alone(scheduler):  # noqa: F811
    class OtherCache(ChunkCache):
        pass

    scheduler.step, scheduler.tree_cache = (lambda: None), object.__new__(OtherCache)
    scheduler.process_decode_queue()
    assert scheduler.kv_used_peak == 0


@pytest.mark.parametrize("tree", [HiRadixCache, MambaRadixCache, SWARadixCache, SWAChunkCache])
def test_a_worker_whose_figures_are_of_no_one_pool_tells_its_requests(scheduler, monkeypatch, tree):  # noqa: F811
    """A prefill with a hierarchical cache, of a hybrid model or one with windows: it drains by these, and by nothing
    else that it says."""
    engine, said = engine_class(Scheduler), SimpleNamespace(internal_state={"version": 1})
    monkeypatch.setattr(engine, "get_internal_state", lambda self, asked: said)
    monkeypatch.setattr(Scheduler, "is_fully_idle", lambda self: False)
    monkeypatch.setattr(Scheduler, "kv_manager", lambda self: None)
    scheduler.tree_cache, scheduler.req_to_token_pool = object.__new__(tree), scheduler.world.pool
    scheduler.server_args = SimpleNamespace(dp_size=1)
    scheduler.disaggregation_mode = DisaggregationMode.PREFILL
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    scheduler.last_batch = scheduler.chunked_req = None
    req = scheduler.world.arrive(list(range(1, 9))).req
    came = time.perf_counter() - 5
    req.time_stats = SimpleNamespace(decode_prealloc_queue_entry_time=0.0, prefill_bootstrap_queue_entry_time=came)
    scheduler.disagg_prefill_inflight_queue, scheduler.waiting_queue = [req], []
    pool = scheduler.get_internal_state(None).internal_state["kv_pool"]
    assert pool["requests"] == {"bootstrap": 0, "waiting": 0, "running": 0, "sending": 1} and pool["idle"] is False
    assert [each["rid"] for each in pool["oldest"]] == [req.rid]
    assert pool["req_slots"] and not {"size", "available", "evictable", "protected", "used_peak"} & {*pool}
