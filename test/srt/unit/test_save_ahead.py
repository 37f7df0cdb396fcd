"""``--hicache-write-policy write_back``: what evictions take next is saved before, and none of them waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from decode_world import HostSizes, World, kv_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from ranks import assert_same
from sglang.srt.mem_cache.host_tier.ahead import LOOK_TURNS
from test_host_tier import LIVES, PAGE, HostLife, admit, broken, insert, settle
from test_traps import serve_to_end, tokens

SIZE = 256
# Tokens that are free or saved: a quarter of the pool.
AHEAD = SIZE // 4


class AheadLife(HostLife):
    """The same lives, where only what is about to be evicted is saved."""

    @initialize(
        size=st.sampled_from([48, 64]),
        tokens=st.sampled_from([16, 64, 256]),
        watermark=st.sampled_from([0, 8, 24]),
        late=st.booleans(),
    )
    def begin(self, size, tokens, watermark, late):
        sizes = HostSizes(tokens, late=late, ahead=True)
        self.world = World(size=size, page_size=self.page_size, states=self.states, host=sizes, watermark=watermark)
        for prompt in ([1, 2] * 9, [1] * 17, [2, 1, 1] * 8):
            serve_to_end(self.world, prompt)
            settle(self.world)

    def ends_with_a_load(self):
        """Whatever was before, what is about to go is saved, and comes back."""
        tier, prompt = self.world.tier, [3] * 20
        self.evict()
        serve_to_end(self.world, prompt)
        # As if there were nothing else.
        self.world.tree.pool.available_size = lambda: 0
        for _ in range(2 * LOOK_TURNS):
            tier.memory.wait()
            self.world.step()
        del self.world.tree.pool.available_size
        self.evict()
        before = tier.loaded_tokens
        decode_req = admit(self.world, prompt)
        assert tier.loaded_tokens > before
        tier.memory.wait()
        self.world.complete(decode_req)
        self.world.step()
        self.world.finish(decode_req.req)
        settle(self.world)


@pytest.mark.parametrize(("page_size", "states"), [(1, None), (4, None), (4, 16)])
def test_invariants_hold_in_every_life_that_saves_ahead(page_size, states):
    machine = type("AheadLife", (AheadLife,), {"page_size": page_size, "states": states})
    LIVES.clear()
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))
    saved, loaded, failed = (sum(column) for column in zip(*LIVES, strict=True))
    assert saved and loaded and not failed


def world(host: int = 1024, late: bool = False, **options: Any) -> World:
    return World(size=SIZE, page_size=PAGE, host=HostSizes(host, late=late, ahead=True), **options)


def put(one: World, prompt: list[int]) -> None:
    """What a request with that prompt leaves in the tree, and in the pool."""
    insert(one, prompt)
    slots = torch.cat([node.value for node in one.tree.peek(prompt, None).path]).tolist()
    for end, slot in enumerate(slots, 1):
        one.kv.k_buffer[0][slot] = kv_of(prompt[:end], one.weights)


def fill(one: World, conversations: int, first: int = 1) -> list[list[int]]:
    """Conversations that have been had, one after the other; the first of them goes first."""
    prompts = [tokens(first + n, 32) for n in range(conversations)]
    for prompt in prompts:
        put(one, prompt)
    return prompts


def held(one: World, prompts: list[list[int]]) -> list[int]:
    return [one.tier.host.peek(prompt, None).length for prompt in prompts]


def test_nothing_is_saved_while_there_is_room():
    one = world()
    fill(one, 5)
    settle(one)
    assert one.tree.pool.available_size() >= AHEAD and one.tier.saves.saved_tokens == 0
    assert not one.tier.saves.busy


def test_what_goes_first_is_saved_and_no_more():
    one = world()
    prompts = fill(one, 7)
    settle(one)
    # 32 are free.
    assert held(one, prompts) == [32, 0, 0, 0, 0, 0, 0]
    prompts += fill(one, 1, first=20)
    settle(one)
    assert held(one, prompts) == [32, 32, 0, 0, 0, 0, 0, 0]


def test_an_eviction_of_what_was_saved_loses_nothing():
    one = world()
    prompts = fill(one, 8)
    settle(one)
    assert one.tree.evict_shortfall(AHEAD) == AHEAD
    assert one.tier.state()["evicted_unsaved"] == 0
    decode_req = admit(one, prompts[0])
    assert decode_req.kv_receiver.prefix_len == 32 and one.tier.loaded_tokens == 32
    one.complete(decode_req)
    one.step()
    one.check()


def test_what_host_memory_has_evicted_is_saved_again():
    """It was used here meanwhile, and its copy was the oldest there."""
    one = world()
    prompts = fill(one, 8)
    settle(one)
    saved = held(one, prompts)
    assert any(saved)
    one.tier.host.evict_shortfall(one.tier.host.evictable_size())
    assert not any(held(one, prompts))
    for _ in range(40):
        one.tier.memory.wait()
        one.step()
    assert held(one, prompts) == saved
    # And if there is no time for it, it is counted.
    one.tier.host.evict_shortfall(one.tier.host.evictable_size())
    late = one.tier.saves.late_tokens
    one.tree.evict_shortfall(32)
    assert one.tier.saves.late_tokens > late


def test_what_must_go_at_once_is_counted_and_not_waited_for():
    one = world(late=True)
    prompts = fill(one, 8)
    one.step()
    assert one.tier.saves.tokens == SIZE // 8
    # That is being copied, and locked: all the others go.
    leave_pool_but(one, one.tier.saves.tokens)
    assert one.tier.memory.begun
    # 32 of them were to come.
    assert one.tier.state()["evicted_unsaved"] == SIZE - 32
    settle(one)
    assert held(one, prompts) == [32, 0, 0, 0, 0, 0, 0, 0] and not one.tier.saves.busy
    one.check()


def test_most_recently_used_leaves_are_listed_anew_only_where_something_was_used(monkeypatch):
    """With --radix-eviction-policy mru, which else goes through all leaves in every eighth turn of a worker at rest."""

    class Chosen(World):
        def _hosted(self, sizes, params):
            params.eviction_policy = "mru"
            return super()._hosted(sizes, params)

    one = Chosen(size=SIZE, page_size=PAGE, host=HostSizes(1024, ahead=True))
    first, *others = fill(one, 8)
    settle(one)
    listed: list[int] = []
    list_anew = one.tree.victims.list_anew
    monkeypatch.setattr(one.tree.victims, "list_anew", lambda: listed.append(1) or list_anew())
    for _ in range(8 * LOOK_TURNS):
        one.step()
    assert len(listed) <= 1
    # Used again, the first goes first.
    serve_to_end(one, first, max_new=1)
    for _ in range(2 * LOOK_TURNS):
        one.tier.memory.wait()
        one.step()
    assert 1 <= len(listed) <= 4
    assert one.tree.victims.upcoming(1, lambda leaf: 1, 1)[0] is one.tree.peek(first, None).path[-1]
    assert held(one, [first]) == [len(first)] and others


def leave_pool_but(one: World, locked: int) -> None:
    assert one.tree.evict_shortfall(SIZE) == SIZE - locked


def test_of_a_leaf_that_went_in_part_the_rest_is_saved():
    one = world(late=True)
    prompts = fill(one, 8)
    one.step()
    assert [len(node.key) for node in one.tier.saves.to_come] == [32]
    one.tree.evict_shortfall(8)
    assert one.tier.state()["evicted_unsaved"] == 8
    settle(one)
    assert held(one, prompts)[:2] == [32, 24]
    one.check()


def test_the_path_of_a_leaf_is_saved_with_it():
    one = world()
    first = tokens(1, 32)
    put(one, first)
    put(one, first + tokens(50, 32))
    fill(one, 6, first=2)
    settle(one)
    assert held(one, [first + tokens(50, 32)]) == [64] and one.tier.saves.saved_tokens == 64
    # One leaf after the other of that conversation.
    one.tree.evict_shortfall(64)
    assert one.tier.state()["evicted_unsaved"] == 0 and one.tree.peek(first, None).length == 0


def test_what_has_come_back_is_not_saved_again():
    one = world()
    prompts = fill(one, 8)
    settle(one)
    one.tree.evict_shortfall(AHEAD)
    serve_to_end(one, prompts[0])
    assert one.tier.loaded_tokens == 32
    prompts += fill(one, 1, first=20)
    for first in range(21, 28):
        settle(one)
        one.tree.evict_shortfall(32)
        prompts += fill(one, 1, first)
    # It has been looked at, and gone, with all that was before it.
    assert one.tree.peek(prompts[0], None).length == 0 and one.tier.state()["evicted_unsaved"] == 0
    assert one.tier.saves.saved_tokens == sum(held(one, prompts)) and held(one, prompts)[:8] == [32] * 8


@pytest.mark.parametrize("cause", ["no room", "no copy"])
def test_what_cannot_be_saved_is_tried_again_when_it_is_used_and_the_watermark_takes_it(monkeypatch, cause):
    one = world(watermark=64)
    tried: list[int] = []

    def fails(*args: Any) -> Any:
        tried.append(1)
        return broken() if cause == "no copy" else None

    place = (one.tier.memory, "save") if cause == "no copy" else (one.tier.host.pool, "alloc")
    with monkeypatch.context() as patch:
        patch.setattr(*place, fails)
        prompts = fill(one, 8)
        for _ in range(8 * LOOK_TURNS):
            one.step()
    state = one.tier.state()
    # Two have gone, and the next has been tried.
    assert len(tried) == 3 and one.tree.pool.available_size() == 64
    assert (state["failed_saves"] if cause == "no copy" else state["dropped"]) == 96
    # They count as that alone.
    assert state["evicted_unsaved"] == 0
    settle(one)
    assert held(one, prompts) == [0] * 8
    insert(one, prompts[2])
    # The others go before it.
    one.tree.evict_shortfall(160)
    fill(one, 6, first=20)
    settle(one)
    assert held(one, prompts)[2] == 32 and one.tier.audit() == []
    one.check()


def test_the_watermark_takes_what_has_been_saved():
    one = world(late=True, watermark=64)
    prompts = fill(one, 8)
    for _ in range(LOOK_TURNS):
        one.step()
        assert one.tree.pool.available_size() == 0
    settle(one)
    assert one.tree.pool.available_size() >= 56
    assert one.tier.state()["evicted_unsaved"] == 0 and held(one, prompts)[:2] == [32, 32]


@pytest.mark.parametrize("late", [False, True])
def test_a_flush_while_it_saves_forgets_what_is_saved_and_to_come(late):
    """As before a weight update: KV of the old weights comes back from nowhere."""
    one = world(late=late)
    prompts = fill(one, 8)
    one.step()
    assert one.tier.saves.tokens or not late
    assert one.flush() and not getattr(one.tier.memory, "begun", None)
    assert one.tier.host.pool.available_size() == one.tier.host.pool_size
    settle(one)
    assert held(one, prompts) == [0] * 8 and admit(one, prompts[0]).kv_receiver.prefix_len == 0
    one.check()


def test_a_request_that_is_aborted_while_its_prompt_is_saved_leaves_nothing_locked():
    one = world(late=True)
    prompts = fill(one, 7)
    decode_req = admit(one, prompts[0] + tokens(30, 28))
    one.step()
    # A save and the request hold the same node.
    (node,) = one.tier.saves.locked()
    decode_req.kv_receiver.abort()
    one.step()
    decode_req.kv_receiver.quiet = True
    settle(one)
    assert node.lock_ref == 0 and not one.transfer.quarantine and not one.tier.saves.busy
    one.check()


def test_a_decode_step_that_takes_the_last_pages_is_looked_at():
    """Nothing enters the tree meanwhile."""
    one = world()
    prompts = fill(one, 4)
    settle(one)
    taken = one.tree.pool.alloc(96)
    for _ in range(LOOK_TURNS + 1):
        one.step()
    assert held(one, prompts)[0] == 32
    one.tree.pool.free(taken)


# ---- several ranks ----


def on_ranks(rank: int, broken_rank: int | None) -> list[Any]:
    one = world(late=True, group=dist.group.WORLD)
    save = one.tier.memory.save
    if rank == broken_rank:
        one.tier.memory.save = broken
    prompts = fill(one, 8)
    told: list[Any] = []
    for _ in range(4):
        one.step()
        one.tier.memory.wait()
        told.append((len(one.tier.saves.under_way), len(one.tier.saves.to_come)))
    one.tier.memory.save = save
    settle(one)
    one.tree.evict_shortfall(SIZE // 4)
    prompts += fill(one, 2, first=20)
    settle(one)
    one.check()
    return [*told, held(one, prompts), one.tier.figures()]


@pytest.mark.parametrize("broken_rank", [None, 0, 1])
def test_tp_ranks_save_the_same_ahead(pair, broken_rank):
    *_, stored, _ = assert_same(pair.run(on_ranks, broken_rank))
    tried = 0 if broken_rank is None else 2
    assert stored == [0] * tried + [32] * (4 - tried) + [0] * 6


def ranks_differ(rank: int, differing: int) -> list[int]:
    one = world(late=True, group=dist.group.WORLD)
    fill(one, 7)
    if rank == differing:
        one.tree.evict_shortfall(36)
    counted = []
    for _ in range(3 * LOOK_TURNS):
        one.tier.memory.wait()
        one.step()
        counted.append(len(one.tier.saves.under_way))
    return counted


@pytest.mark.parametrize("differing", [0, 1])
def test_ranks_whose_trees_differ_poll_as_many_saves(pair, differing):
    """One lists what the other need not save: both would hang in reductions of different sizes."""
    assert set(assert_same(pair.run(ranks_differ, differing))) == {0}
