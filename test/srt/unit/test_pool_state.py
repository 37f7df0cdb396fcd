"""What a decode worker tells of its KV pool: the most tokens that requests have held, with the flag and without it."""

from __future__ import annotations

import os
import threading
import time
import zlib
from types import SimpleNamespace

import pytest
from decode_world import World
from engine_classes import engine_class
from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
from sglang.srt.observability import thread_time


@pytest.fixture
def scheduler(monkeypatch):
    """A scheduler over the pool of ``world``; what its step of the queue does is ``step``."""
    base = engine_class(Scheduler)
    made = object.__new__(Scheduler)
    engines = engine_class(SchedulerDisaggregationDecodeMixin)
    monkeypatch.setattr(engines, "process_decode_queue", lambda self: self.step())
    monkeypatch.setattr(base, "flush_cache", lambda self: True)
    made.world = World(size=64, page_size=4)
    made.token_to_kv_pool_allocator, made.tree_cache = made.world.allocator, made.world.tree
    made.disagg_decode_prealloc_queue = made.world.queue
    made.max_total_num_tokens = 64
    made.disaggregation_mode = DisaggregationMode.NULL
    return made


@pytest.mark.parametrize("flag", [False, True])
def test_the_peak_is_seen_although_it_is_over_before_anybody_asks(scheduler, flag):
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


def test_the_longest_step_is_remembered_until_a_flush(scheduler, monkeypatch):
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


def test_prefills_are_told_what_waits_when_the_step_has_admitted(scheduler, monkeypatch):
    """Not of who is admitted in its first step."""
    queue, told = scheduler.disagg_decode_prealloc_queue, []
    first, second = scheduler.world.arrive(list(range(1, 9))), scheduler.world.arrive(list(range(1, 13)))
    monkeypatch.setattr(queue.announcements, "announce", lambda waiting: told.append([*waiting]))
    scheduler.step = lambda: queue.queue.remove(first)
    scheduler.process_decode_queue()
    assert told == [[second]]


def test_what_only_the_tree_keeps_is_not_held(scheduler):
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


def test_pools_of_several_kinds_are_left_alone(scheduler):
    class OtherCache(ChunkCache):
        pass

    scheduler.step, scheduler.tree_cache = (lambda: None), object.__new__(OtherCache)
    scheduler.process_decode_queue()
    assert scheduler.kv_used_peak == 0


@pytest.mark.parametrize("tree", [HiRadixCache, MambaRadixCache, SWARadixCache, SWAChunkCache])
def test_a_worker_whose_figures_are_of_no_one_pool_tells_its_requests(scheduler, monkeypatch, tree):
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


@pytest.mark.parametrize(("dp_size", "dp_rank", "told"), [(1, None, None), (2, 0, 0), (2, 1, 1)])
def test_a_dp_rank_says_which_it_is(scheduler, monkeypatch, dp_size, dp_rank, told):
    scheduler.server_args, scheduler.dp_rank = SimpleNamespace(dp_size=dp_size), dp_rank
    scheduler.disaggregation_mode = DisaggregationMode.NULL
    scheduler.req_to_token_pool = scheduler.world.pool
    monkeypatch.setattr(Scheduler, "is_fully_idle", lambda self: True)
    monkeypatch.setattr(Scheduler, "kv_manager", lambda self: None)
    assert scheduler.kv_pool_state().get("dp_rank") == told
