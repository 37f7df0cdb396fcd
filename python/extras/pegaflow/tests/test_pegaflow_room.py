"""What saves to a PegaFlow server and loads from it leave to requests, and what a flush does about them.

The server is a stand-in whose saves and loads end when a test says so.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from decode_world import World
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_gauges_mixin import kept_for_copies
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.pegaflow import prefetches
from sglang.srt.mem_cache.pegaflow import tree as pegaflow_tree
from sglang.srt.mem_cache.pegaflow.room import live_on_scheduler
from sglang.srt.mem_cache.pegaflow.tree import PegaFlowDecodeRadixCache, PegaFlowRadixCache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from slow_session import SlowSession

PAGE = 4


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(pegaflow_tree, "DRAIN_ROUNDS", 3)


class PegaFlowWorld(World):
    """A decode rank; each step begins with `advance`, as `Scheduler` does it."""

    def __init__(self, size: int = 128, **options):
        super().__init__(size=size, page_size=PAGE, tree_type=PegaFlowDecodeRadixCache, **options)
        self.session = SlowSession()
        self.tree.attach(self.session)

    def arrive(self, prompt, **options):
        decode_req = super().arrive(prompt, **options)
        self.handshake(decode_req)
        return decode_req

    def step(self):
        self.tree.advance()
        return super().step()

    def save_all(self):
        while self.tree.busy:
            self.session.end_saves()
            self.step()

    def bring(self, prompt, **options):
        """A request whose KV has come."""
        decode_req = self.arrive(prompt, **options)
        self.step()
        self.step()
        self.complete(decode_req)
        self.step()
        assert decode_req.req in self.running
        return decode_req.req


def hashes_of(tree, tokens) -> set[bytes]:
    from sglang.srt.mem_cache.page_names import first_hash, page_names

    return set(page_names(tokens, tree.page_size, first_hash(None)))


# ---- decode ----


def test_a_load_leaves_running_requests_what_they_need(monkeypatch):
    """The pages of a load are not in the tree, and no retraction frees them: whoever runs alone would be aborted."""
    one = PegaFlowWorld()
    alone = one.bring(list(range(88)), max_new=24)
    one.session.end_saves()
    other = list(range(100, 136))
    one.session.store |= hashes_of(one.tree, other)
    waiting = one.arrive(other, max_new=4)
    for _ in range(3):
        one.step()
        assert not one.session.loads and not waiting.kv_receiver.asked
    # Nobody waits for room for ever: after some time it goes on without.
    monkeypatch.setattr(prefetches, "TIMEOUT_S", -1.0)
    one.tree.prefetches.open[0].deadline = float("inf")
    one.step()
    one.step()
    assert one.tree.check_prefetch_progress(waiting.req.rid) and not one.session.leases
    while alone in one.running:
        one.step()
        one.session.end_saves()
        one.decode()
        assert not one.queue.retracted_queue, "it was retracted, alone"
    assert len(alone.output_ids) == 24
    for _ in range(4):
        one.session.end_saves()
        one.step()
    assert waiting.kv_receiver.asked


def test_what_a_server_that_hangs_keeps_is_told_apart_from_a_leak():
    """As the alarm for a leak reckons: what is neither free nor only the tree's, without what copies keep."""
    one = PegaFlowWorld(size=256)
    tree, pool = one.tree, one.tree.pool

    def unaccounted() -> int:
        return pool.size - pool.available_size() - tree.evictable_size() - kept_for_copies(tree)

    for last in (50, 90):
        one.bring([*range(16), *range(last, last + 8)], max_new=2)
        one.decode()
    other = list(range(100, 132))
    one.session.store |= hashes_of(one.tree, other)
    one.arrive(other)
    one.step()
    assert one.session.saves and one.session.loads, "the server is to read and to write"
    assert kept_for_copies(one.tree) > 32 and not unaccounted()
    # A lock that nobody gives back is no copy's.
    (node,) = one.tree.root_node.children.values()
    one.tree.inc_lock_ref(node)
    while one.session.saves:
        one.session.end_saves()
        one.tree.advance()
    assert kept_for_copies(one.tree) == 32 and unaccounted() == len(node.key) == 16


