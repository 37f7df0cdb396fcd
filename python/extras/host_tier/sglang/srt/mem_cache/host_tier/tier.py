"""HiCache L2 of a decode worker: saves the tree's KV to host memory and loads it back for requests.

Admission allocates all of a prompt beyond the tree's prefix, as without host memory. The part found in host memory is
copied there while prefill computes and sends the rest; the commit waits for both. That part is locked in host memory
before anything is allocated, until the request is committed, or has failed and its copy has ended. So a prefix that
prefill was promised is never evicted.

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache import tier
from sglang.srt.mem_cache.host_tier.memory import HostMemory, check_pool, host_pool, kv_pool_of
from sglang.srt.mem_cache.host_tier.saves import Saves
from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache, HostTree, host_tree
from sglang.srt.mem_cache.known_prefixes import is_known
from sglang.srt.mem_cache.prefix_reader import NOTHING, PrefixPeek

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.host_tier.memory import Copy
    from sglang.srt.mem_cache.host_tier.storage import HostStorage
    from sglang.srt.mem_cache.prefix_watch import Watch
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.server_args import ServerArgs

__all__ = ["HostTier", "Load", "add_host_tier"]

logger = logging.getLogger(__name__)

# Uses after which a node is saved, by the engine's write policy. A request uses its prompt twice, at its commit and at
# its end, so a third use is by another request.
HITS = {"write_through": 1, "write_through_selective": 3}
# Never written.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


class Load:
    """The part of a prompt that a request loads from host memory: locked there, copied to its own pages.

    start, end: the tokens of the prompt that are copied. known: whether a prefill has, or had, the prefix.
    """

    def __init__(self, slots: torch.Tensor, node: TreeNode, start: int, generation: int):
        """slots: in host memory, from the prompt's start. node: the last one of the prefix there, locked."""
        self.slots, self.node, self.generation = slots, node, generation
        self.start, self.end = start, len(slots)
        self.known = is_known(node)
        self.copy: Copy | None = None

    def done(self) -> bool:
        return self.copy is None or self.copy.done()

    def wait(self) -> None:
        if self.copy is not None:
            self.copy.wait()


class HostTier(tier.Tier):
    """Host memory below the tree of one rank."""

    def __init__(self, tree: DecodeRadixCache, host: HostTree, memory: HostMemory, hits: int):
        """host: the tree over host memory. hits: see `Saves`."""
        self.tree, self.host, self.memory = tree, host, memory
        self.saves = Saves(tree, host, memory, hits)
        # The storage (L3) below it, if there is one.
        self.storage: HostStorage | None = None
        # Tokens loaded since the start.
        self.loaded_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether saves are running or pending, or a request waits for a storage."""
        return self.saves.busy or (self.storage is not None and self.storage.busy)

    # ---- requests ----

    def fetch(self, req: Req, entry: QueueEntry) -> None:
        if self.storage is not None:
            self.storage.fetch(req.rid, entry.watch, entry.host_watch, len(req.origin_input_ids))

    def is_done(self, rid: str) -> bool:
        return self.storage is None or self.storage.is_done(rid)

    def leave(self, rid: str) -> None:
        if self.storage is not None:
            self.storage.leave(rid)

    def watch(self, token_ids: Sequence[int], extra_key: str | None) -> Watch:
        return self.host.watches.add(token_ids, extra_key)

    def end_watch(self, watch: Watch) -> None:
        self.host.watches.remove(watch)

    def found(self, watch: Watch | None, held: int) -> PrefixPeek:
        if watch is None or watch.length <= held:
            return NOTHING
        return watch.peek()

    def found_of(self, token_ids: Sequence[int], extra_key: str | None, held: int) -> PrefixPeek:
        found = self.host.peek(self.tree.shareable(token_ids), extra_key)
        return found if found.length > held else NOTHING

    def lock(self, found: PrefixPeek, held: int, priority: int) -> Load:
        """Locks ``found`` and counts a use of this priority for the eviction policy."""
        parts, node = self.host.lock_prefix(found)
        self.host.count_use(node)
        self.host.raise_priority(node, priority)
        return Load(torch.cat([NO_SLOTS, *parts]), node, held, self.host.generation)

    def load(self, load: Load, req: Req, rows: Any) -> None:
        slots = rows.req_to_token[req.req_pool_idx, load.start : load.end].long()
        load.copy = self.memory.load(load.slots[load.start :], slots)
        self.loaded_tokens += load.end - load.start
        req.load_start, req.host_prefix_len = load.start, load.end
        if self.storage is not None:
            req.from_storage = self.storage.brought(req.rid, load.start, load.end)

    def let_go(self, load: Load) -> None:
        if load.generation == self.host.generation:
            self.host.dec_lock_ref(load.node)

    # ---- a step ----

    def begin_step(self, group: Any, alone: bool) -> Sequence[Any]:
        """Adds pages that a storage has fetched."""
        if self.storage is not None:
            self.storage.advance(group, alone)
        self.saves.start()
        return self.saves.under_way

    def end_step(self, polls: Sequence[int]) -> None:
        self.saves.end_all(polls)

    # ---- figures ----

    def figures(self) -> list[int]:
        """Free and evictable tokens of host memory, and running saves."""
        return [self.host.pool.available_size(), self.host.evictable_size(), len(self.saves.under_way)]

    def cached_details(self, req: Req) -> dict[str, int]:
        # Loaded tokens of the decode prefix; of these, those fetched for this request.
        details = {"decode_host": req.from_host}
        if self.storage is not None:
            details["decode_storage"] = req.from_storage
        return details

    def nodes_in_use(self) -> Sequence[TreeNode]:
        return self.saves.locked()

    def places(self) -> dict[str, tuple[int, int]]:
        return {"host": (self.host.pool_size, self.host.pool.available_size())}

    def report(self) -> dict[str, Any]:
        """Tokens in host memory, and tokens copied since the start."""
        host, saves = self.host, self.saves
        return {
            "size": host.pool_size,
            "available": host.pool.available_size(),
            "evictable": host.evictable_size(),
            "protected": host.protected_size(),
            "saving": saves.tokens,
            "saved": saves.saved_tokens,
            "loaded": self.loaded_tokens,
            "dropped": saves.dropped_tokens,
            "evicted_unsaved": saves.late_tokens,
            **({} if self.storage is None else {"storage": self.storage.state()}),
        }

    def faults(self) -> list[str]:
        faults = [f"host memory: {fault}" for fault in self.host.audit([])]
        unheld = self.host.pool_size - self.host.pool.available_size() - self.host.evictable_size()
        return [*faults, f"host memory: {unheld} tokens are neither free nor in the tree"] if unheld else faults

    # ---- ends ----

    def release_device(self) -> bool:
        """See `Saves.release_device`."""
        return self.saves.release_device()

    def stop(self) -> None:
        """Stops the storage; the flush clears host memory."""
        if self.storage is not None:
            self.storage.stop()

    def wait(self) -> None:
        self.memory.wait()

    def on_reset(self) -> None:
        """Clears host memory with the device's tree, after all copies have ended."""
        self.memory.wait()
        self.saves.forget()
        if self.storage is not None:
            self.storage.forget()
        self.host.reset()
        self.host.pool.clear()


