"""The order in which a decode tree evicts its leaves, and what finding the next one costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from decode_world import World, queue
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.eviction_order import EvictionOrder
from test_traps import tokens
from test_wanted_leaves import fill


class Leaf(SimpleNamespace):
    __hash__ = object.__hash__


class Strategy:
    def __init__(self) -> None:
        self.asked = 0

    def get_priority(self, node: Leaf) -> int:
        self.asked += 1
        return node.used


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=80))
def test_the_next_is_what_a_look_at_all_would_find(steps):
    """Through uses, locks, growth, and requests that come and go. Priorities only rise, as those of nearly all do."""
    leaves = {Leaf(id=n, used=n % 3, waiting=0) for n in range(6)}
    all_leaves = sorted(leaves, key=lambda leaf: leaf.id)
    order = EvictionOrder(leaves, Strategy(), lambda leaf: leaf.waiting)  # type: ignore[arg-type]
    spared: set[Leaf] = set()
    for leaf in all_leaves:
        order.add(leaf)
    for what, which in steps:
        leaf = all_leaves[which]
        if what == 0:
            leaf.used += 1
        elif what == 1:
            # Locked or grown on, and back.
            (leaves.discard if leaf in leaves else leaves.add)(leaf)
            if leaf in leaves:
                order.add(leaf)
            elif leaf in spared and leaf not in order:
                spared.discard(leaf)
        elif what == 2:
            leaf.waiting += 1
        elif what == 3 and leaf.waiting:
            leaf.waiting -= 1
            order.no_longer_wanted(leaf)
            spared.discard(leaf)
        elif what == 4:
            expected = min(leaves - spared, key=lambda one: (one.used, one.id), default=None)
            taken = order.take_next()
            assert taken is expected
            if taken is not None and taken.waiting:
                order.spare(taken)
                spared.add(taken)
            elif taken is not None:
                leaves.discard(taken)
                order.drop(taken)
        elif what == 5:
            among = spared & leaves
            expected = min(among, key=lambda one: (one.waiting, one.used, one.id), default=None)
            assert order.take_least_wanted() is expected
            # Those that are locked are listed again when they are not.
            spared = {one for one in spared if one in order and one is not expected}
            if expected is not None:
                leaves.discard(expected)
                order.drop(expected)
        else:
            order.list_anew()
            spared.clear()
        assert all(leaf in order for leaf in leaves)


@pytest.mark.parametrize("queued", [64, 128])
def test_evicting_what_is_waited_for_looks_at_few_leaves(queued):
    """It looked at all of them for each one that it evicted: 150 ms of a step with 3000 requests in the queue."""
    world = World(size=16 * queued + 64, page_size=4, max_reqs=queued + 8)
    prompts = [[n % 250, n // 250, *tokens(n % 97, 14)] for n in range(queued)]
    fill(world, *prompts)
    queue(world, *(prompt + tokens(99, 4) for prompt in prompts))
    asked = 0
    waiting = world.tree.victims._waiting

    def count(node):
        nonlocal asked
        asked += 1
        return waiting(node)

    world.tree.victims._waiting = count
    assert world.tree.evict_shortfall(queued // 2 * 16) == queued // 2 * 16
    # Each is spared once, and found again when its turn has come.
    assert asked <= 3 * queued
    asked = 0
    world.tree.evict_shortfall(4 * 16)
    assert asked <= 4 * 4
    world.check()


def test_leaves_that_are_spared_again_and_again_leave_no_trail():
    world = World(size=256, page_size=4, max_reqs=16)
    prompts = [tokens(n, 16) for n in range(1, 9)]
    fill(world, *prompts)
    world.tree.watermark = 256
    for _ in range(200):
        waiting = [world.arrive(prompt + tokens(30, 4)) for prompt in prompts]
        world.tree.evict_to_watermark()
        for decode_req in waiting:
            world.queue.queue.remove(decode_req)
            world.queue.policy.leave(decode_req.entry)
    assert world.tree.evictable_size() == 8 * 16
    assert len(world.tree.victims._spared_heap) < 100 and len(world.tree.victims._heap) < 100


def test_the_audit_finds_a_leaf_that_is_not_listed():
    world = World(size=128, page_size=4)
    fill(world, tokens(1, 16))
    (leaf,) = world.tree.evictable_leaves
    assert world.tree.audit([]) == []
    world.tree.victims.drop(leaf)
    assert world.tree.audit([]) == ["1 evictable leaves are not listed for eviction"]