def test_a_save_waits_for_a_request_that_needs_all():
    """What has ended would be evicted for it, or given back by those beside it; what is being saved would not."""
    one = PegaFlowWorld(size=128)
    one.bring(list(range(16)), max_new=2)
    one.decode()
    assert not one.running and one.tree.evictable_size() == 16
    while one.tree.busy:
        one.session.end_saves()
        one.tree.advance()
    large = one.bring(list(range(100, 196)), max_new=24)
    for node in list(one._nodes()):
        node.saved = None
        one.tree.saves.used(node)
    for _ in range(12):
        one.session.end_saves()
        one.step()
        held = {node for save in one.tree.saves.under_way for node in save.nodes}
        assert all(node.key.token_ids[0] >= 100 for node in held), "only what it holds itself"
    assert hashes_of(one.tree, large.origin_input_ids) <= one.session.store
    while large in one.running:
        one.step()
        one.decode()
    assert len(large.output_ids) == 24


def test_loads_come_in_rounds(monkeypatch):
    """Loads that overlap without an end: a request that finds no room beside them has steps without any."""
    one = PegaFlowWorld(size=256)
    prompts = [[n] * 4 + list(range(12)) for n in range(1000, 1100)]
    for prompt in prompts:
        one.session.store |= hashes_of(one.tree, prompt)
    free = 0
    for n, prompt in enumerate(prompts):
        one.tree.prefetch(f"r{n}", prompt, None)
        before, one.session.loads = one.session.loads, []
        for load in before:
            load.final = True
        one.tree.advance()
        free += not one.tree.prefetches.loading_tokens
        one.tree.pop_prefetch_loaded_tokens(f"r{n - 1}")
    assert free >= 4
    for _ in range(40):
        one.session.end_loads()
        one.tree.advance()
        one.tree.prefetches.ready.clear()
    assert not one.tree.busy or one.session.saves, "and all have been loaded"
    assert one.tree.evictable_size() > 0


def test_a_step_looks_at_a_bounded_part_of_what_waits(monkeypatch):
    """Prompts are compared with the tree, which takes its time; hundreds may wait for room. Each has its turn."""
    one = PegaFlowWorld()
    running = one.bring(list(range(88)), max_new=40)
    one.save_all()
    # Two requests' worth.
    monkeypatch.setattr(prefetches, "COMPARED", 1 << 11, raising=False)
    prompts = [[n] * 4 + list(range(16)) for n in range(1000, 1006)]
    for n, prompt in enumerate(prompts):
        one.session.store |= hashes_of(one.tree, prompt)
        one.tree.prefetch(f"r{n}", prompt, None)
    looked_at, held = [], one.tree.prefetches.reader.peek
    monkeypatch.setattr(
        one.tree.prefetches.reader, "peek", lambda tokens, key: (looked_at.append(tokens), held(tokens, key))[1]
    )
    for _ in range(2):
        seen = []
        for _ in range(3):
            looked_at.clear()
            one.step()
            assert len(looked_at) <= 2, "or a step takes as long as all of them"
            seen += looked_at
        assert seen == prompts
    assert not one.session.loads, "there is no room yet"
    while running in one.running:
        one.step()
        one.decode()
        one.session.end_saves()
    loaded = 0
    for _ in range(20):
        one.step()
        loaded += len(one.session.loads)
        one.session.end_loads()
        one.session.end_saves()
        one.tree.prefetches.ready.clear()
    assert loaded == 6 and not one.tree.prefetches.open and not one.session.leases


# ---- what is saved again ----


def split_while_saved() -> PegaFlowWorld:
    one = PegaFlowWorld(size=512)
    one.bring(list(range(28)), max_new=2)
    one.decode()
    one.step()
    one.bring(list(range(20)) + list(range(100, 116)), max_new=2)
    one.decode()
    return one


def test_both_parts_of_a_node_whose_save_failed_are_saved_again():
    one = split_while_saved()
    while one.tree.busy:
        one.session.end_saves(saved=False)
        one.tree.advance()
    assert {node.saved for node in one._nodes()} == {None}
    one.bring(list(range(28)), max_new=2)
    one.bring(list(range(20)) + list(range(100, 116)), max_new=2)
    one.save_all()
    assert hashes_of(one.tree, list(range(28))) <= one.session.store
    assert hashes_of(one.tree, list(range(20)) + list(range(100, 116))) <= one.session.store