def add_host_tier(
    tree: HostTierRadixCache,
    args: ServerArgs,
    forward_stream: Callable[[], Any],
    draft_pool: Any = None,
    host_class: type[HostTree] = HostTree,
) -> None:
    """Put host memory, sized by the engine's options, below an empty ``tree``. Raises ValueError.

    forward_stream: of the model's steps; None on a CPU host. draft_pool: KV of the draft model, if there is one.
    host_class: of the tree over host memory.
    """
    kvcache = kv_pool_of(tree.token_to_kv_pool_allocator.get_kvcache())
    # The draft uses the same slots. A draft inside the model may have a hybrid pool too.
    drafts = [] if draft_pool is None else [kv_pool_of(draft_pool)]
    for one in kvcache, *drafts:
        check_pool(one)
    check_size(args, kvcache)
    pool = host_pool(kvcache, args, tree.page_size)
    pools = [(kvcache, pool), *((one, host_pool(one, args, tree.page_size, pool.size)) for one in drafts)]
    memory = HostMemory(pools, args.hicache_io_backend, forward_stream)
    # The engine's allocators never use the first page.
    host = host_tree(tree, pool.size - tree.page_size, host_class)
    tree.attach(HostTier(tree, host, memory, HITS[args.hicache_write_policy]))
    logger.info(
        "Decode keeps %d tokens in host memory (%.2f GB on this rank), below the KV pool of %d tokens.",
        host.pool_size,
        sum(one.size * one.size_per_token for _, one in pools) / 1e9,
        tree.pool_size,
    )


def kv_bytes(pool: Any) -> int:
    """Bytes of a pool on the device."""
    k, v = pool.get_kv_size_bytes() if hasattr(pool, "v_buffer") else (pool.get_kv_size_bytes(), 0)
    return int(k + v)


def check_size(args: ServerArgs, pool: Any) -> None:
    """Raise ValueError if host memory is no larger than ``pool``; the engine only asserts this."""
    if not args.hicache_size:
        return
    size = kv_bytes(pool) / 1e9
    if args.hicache_size <= size:
        raise ValueError(
            f"--hicache-size is {args.hicache_size} GB per rank, but the KV pool of a rank takes "
            f"{size:.2f} GB. Increase it, or reduce --max-total-tokens."
        )
