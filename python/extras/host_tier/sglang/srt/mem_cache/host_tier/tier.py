"""What a decode worker keeps in host memory of what its tree has evicted, and how a request gets it back.

To admission, host memory is one more writer of a request's own pages: all that lies beyond what the tree holds is
allocated for it as ever; what host memory has of that is copied there while prefill, which is asked for the rest,
computes and sends it. Its commit waits for both. What is counted on is locked from before anything is allocated until
the request is committed, or has failed and its copy is over, so a promise to a prefill is always kept.

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

# By the engine's write policy: after how many uses what is in the tree is saved. A request uses its prompt twice, when
# that is committed and when it ends, so this is what another request has used too.
HITS = {"write_through": 1, "write_through_selective": 3}
# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


class Load:
    """What a request counts on in host memory: locked there, and copied to pages of its own.

    start, end: the tokens of its prompt that are copied. known: whether a prefill has, or had, what ends there.
    """

    def __init__(self, slots: torch.Tensor, node: TreeNode, start: int, generation: int):
        """slots: in host memory, of the tokens from the prompt's start. node: of the tree there, locked."""
        self.slots, self.node, self.generation = slots, node, generation
        self.start, self.end = start, len(slots)
        self.known = is_known(node)
        self.copy: Copy | None = None

    def done(self) -> bool:
        """Whether nothing is being copied for it."""
        return self.copy is None or self.copy.done()

    def wait(self) -> None:
        """Wait until nothing is."""
        if self.copy is not None:
            self.copy.wait()


class HostTier(tier.Tier):
    """Host memory below the tree of one rank."""

    def __init__(self, tree: DecodeRadixCache, host: HostTree, memory: HostMemory, hits: int):
        """host: the tree over host memory. hits: see `Saves`."""
        self.tree, self.host, self.memory = tree, host, memory
        self.saves = Saves(tree, host, memory, hits)
        # What is below it, if anything is.
        self.storage: HostStorage | None = None
        # Tokens since the start that were copied back.
        self.loaded_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether something is being saved, or soon will be, or a request waits for a storage."""
        return self.saves.busy or (self.storage is not None and self.storage.busy)

    # ---- what requests ask ----

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
        """To the eviction policy a request of that priority has used it."""
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
        """Takes in what a storage has brought, too."""
        if self.storage is not None:
            self.storage.advance(group, alone)
        self.saves.start()
        return self.saves.under_way

    def end_step(self, polls: Sequence[int]) -> None:
        self.saves.end_all(polls)

    # ---- figures ----

    def figures(self) -> list[int]:
        """Free and evictable tokens of host memory, and saves under way."""
        return [self.host.pool.available_size(), self.host.evictable_size(), len(self.saves.under_way)]

    def cached_details(self, req: Req) -> dict[str, int]:
        # Of the decode prefix; and of these, those that were fetched for this request.
        details = {"decode_host": req.from_host}
        if self.storage is not None:
            details["decode_storage"] = req.from_storage
        return details

    def nodes_in_use(self) -> Sequence[TreeNode]:
        return self.saves.locked()

    def places(self) -> dict[str, tuple[int, int]]:
        return {"host": (self.host.pool_size, self.host.pool.available_size())}

    def report(self) -> dict[str, Any]:
        """Tokens of host memory, and of what has been copied since the start."""
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
        return [*faults, f"host memory: nobody holds {unheld} tokens"] if unheld else faults

    # ---- ends ----

    def release_device(self) -> bool:
        """See `Saves.release_device`."""
        return self.saves.release_device()

    def stop(self) -> None:
        """Host memory is emptied by the flush."""
        if self.storage is not None:
            self.storage.stop()

    def wait(self) -> None:
        self.memory.wait()

    def on_reset(self) -> None:
        """The device's tree is reset: so is this one, when all copies have ended."""
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
    """Put host memory, as the engine's options say, below an empty ``tree``. Raises ValueError.

    forward_stream: of the steps of the model; None on a CPU host. draft_pool: KV of the draft model, if there is one.
    host_class: of the tree over host memory.
    """
    kvcache = kv_pool_of(tree.token_to_kv_pool_allocator.get_kvcache())
    # At the same slots. Where the draft is a part of the model, its pool may be one of layers with KV too.
    drafts = [] if draft_pool is None else [kv_pool_of(draft_pool)]
    for one in kvcache, *drafts:
        check_pool(one)
    check_size(args, kvcache)
    pool = host_pool(kvcache, args, tree.page_size)
    pools = [(kvcache, pool), *((one, host_pool(one, args, tree.page_size, pool.size)) for one in drafts)]
    memory = HostMemory(pools, args.hicache_io_backend, forward_stream)
    # The engine's allocators never give the first page away.
    host = host_tree(tree, pool.size - tree.page_size, host_class)
    tree.attach(HostTier(tree, host, memory, HITS[args.hicache_write_policy]))
    logger.info(
        "Decode keeps %d tokens in host memory, %.2f GB of this rank, below the %d of its pool.",
        host.pool_size,
        sum(one.size * one.size_per_token for _, one in pools) / 1e9,
        tree.pool_size,
    )


def kv_bytes(pool: Any) -> int:
    """Bytes of a pool on the device."""
    k, v = pool.get_kv_size_bytes() if hasattr(pool, "v_buffer") else (pool.get_kv_size_bytes(), 0)
    return int(k + v)


def check_size(args: ServerArgs, pool: Any) -> None:
    """Raise ValueError where host memory would hold no more than ``pool``; the engine only asserts it."""
    if not args.hicache_size:
        return
    size = kv_bytes(pool) / 1e9
    if args.hicache_size <= size:
        raise ValueError(
            f"--hicache-size is {args.hicache_size} GB for each rank, and the KV pool of one on the device takes "
            f"{size:.2f} GB: give more than that, or a smaller --max-total-tokens."
        )
