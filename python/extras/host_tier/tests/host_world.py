"""A tier in host memory for `decode_world.World`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from decode_world import World, kv_of
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.host_tier.memory import HostMemory
from sglang.srt.mem_cache.host_tier.tier import HostTier
from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache, HostTree, host_tree
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost


class HostSizes(NamedTuple):
    """A host tier: its tokens, after how many uses something is saved, and whether copies end when a test says so."""

    tokens: int
    hits: int = 1
    late: bool = False

    def tree(self, world: World, params: CacheInitParams) -> DecodeRadixCache:
        """A tree with a tier in host memory, of which the copies are over when they are begun, or late."""
        tree = HostTierRadixCache(params)
        pool = MHATokenToKVPoolHost(world.kv, 2 + self.tokens / world.kv.size, 0, params.page_size, "layer_first")
        pools = [(world.kv, pool), *world.draft_pools(self, params.page_size)]
        memory: Any = HostMemory(pools, "direct", lambda: None)
        memory = LateCopies(memory) if self.late else memory
        host_class = getattr(world, "host_class", HostTree)
        world.tier = HostTier(tree, host_tree(tree, self.tokens, host_class), memory, self.hits)
        tree.attach(world.tier)
        return tree

    def check(self, world: World, decode_reqs: list[DecodeRequest]) -> None:
        """Every token is somewhere, every lock has its holder, and KV is what it was."""
        tier, host = world.tier, world.tier.host
        loads = [dr.load for dr in decode_reqs if dr.load is not None and dr.load.generation == host.generation]
        saves = tier.saves.under_way
        fetches = None if tier.storage is None else tier.storage.fetches
        fetching = ([], 0) if fetches is None else (fetches.locked(), fetches.loading_tokens)
        assert not host.audit([load.node for load in loads] + [saving.above for saving in saves] + fetching[0])
        in_tree = host.evictable_size() + host.protected_size()
        assert host.pool.available_size() + in_tree + tier.saves.tokens + fetching[1] == host.pool_size
        watched = [dr.entry.host_watch for dr in world.queue.queue]
        assert {watch for watch in watched if watch is not None} == set(host.watches)
        stored = tier.memory.pools[0][1].k_buffer[0]
        for tokens, slots in world._tree_paths(host):
            got = stored[slots].flatten().int().tolist()
            assert got == [kv_of(tokens[: i + 1], world.weights) for i in range(len(tokens))]


class LateCopies:
    """Copies of a device that has other things to do: they read and write when a test has them end, in order."""

    def __init__(self, memory: HostMemory):
        self._memory, self.pools = memory, memory.pools
        self.begun: list[LateCopy] = []

    def save(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> LateCopy:
        return self._begin(partial(self._memory.save, host_slots, device_slots))

    def load(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> LateCopy:
        return self._begin(partial(self._memory.load, host_slots, device_slots))

    def _begin(self, run) -> LateCopy:
        self.begun.append(LateCopy(self, run))
        return self.begun[-1]

    def end(self, count: int) -> None:
        for copy in self.begun[:count]:
            copy.run()
        del self.begun[:count]

    def wait(self) -> None:
        self.end(len(self.begun))


class LateCopy:
    def __init__(self, copies: LateCopies, run):
        self._copies, self.run = copies, run

    def done(self) -> bool:
        return self not in self._copies.begun

    def wait(self) -> None:
        if not self.done():
            self._copies.end(self._copies.begun.index(self) + 1)