@pytest.mark.parametrize("lost", ["all", "the end"])
def test_what_the_server_has_lost_is_saved_again(lost):
    """It has been started anew, or has dropped pages to make room: the next request with that prefix says so."""
    one = PegaFlowWorld(size=512)
    prompt = list(range(40))
    one.bring(prompt + [1] * 4, max_new=2)
    one.decode()
    one.save_all()
    # What has just been saved may not be found yet.
    one.step()
    gone = hashes_of(one.tree, prompt)
    if lost == "the end":
        gone -= hashes_of(one.tree, prompt[:20])
    one.session.store -= gone
    # Also one that finds all of it in the tree.
    one.tree.prefetch("r", prompt, None)
    assert one.tree.check_prefetch_progress("r"), "it waits for nothing"
    while one.tree.busy:
        one.tree.advance()
        one.session.end_saves()
    assert gone <= one.session.store and not one.session.leases


def test_no_answer_says_nothing():
    """Of a server that is gone; what it has is saved again when it says that it has not."""
    one = PegaFlowWorld(size=512)
    one.bring(list(range(40)), max_new=2)
    one.save_all()

    def no_answer(lookup):
        lookup.failed, lookup.hits = True, 0

    one.session.ask = no_answer
    one.tree.prefetch("r", list(range(40)), None)
    one.tree.advance()
    assert not one.tree.busy and None not in {node.saved for node in one._nodes()}


@pytest.mark.parametrize("fetching", [False, True])
def test_a_server_that_fetches_from_a_slower_tier_is_not_lost(monkeypatch, fetching):
    """It has answered. The request goes on without it all the same."""
    one, late = PegaFlowWorld(), []
    monkeypatch.setattr(prefetches, "TIMEOUT_S", -1.0)
    one.session.late = lambda: late.append(True)
    one.session.ask = lambda lookup: setattr(lookup, "fetching", fetching)
    one.tree.prefetch("r", list(range(40)), None)
    one.tree.advance()
    assert one.tree.check_prefetch_progress("r") and not one.tree.busy
    assert late == [True] * (not fetching)


def test_nobody_waits_for_a_server_that_was_left():
    one = PegaFlowWorld()
    one.tree.stop()
    one.tree.prefetch("r", list(range(40)), None)
    assert one.tree.check_prefetch_progress("r") and not one.session.asked and not one.tree.busy


# ---- aggregated servers and prefill workers ----


