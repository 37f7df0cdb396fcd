"""Eviction takes exactly what is lacking, by the engine's policy."""

from __future__ import annotations

from decode_world import World
from sglang.srt.mem_cache.evict_policy import MRUStrategy
from test_traps import serve_to_end, tokens

PAGE = 4


def world_with(**attributes) -> World:
    world = World(size=128, page_size=PAGE)
    for name, value in attributes.items():
        setattr(world.tree, name, value)
    world.tree.reset()
    return world


def test_the_last_used_goes_first_by_the_policy_that_says_so():
    world = world_with(eviction_policy="mru", eviction_strategy=MRUStrategy())
    old, new = tokens(1, 32), tokens(2, 32)
    serve_to_end(world, old)
    serve_to_end(world, new)
    serve_to_end(world, old)
    assert world.tree.evict_shortfall(PAGE) == PAGE
    assert (world.tree.peek(old, None).length, world.tree.peek(new, None).length) == (28, 32)


def test_a_parent_goes_when_its_children_have_gone():
    world = World(size=128, page_size=PAGE)
    for prompt in (tokens(1, 16) + tokens(40, 16), tokens(1, 16) + tokens(60, 16), tokens(2, 16)):
        serve_to_end(world, prompt)
    for freed in range(PAGE, 64 + 1, PAGE):
        assert world.tree.evict_shortfall(PAGE - 1) == PAGE
        assert world.tree.evictable_size() == 64 - freed
        world.check()
    assert world.tree.evict_shortfall(PAGE) == 0 and world.allocator.available_size() == 128
