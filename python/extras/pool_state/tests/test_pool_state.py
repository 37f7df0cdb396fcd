"""What a decode worker tells of its KV pool: the most tokens that requests have held, with the flag and without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from decode_world import World
from engine_classes import engine_class
from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler


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


@pytest.mark.parametrize(("dp_size", "dp_rank", "told"), [(1, None, None), (2, 0, 0), (2, 1, 1)])
def test_a_dp_rank_says_which_it_is(scheduler, monkeypatch, dp_size, dp_rank, told):
    scheduler.server_args, scheduler.dp_rank = SimpleNamespace(dp_size=dp_size), dp_rank
    scheduler.disaggregation_mode = DisaggregationMode.NULL
    scheduler.req_to_token_pool = scheduler.world.pool
    monkeypatch.setattr(Scheduler, "is_fully_idle", lambda self: True)
    monkeypatch.setattr(Scheduler, "kv_manager", lambda self: None)
    assert scheduler.kv_pool_state().get("dp_rank") == told
