"""KV of every kind of pool on its way from one worker's device to another's: host memory, a storage, host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.host_tier.memory import HostMemory, host_pool
from sglang.srt.mem_cache.host_tier.storage_pages import HostPages
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from storage_kinds import Inside, opened

PAGE, SIZE = 4, 32
OPTIONS: Any = SimpleNamespace(hicache_ratio=3, hicache_size=0, hicache_mem_layout="layer_first")
TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def mha(dtype: torch.dtype, layers: int = 2, heads: int = 2) -> Any:
    return MHATokenToKVPool(SIZE, PAGE, dtype, heads, 4, layers, "cpu", False)


def mla(dtype: torch.dtype) -> Any:
    return MLATokenToKVPool(SIZE, PAGE, dtype, 6, 2, 3, "cpu", False)


POOLS = {"mha": lambda dtype: [mha(dtype)], "mla": lambda dtype: [mla(dtype)]}
POOLS["mha with a draft"] = lambda dtype: [mha(dtype), mha(dtype, layers=1)]
POOLS["mla with a draft"] = lambda dtype: [mla(dtype), mha(dtype, layers=1, heads=1)]


class Worker:
    """The pools of one worker, with any bytes in them."""

    def __init__(self, pools: str, dtype: torch.dtype, seed: int, folder: Any, kind: str):
        torch.manual_seed(seed)
        self.pools = POOLS[pools](dtype)
        hosted = [host_pool(self.pools[0], OPTIONS, PAGE)]
        hosted += [host_pool(pool, OPTIONS, PAGE, hosted[0].size) for pool in self.pools[1:]]
        self.memory = HostMemory(list(zip(self.pools, hosted, strict=True)), "direct", lambda: None)
        for buffer in [*self.buffers(), *(pool.kv_buffer for pool in hosted)]:
            as_bytes(buffer)[:] = torch.randint(0, 256, as_bytes(buffer).shape, dtype=torch.uint8)
        self.pages = HostPages(hosted, PAGE)
        self.files = opened(kind, folder, self.pages.page_bytes)

    def buffers(self) -> list[torch.Tensor]:
        names = ("k_buffer", "v_buffer", "kv_buffer")
        return [buffer for pool in self.pools for name in names for buffer in getattr(pool, name, [])]

    def bytes_of(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [as_bytes(buffer)[slots].clone() for buffer in self.buffers()]


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8)


def slots_of(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("pools", POOLS)
def test_kv_comes_to_another_worker_as_it_was(kind, pools, dtype, tmp_path):
    one, two = (Worker(pools, dtype, seed, tmp_path, kind) for seed in (1, 2))
    assert one.pages.made_of() == two.pages.made_of() and one.pages.page_bytes == two.pages.page_bytes
    # As many bytes as numbers of that type, of all pools.
    numbers = sum(buffer[0].numel() for buffer in one.buffers())
    assert one.pages.page_bytes == PAGE * numbers * dtype.itemsize
    assert one.pages.shared == (pools == "mla")
    there, here = (3, 7, 5), (6, 2, 4)
    expected, untouched = one.bytes_of(slots_of(*there)), two.bytes_of(slots_of(1, 3, 5, 7))
    one.memory.save(slots_of(1, 2, 9), slots_of(*there)).wait()
    buffer = one.pages.buffer()
    for i, page in enumerate((1, 2, 9)):
        one.pages.read(page, buffer)
        assert one.files.set(str(i), buffer)
    host = [as_bytes(pool.kv_buffer).clone() for _, pool in two.memory.pools]
    buffer = two.pages.buffer()
    for i, page in enumerate((8, 1, 3)):
        assert two.files.get(str(i), buffer) is not None
        two.pages.write(page, buffer)
    # Nothing else of host memory has changed: what is in other pages is another's.
    for before, (_, pool) in zip(host, two.memory.pools, strict=True):
        slots = as_bytes(pool.kv_buffer).ne(before).flatten(-2).any(-1)
        assert set(torch.nonzero(slots.flatten(0, -2).any(0)).flatten().tolist()) <= set(slots_of(8, 1, 3).tolist())
    two.memory.load(slots_of(8, 1, 3), slots_of(*here)).wait()
    for got, wanted in zip(two.bytes_of(slots_of(*here)), expected, strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(two.bytes_of(slots_of(1, 3, 5, 7)), untouched, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("make", [mha, mla])
def test_every_layout_of_host_memory(make, layout):
    options = SimpleNamespace(**{**vars(OPTIONS), "hicache_mem_layout": layout})
    pools = [host_pool(make(torch.float8_e4m3fn), options, PAGE) for _ in range(2)]
    one, two = (HostPages([pool], PAGE) for pool in pools)
    for pool in pools:
        as_bytes(pool.kv_buffer)[:] = torch.randint(0, 256, as_bytes(pool.kv_buffer).shape, dtype=torch.uint8)
    buffer, again = one.buffer(), two.buffer()
    one.read(5, buffer)
    two.write(2, buffer)
    two.read(2, again)
    assert torch.equal(buffer, again) and buffer.unique().numel() > 8


def test_another_page_in_the_place_of_one_is_not_that_page(kind, tmp_path):
    """As over Mooncake: what a removed page had is given to another one, of the same length, while it is read."""
    page, other = (torch.full((100,), byte, dtype=torch.uint8) for byte in (1, 2))
    store = opened(kind, tmp_path / "rank", 100)
    inside, buffer = Inside(kind, store), torch.zeros(100, dtype=torch.uint8)
    assert store.set("a", page) and store.set("b", other)
    inside.put("a", inside.data("b"))
    assert store.get("a", buffer) is None and store.corrupt == 1 and inside.names() == ["b"]
    assert store.get("b", buffer) is buffer and torch.equal(buffer, other) and store.corrupt == 1
    # It is removed, and written again.
    assert store.set("a", page) and store.get("a", buffer) is buffer and torch.equal(buffer, page)


def test_in_mooncake_another_ranks_page_of_one_name_is_not_that_page(master, tmp_path):
    """All ranks of all models are in one store, and their pages of one length take each other's places."""
    ranks = [opened(master.kind, tmp_path / name, 100) for name in ("rank", "rank2")]
    for byte, store in enumerate(ranks):
        assert store.set("a", torch.full((100,), byte, dtype=torch.uint8))
    first, second = (Inside(master.kind, store) for store in ranks)
    first.put("a", second.data("a"))
    buffer = torch.zeros(100, dtype=torch.uint8)
    assert ranks[0].get("a", buffer) is None and ranks[0].corrupt == 1 and first.names() == []
    assert ranks[1].get("a", buffer) is buffer and buffer.all()
