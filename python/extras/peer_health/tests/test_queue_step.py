"""A step of a decode worker's queue, as its loop makes it."""

from __future__ import annotations

from decode_world import World
from engine_classes import engine_class
from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin
from sglang.srt.managers.scheduler import Scheduler


def test_prefills_are_told_what_waits_when_the_step_has_admitted(monkeypatch):
    """Not of who is admitted in its first step."""
    world, scheduler, told = World(size=64, page_size=4), object.__new__(Scheduler), []
    scheduler.token_to_kv_pool_allocator, scheduler.tree_cache = world.allocator, world.tree
    scheduler.disagg_decode_prealloc_queue, scheduler.max_total_num_tokens = world.queue, 64
    queue = world.queue
    first, second = world.arrive(list(range(1, 9))), world.arrive(list(range(1, 13)))
    monkeypatch.setattr(queue.announcements, "announce", lambda waiting: told.append([*waiting]))
    engines = engine_class(SchedulerDisaggregationDecodeMixin)
    monkeypatch.setattr(engines, "process_decode_queue", lambda self: queue.queue.remove(first))
    scheduler.process_decode_queue()
    assert told == [[second]]
