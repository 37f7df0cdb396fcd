"""What an answer says of what decode held of its prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from decode_world import World
from engine_classes import engine_class
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from test_traps import serve, serve_to_end, to_prebuilt, tokens

# The engine's, which makes the messages.
MESSAGES = engine_class(SchedulerOutputProcessorMixin)


def scheduler_of(world: World, ranks: int = 1, buffers: int = 1) -> Scheduler:
    scheduler = object.__new__(Scheduler)
    scheduler.token_to_kv_pool_allocator, scheduler.attn_tp_size = world.allocator, ranks
    scheduler.tree_cache, kv_args = world.tree, SimpleNamespace(kv_item_lens=[100] * buffers)
    scheduler.disagg_decode_prealloc_queue = SimpleNamespace(kv_manager=SimpleNamespace(kv_args=kv_args))
    return scheduler


@pytest.mark.parametrize("prefill_hit", [20, 16, 8, 0])
def test_prefills_hit_and_decodes_are_not_added(prefill_hit):
    """The answer said that more tokens came from a cache than the prompt has, or that decode had held none."""
    world, prompt = World(), tokens(1, 23)
    serve_to_end(world, prompt[:16])
    req, _ = to_prebuilt(world, prompt, prefill_hit=prefill_hit)
    scheduler = scheduler_of(world, ranks=2, buffers=2)
    details = scheduler._get_cached_tokens_details(req)
    assert details == {
        "device": prefill_hit,
        "host": 0,
        "decode_prefix": 16,
        "transferred": 7,
        "transferred_bytes": 2 * 400,
        "saved_bytes": 4 * 400,
    }
    assert details["decode_prefix"] + details["transferred"] == len(prompt)


def test_what_decode_held_is_put_together_once(monkeypatch):
    world, prompt, asked = World(), tokens(1, 23), []
    serve_to_end(world, prompt[:16])
    req, _ = to_prebuilt(world, prompt, prefill_hit=0)
    scheduler = scheduler_of(world)
    monkeypatch.setattr(MESSAGES, "_get_cached_tokens_details", lambda self, req: asked.append(req.rid))
    first = scheduler._get_cached_tokens_details(req)
    assert first["decode_prefix"] == 16
    assert all(scheduler._get_cached_tokens_details(req) is first for _ in range(5)) and len(asked) == 1
    # What a resume finds is another matter.
    req.reset_for_retract()
    assert scheduler._get_cached_tokens_details(req) is not first and len(asked) == 2


def test_a_request_that_ends_before_its_first_token_leaves_nothing_behind(monkeypatch):
    """What decode held of it may still change, while it has no token."""
    world, prompt = World(), tokens(1, 23)
    req = serve(world, prompt).req
    scheduler = scheduler_of(world)
    req.output_ids = []
    scheduler._get_cached_tokens_details(req)
    assert not hasattr(req, "cached_tokens_details")
