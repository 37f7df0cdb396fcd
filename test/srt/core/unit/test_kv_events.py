"""KV events: who listens knows exactly which pages a decode worker's tree holds, whatever happens there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from decode_world import World
from kv_listener import Listener, names_in
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation.kv_events import BlockStored
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from test_traps import PAGE, serve_to_end, tokens


def listened_to(world: World) -> World:
    world.tree.enable_kv_cache_events = True
    world.tree.reset()
    world.tree.take_events()
    return world


@pytest.mark.parametrize("overlap", [True, False])
def test_who_listens_knows_the_tree_of_an_idle_worker_with_something_in_quarantine(overlap):
    """For as long as a prefill may still write, which is minutes."""
    loop = Loop(size=64, page_size=PAGE, reserved=0, overlap=overlap)
    listener, scheduler = Listener(), loop.scheduler
    listened_to(loop)
    scheduler.enable_kv_cache_events = True
    scheduler.kv_event_publisher = SimpleNamespace(publish=lambda batch: listener.hear(batch.events))
    served, failed = loop.arrive([1] * 12, max_new=9), loop.arrive([2] * 12, max_new=9)

    def between() -> None:
        if loop.iterations == 1:
            for decode_req in (served, failed):
                loop.handshake(decode_req)
        if served in loop.asked:
            loop.complete(served)
            failed.mark_failed("timed out after 3 s")
        if loop.iterations == 30:
            raise LoopEnds

    loop.run(between)
    assert loop.transfer.quarantine == [failed] and loop.told == [failed.req, served.req]
    assert set(listener.parents) == set(names_in(loop.tree)) and len(listener.parents) == 20 // PAGE


def test_pages_are_named_as_by_the_engines_own_tree():
    """So who routes by events of ordinary workers and of decode workers has one name for a prompt's page."""
    world, prompt = listened_to(World(size=128, page_size=PAGE)), tokens(1, 30)
    serve_to_end(world, prompt)
    ours = [event for event in world.tree.take_events() if isinstance(event, BlockStored)]
    engine = RadixCache.create_simulated(page_size=PAGE, enable_kv_cache_events=True)
    engine.take_events()
    engine.insert(InsertParams(key=RadixKey(prompt[:28])))
    theirs = engine.take_events()
    assert len(theirs) == 7 and [vars_of(event) for event in ours[:7]] == [vars_of(event) for event in theirs]


def vars_of(event: BlockStored) -> tuple:
    return (event.block_hashes, event.parent_block_hash, list(event.token_ids), event.block_size, event.medium)
