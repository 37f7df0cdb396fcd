"""The rows of `test_traps.py` that models with states or windows add."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from decode_world import World
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from test_traps import PAGE, Prefill, serve, serve_to_end, tokens


@pytest.mark.parametrize("prefix_len", [0, 8, 16])
def test_trap_05_a_full_hit_brings_the_state(prefix_len):
    """A full hit of a model with state never completed. On the wire: test_state_wire.py."""
    prefill = Prefill(16, prefix_len)
    pool = SimpleNamespace(req_index_to_mamba_index_mapping=torch.tensor([5], dtype=torch.int32))
    prefill.req.mamba_pool_idx, vars(pool)["req_to_token"] = torch.tensor(5), prefill.req_to_token_pool.req_to_token
    prefill.req_to_token_pool = pool
    # By its type the engine knows what it has to send.
    prefill.token_to_kv_pool_allocator.get_kvcache = lambda: object.__new__(HybridLinearKVPool)
    prefill.prefill(8)
    assert [states for _, states in prefill.states][-1] == [5]
    assert all(states is None for _, states in prefill.states[:-1])


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_trap_32_requests_wait_for_a_state_slot(flag):
    """Admission ran into the allocator's assertion: rows and pages were left, state slots were not.

    Here none is kept for a prefix, so each slot is free or a request's. Pages are left throughout.
    """
    world = World(size=256, max_reqs=8, states=2, tree_type=DecodeRadixCache if flag else ChunkCache)
    decode_reqs = [world.arrive(tokens(i, 9), max_new=3, peer_takes_prefix=flag) for i in range(5)]
    for decode_req in decode_reqs:
        world.handshake(decode_req)
    retracted = False
    for _ in range(20):
        world.step()
        assert len(world.transfer.queue) + len(world.running) <= 2
        for decode_req in list(world.transfer.queue):
            world.complete(decode_req)
        world.step()
        if len(world.running) == 2 and not retracted:
            # It gives its slot back, and waits for one like others.
            retracted = True
            world.retract(world.running[-1])
            assert world.pool.mamba_pool.available_size() == 1
        world.decode()
    assert retracted and [len(dr.req.output_ids) for dr in decode_reqs] == [3] * 5
    assert world.pool.mamba_pool.available_size() == 2
    if flag:
        world.check()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_33_what_is_in_the_tree_has_no_window(page_size):
    """Of a prefix whose windows were freed, these counted as evictable: more was available than the pool has.

    Here both pools add up at every step of a conversation far beyond the window, and at rest all windows are free.
    """
    world = World(size=256, page_size=page_size, windows=(12, 64))
    history = tokens(1, 9)
    for turn in range(6):
        req = serve(world, history, max_new=20).req
        # What the last turn left, as far as the window.
        left = (len(history) - 7) // page_size * page_size if turn else 0
        assert req.decode_prefix_len == min(left, world.window_start(len(history)))
        while req in world.running:
            world.decode()
            world.check()
        assert world.tree.windows.available_size() == 64
        assert world.tree.pool.available_size() + world.tree.evictable_size() == 256
        history = history + req.output_ids + tokens(turn + 2, 6)
    while world.tree.evict_shortfall(5):
        world.check()
        assert world.tree.windows.available_size() == 64
    assert world.tree.pool.available_size() == 256


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_33_a_lock_is_given_back_along_the_path_on_which_it_was_taken(page_size):
    """A lock that was released without its window's end went below zero towards the root.

    Here there is one kind of lock, and it reaches from where the window begins to the root.
    """
    world, prompt = World(size=256, page_size=page_size, windows=(12, 64)), tokens(1, 60)
    serve_to_end(world, prompt)
    # Windows that begin in the middle of what is there, and behind it; so nodes are split under locks.
    reqs = [serve(world, prompt[:end] + tokens(end, 20), max_new=9).req for end in (60, 33, 48)]
    reqs.append(serve(world, prompt[:40], max_new=9).req)
    for req in reqs:
        start = world.window_start(len(req.origin_input_ids))
        assert req.cache_protected_len == start == req.swa_evicted_seqlen
    for end, req in zip(("finish", "retract", "finish", "retract"), reqs, strict=True):
        getattr(world, end)(req)
        world.check()
        assert all(node.lock_ref >= 0 for node in world._nodes())
    world.queue.retracted_queue.clear()
    assert world.tree.locks_taken == world.tree.locks_released and world.tree.protected_size() == 0