class Aggregated:
    """The memory of a scheduler: its tree and its requests."""

    def __init__(self, size: int = 128) -> None:
        from decode_worker import make_allocator

        self.allocator = make_allocator(size, PAGE)
        self.pool = SimpleNamespace(clear=lambda: None)
        params = SimpleNamespace(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            is_eagle=False,
            disable_finished_insert=False,
            eviction_policy="lru",
            enable_kv_cache_events=False,
            enable_metrics=False,
        )
        self.tree = PegaFlowRadixCache(params)
        self.session = SlowSession()
        self.tree.attach(self.session)
        self.scheduler = SimpleNamespace(
            page_size=PAGE,
            running_batch=SimpleNamespace(reqs=[]),
            last_batch=None,
            chunked_req=None,
            new_token_ratio=0.5,
        )
        self.tree.live = lambda: live_on_scheduler(self.scheduler)

    def request(self, rid: str, length: int, allocated: int, max_new: int) -> Req:
        """One that has computed ``allocated`` tokens of its prompt, none of which are in the tree."""
        req = Req(rid, "", list(range(1000, 1000 + length)), SamplingParams(max_new_tokens=max_new))
        req.req_pool_idx, req.last_node = 0, self.tree.root_node
        req.kv_allocated_len, req.cache_protected_len = allocated, 0
        self.slots = self.allocator.alloc(-(-allocated // PAGE) * PAGE)
        return req

    def ask(self, tokens: list[int]) -> None:
        self.session.store |= hashes_of(self.tree, tokens)
        self.tree.prefetch("asking", tokens, None)
        self.tree.advance()


def test_a_load_leaves_a_prompt_in_chunks_what_it_needs():
    """Its next chunk is allocated whatever there is, and a failure ends the worker."""
    one = Aggregated()
    one.scheduler.chunked_req = one.request("long", 100, 48, max_new=1)
    one.ask(list(range(32)))
    assert not one.session.loads
    # Nor does a save: of the 32 tokens in the tree, it needs 4.
    value = one.allocator.alloc(32)
    one.tree.insert(InsertParams(key=RadixKey(list(range(200, 232)), None), value=value))
    one.tree.advance()
    assert not one.session.saves
    one.scheduler.chunked_req.kv_allocated_len = 100
    one.allocator.alloc(52 - 4)
    one.tree.evict(EvictParams(num_tokens=4))
    one.scheduler.chunked_req = None
    one.allocator.free(one.slots)
    one.tree.advance()
    assert one.session.loads


def test_a_load_leaves_who_runs_room_to_its_end():
    one = Aggregated()
    one.scheduler.running_batch.reqs = [one.request("running", 60, 60, max_new=40)]
    one.ask(list(range(36)))
    assert not one.session.loads, "100 of 128 tokens are one request's"
    one.tree.release_aborted_request("asking")
    one.tree.advance()
    one.ask(list(range(28)))
    assert one.session.loads


def test_the_end_of_a_load_lets_the_engine_look_again(monkeypatch):
    """Requests that found no room wait for a running one to end, to the engine; there may be none."""
    one = Aggregated()
    one.ask(list(range(32)))
    assert one.session.loads and not one.tree.advance()
    scheduler = object.__new__(Scheduler)
    scheduler.tree_cache, scheduler.postponed_updates = one.tree, ()
    scheduler.session_controller = SimpleNamespace(maybe_reap=lambda now: None)
    scheduler._pending_flush = None
    scheduler.running_batch = SimpleNamespace(batch_is_full=True)
    scheduler.process_input_requests([])
    assert scheduler.running_batch.batch_is_full
    one.session.end_loads()
    scheduler.process_input_requests([])
    assert not scheduler.running_batch.batch_is_full


# ---- flushes and weight updates while the server hangs ----


def scheduler_of(one: Aggregated) -> Scheduler:
    scheduler = object.__new__(Scheduler)
    none = SimpleNamespace(is_empty=lambda: True, reqs=[])
    vars(scheduler).update(
        tree_cache=one.tree,
        token_to_kv_pool_allocator=one.allocator,
        req_to_token_pool=one.pool,
        disaggregation_mode=DisaggregationMode.NULL,
        running_batch=none,
        last_batch=None,
        cur_batch=None,
        chunked_req=None,
        dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False),
        enable_overlap=True,
        result_queue=deque(),
        pp_size=1,
        waiting_queue=[],
        grammar_manager=SimpleNamespace(grammar_queue=[], clear=lambda: None),
        enable_hierarchical_cache=False,
        reset_metrics=lambda: None,
        draft_worker=None,
        server_args=SimpleNamespace(),
        tp_worker=SimpleNamespace(update_weights_from_disk=lambda req: (True, "done")),
    )
    return scheduler


@pytest.mark.parametrize("of", ["save", "load"])
def test_a_weight_update_does_not_wait_for_a_server_that_hangs(of):
    """The pages that it may read or write stay out of the pool until it is done with them."""
    one = Aggregated()
    if of == "save":
        value = one.allocator.alloc(16)
        one.tree.insert(InsertParams(key=RadixKey(list(range(16)), None), value=value))
        one.tree.advance()
        held = one.session.saves[0].slots
    else:
        one.ask(list(range(16)))
        held = one.session.loads[0].slots
    scheduler = scheduler_of(one)
    for _ in range(2):
        assert scheduler.update_weights_from_disk(SimpleNamespace(flush_cache=True)).success
        assert one.allocator.available_size() == 128 - 16 and one.tree.protected_size() == 16
        assert not one.tree.busy and not one.tree.evictable_size()
    everything = one.allocator.alloc(128 - 16)
    assert not torch.isin(held, everything).any()
    one.allocator.free(everything)
    assert not one.tree.advance()
    one.session.end_saves()
    one.session.end_loads()
    assert one.tree.advance() and one.allocator.available_size() == 128 and one.tree.protected_size() == 0


def test_what_would_give_pages_to_two_raises_without_assertions_too(monkeypatch):
    """Python leaves them out with -O."""
    world = PegaFlowWorld()
    tree = world.tree
    monkeypatch.setattr(world.allocator, "alloc", lambda size: None)
    with pytest.raises(RuntimeError, match="a load was begun beyond what the pool has"):
        tree.prefetches._start_load(SimpleNamespace(), 0, tree.root_node, PAGE)
    monkeypatch.setattr(type(tree), "busy", True)
    with pytest.raises(RuntimeError, match="the tree is reset while the server"):
        tree.reset()
