"""What the audit of a decode tree and its pools finds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from decode_world import World
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator
from sglang.srt.managers.kv_pool_state import Pools
from sglang.srt.mem_cache import tree_audit
from sglang.srt.mem_cache.tier import Tier
from test_traps import serve, serve_to_end, tokens

PAGE = 4


def test_the_audit_finds_each_contradiction():
    world = World(size=128, page_size=PAGE)
    tree = world.tree
    req = serve(world, tokens(1, 32)).req
    serve_to_end(world, tokens(2, 16))
    held, free = req.last_node, next(iter(tree.evictable_leaves))
    assert tree.audit([held]) == []

    def only(holders, *said: str) -> None:
        found = tree.audit(holders)
        assert len(found) == len(said) and all(text in line for text, line in zip(said, found, strict=True)), found

    only([], f"node {held.id}: lock_ref 1, 0 live requests hold it")
    only([held, held], f"node {held.id}: lock_ref 1, 2 live requests hold it")
    only([held, free], f"node {free.id}: lock_ref 0, 1 live requests hold it")
    tree.evictable_size_ += PAGE
    only([held], "counted 16 evictable and 32 protected tokens, the tree says 20 and 32")
    tree.evictable_size_ -= PAGE
    tree.protected_size_ -= PAGE
    only([held], "counted 16 evictable and 32 protected tokens, the tree says 16 and 28")
    tree.protected_size_ += PAGE
    tree.evictable_leaves.discard(free)
    only([held], "1 evictable leaves, the tree lists 0")
    tree.evictable_leaves.add(free)
    value = free.value
    free.value = value[:-1]
    only([held], f"node {free.id}: 16 tokens, 15 slots")
    free.value = value.clone()
    free.value[0] = held.value[0]
    only([held], "one KV slot is in the tree twice")
    free.value = value
    assert tree.audit([held]) == []
    tree.reset()
    only([held], "a live request holds a node of an earlier tree")


def served_world() -> World:
    """A worker whose tree holds four pages, and that has no request."""
    world = World(size=128, page_size=PAGE)
    serve_to_end(world, tokens(1, 16))
    return world


def page_in_tree(world: World) -> int:
    (leaf,) = world.tree.evictable_leaves
    return int(leaf.value[-1]) // PAGE


def swapped(world: World) -> None:
    """A page of the tree was freed in place of another."""
    world.allocator.free_pages[-1] = page_in_tree(world)


def freed_with_the_tree(world: World) -> None:
    world.allocator.release_pages = torch.tensor([page_in_tree(world)])


def freed_twice(world: World) -> None:
    world.allocator.free_pages[-1] = world.allocator.free_pages[0]


def freed_once_more(world: World) -> None:
    world.allocator.release_pages = world.allocator.free_pages[:2].clone()


def lost(world: World) -> None:
    world.allocator.free_pages = world.allocator.free_pages[3:]


def strange(world: World) -> None:
    world.allocator.free_pages[0], world.allocator.free_pages[1] = 0, 1000


FREE_AND_HELD = "1 pages of KV are free and in the tree"
NOWHERE = "1 pages of KV are neither free nor in the tree"


@pytest.mark.parametrize(
    ("fault", "always", "at_rest"),
    [
        (swapped, [FREE_AND_HELD], [NOWHERE]),
        (freed_with_the_tree, [FREE_AND_HELD], []),
        (freed_twice, ["1 pages of KV are free more than once"], [NOWHERE]),
        (freed_once_more, ["2 pages of KV are free more than once"], []),
        (lost, [], ["3 pages of KV are neither free nor in the tree"]),
        (strange, ["2 free pages of KV are none of the pool's"], ["2 pages of KV are neither free nor in the tree"]),
    ],
)
def test_each_page_is_free_or_in_the_tree_and_once(fault, always: list[str], at_rest: list[str]):
    world = served_world()
    pools = Pools(world.tree, world.allocator, world.pool, 128)
    assert pools.audit() == [] == world.tree.audit([])
    fault(world)
    assert world.tree.audit([]) == always and pools.audit() == always + at_rest


def test_the_audit_puts_few_tokens_together_on_the_device(monkeypatch):
    """All slots of the tree were joined there first, 8 bytes a token beside a pool that leaves little."""
    world, joined, whole = World(size=2048, page_size=PAGE), [], torch.cat
    for n in (1, 200, 400):
        serve_to_end(world, tokens(n, 160))
    monkeypatch.setattr(tree_audit, "AT_ONCE", 64)
    # What is on the device, which here is the CPU too, is not what has been brought from it.
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: brought.append(self.clone()) or brought[-1])
    brought: list[torch.Tensor] = []

    def counted(parts, *args):
        on_device = [part for part in parts if not any(part is copy for copy in brought)]
        joined.append(sum(map(len, on_device)))
        return whole(parts, *args)

    monkeypatch.setattr(torch, "cat", counted)
    assert Pools(world.tree, world.allocator, world.pool, 2048).audit() == []
    assert joined and max(joined) <= 64 < sum(map(len, brought))
    # Looked at once by each of the two, not once more for the free list.
    assert sum(map(len, brought)) <= 2 * (3 * 160 + 2048 // PAGE)


def test_pages_of_running_requests_are_in_neither():
    world = World(size=128, page_size=PAGE)
    serve(world, tokens(1, 18))
    serve_to_end(world, tokens(2, 16))
    assert world.tree.audit([world.running[0].last_node]) == []
    world.allocator.free_pages[-1] = int(world.pool.req_to_token[world.running[0].req_pool_idx, 0]) // PAGE
    assert world.tree.audit([world.running[0].last_node]) == [FREE_AND_HELD]


def test_what_a_tier_may_still_write_to_is_in_neither(monkeypatch):
    world = served_world()
    pools = Pools(world.tree, world.allocator, world.pool, 128)
    world.allocator.free_pages = world.allocator.free_pages[2:]
    monkeypatch.setattr(Tier, "unreturned_tokens", 2 * PAGE)
    assert pools.audit() == []
    monkeypatch.setattr(Tier, "unreturned_tokens", 3 * PAGE)
    assert pools.audit() == ["1 pages of KV are free or in the tree before a tier has returned them"]


def test_an_allocator_of_another_kind_tells_nothing():
    world = served_world()
    pools = Pools(world.tree, world.allocator, world.pool, 128)
    freed_twice(world)
    world.tree.token_to_kv_pool_allocator = SimpleNamespace(free_pages=None, release_pages=None, size=128)
    assert pools.audit() == []


def test_rows_and_buffers_are_free_once():
    world = served_world()
    buffers = ReqToMetadataIdxAllocator(4)
    pools = Pools(world.tree, world.allocator, world.pool, 128, buffers)
    rows, count = world.pool.free_slots, len(world.pool.free_slots)
    assert pools.audit() == []
    rows[1] = rows[0]
    buffers.free_slots[3] = 2
    assert pools.audit() == [
        f"{count - 1} different rows are free, {count} in all, and there are {count}",
        "3 different metadata buffers are free, 4 in all, and there are 4",
    ]
