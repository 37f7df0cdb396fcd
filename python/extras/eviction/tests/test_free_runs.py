"""Long runs of free pages go to what prefill writes, short ones to decode steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from decode_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pair
from sglang.srt.mem_cache import free_watermark
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator, by_run_length
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.free_watermark import WATERMARK, watermark_part
from sglang.srt.mem_cache.radix_cache import RadixKey


def runs(pages: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for page in pages:
        if found and found[-1][-1] == page - 1:
            found[-1].append(page)
        else:
            found.append([page])
    return found


@given(st.sets(st.integers(1, 60)).flatmap(lambda pages: st.permutations(sorted(pages))))
@settings(max_examples=300, deadline=None)
def test_order_by_run_length(pages: list[int]) -> None:
    ordered = by_run_length(torch.tensor(pages, dtype=torch.int64)).tolist()
    assert sorted(ordered) == sorted(pages)
    # Two runs of the same length are never neighbours in number, so a run of the result is a run of the pool.
    lengths = [len(run) for run in runs(ordered)]
    assert lengths == sorted(lengths)
    assert sorted(map(len, runs(sorted(pages)))) == lengths


def make(page_size: int, num_pages: int):
    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, torch.float32, "cpu", None, need_sort=True)
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, torch.float32, "cpu", None, need_sort=True)


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pages for i in range(page_size)])


@pytest.mark.parametrize("page_size", [1, 4])
def test_without_the_tree_the_order_is_the_engines(page_size: int) -> None:
    allocator = make(page_size, 10)
    allocator.alloc(10 * page_size)
    for pages in ([3, 4, 5], [9], [1]):
        allocator.free(slots_of(pages, page_size))
    assert allocator.alloc(4 * page_size).tolist() == slots_of([1, 3, 4, 5], page_size).tolist()


@pytest.mark.parametrize("page_size", [1, 4])
def test_admission_takes_whole_runs_from_a_fragmented_pool(page_size: int) -> None:
    """Of the pool every other page is free, and one long run; a request gets the run, decode steps the single pages."""
    size = 128 * page_size
    world = World(size=size, page_size=page_size)
    world.allocator.alloc(size)
    singles = list(range(2, 60, 2))
    world.allocator.free(slots_of(singles + list(range(80, 110)), page_size))
    decode_req = world.arrive([7] * (20 * page_size))
    world.handshake(decode_req)
    world.step()
    pages = decode_req.kv_receiver.page_indices
    assert len(runs(pages)) == 1 and 80 <= pages[0] and pages[-1] < 110
    assert int(world.allocator.alloc(page_size)[0]) // page_size in singles


def fill(world: World, leaves: int, length: int) -> None:
    for n in range(leaves):
        slots = world.allocator.alloc(length)
        world.tree.insert(InsertParams(key=RadixKey([n + 1] * length, None), value=slots))


@pytest.mark.parametrize(("text", "watermark"), [(None, 40), ("", 40), ("0", 0), ("0.5", 320)])
def test_the_watermark_is_a_part_of_the_pool(monkeypatch: pytest.MonkeyPatch, text: str | None, watermark: int) -> None:
    monkeypatch.delenv(WATERMARK, raising=False)
    if text is not None:
        monkeypatch.setenv(WATERMARK, text)
    world = World(size=640, page_size=4, watermark=None)
    fill(world, 4, 160)
    world.step()
    assert world.allocator.available_size() == world.tree.watermark == watermark


def test_watermark_leaves_alone_what_requests_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATERMARK, "0.5")
    world = World(size=640, page_size=4, watermark=None)
    fill(world, 4, 160)
    for leaf in list(world.tree.evictable_leaves):
        world.tree.inc_lock_ref(leaf)
    world.step()
    assert world.allocator.available_size() == 0


def started_with(rank: int, parts: tuple[str, str]) -> tuple[int, list[str]]:
    """Tokens that a rank keeps free, of 512, and the warnings at its start; ranks on two nodes have two values."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WATERMARK, parts[rank])
        patch.setattr(free_watermark.logger, "warning", lambda text, *args: told.append(text % args))
        world = World(size=512, page_size=4, watermark=None, group=dist.group.WORLD)
    return world.tree.watermark, told


@pytest.mark.parametrize(("parts", "kept"), [(("0.25", ""), 128), (("", "0.25"), 32), (("0", "0.5"), 0)])
def test_ranks_of_several_nodes_keep_the_same_part_free(pair: Pair, parts: tuple[str, str], kept: int) -> None:
    """They evicted differently at once, admitted nothing for 64 steps, dropped their trees, and so on for ever."""
    (first, silent), (second, (told,)) = pair.run(started_with, parts)
    assert first == second == kept and not silent
    assert WATERMARK in told and f" {kept} " in told


@pytest.mark.parametrize("text", ["much", "-0.1", "0.6", "nan"])
def test_a_watermark_that_cannot_be(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(WATERMARK, text)
    with pytest.raises(ValueError, match=f"{WATERMARK} is .*0.5"):
        watermark_part()
