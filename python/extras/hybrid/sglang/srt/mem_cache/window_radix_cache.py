"""The decode tree of a model with sliding windows: KV of the full-attention layers only.

The engine's tree for such models also keeps windows, and frees those of long prefixes first. Its mapping from full to
window slots has one entry per slot, so two requests cannot each have a window for slots that they share. Here shared
slots have no window: see `decode_windows`.

Upstream: sgl-project/sglang#27770 (merged).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.decode_windows import Windows, WindowsKept
from sglang.srt.mem_cache.hybrid_support import WINDOWS
from sglang.srt.mem_cache.state_kind import Need, StateKind

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, LiveReqs
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode
    from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator

__all__ = ["WindowRadixCache", "WindowSlots"]


class WindowSlots(StateKind):
    """The window pool of a worker, and its mapping from full-attention slots.

    A request has window slots from its window's start on. Free slots and slots in the tree have none.
    """

    support, layers, word, has_pool = WINDOWS, "sliding windows", "windows", True
    # Frees slots behind windows; set by the queue, which is created later and knows the batch.
    free_behind: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def is_of(cls, runner: Any) -> bool:
        return runner.is_hybrid_swa

    @classmethod
    def take_over(cls, engines: RadixCache, scheduler: Any) -> DecodeRadixCache:
        return WindowRadixCache.take_over(engines, sliding_window_size=scheduler.sliding_window_size)

    def __init__(self, allocator: SWATokenToKVPoolAllocator, rule: Windows):
        """Raises ValueError if the pool is too small for one request."""
        self.allocator = allocator
        self.rule = rule
        self.pool = allocator.swa_attn_allocator
        self.alloc = self.pool.alloc
        # For saves of retracted requests.
        allocator.window_slots = self
        if self.size < rule.most:
            raise ValueError(
                f"The pool of sliding-window layers has {self.size} tokens; with a window of {rule.size} and pages of "
                f"{rule.page_size} a request may take {rule.most}. Raise --swa-full-tokens-ratio or the memory for KV."
            )

    @property
    def size(self) -> int:
        """Tokens, whole pages."""
        return self.allocator.size_swa // self.rule.page_size * self.rule.page_size

    def available_size(self) -> int:
        return self.pool.available_size()

    # ---- one request ----

    def available(self, running: Iterable[Req] = ()) -> int:
        """Adds slots behind windows of ``running`` requests, which the engine frees from time to time."""
        return self.available_size() + sum(self.behind(req) for req in running)

    def need(self, req: Req, num_tokens: int, reserved: int) -> Need:
        """At most one token beyond the request's end: an overlapped step allocates it before the result is known."""
        at_length = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        return self.rule.need(num_tokens, max(0, at_length - num_tokens), reserved)

    def kept(self, live: LiveReqs, reserved: int) -> WindowsKept:
        running = [self.need(req, req.kv_allocated_len, reserved) for req in live.running]
        # A request may be in two lists of requests in transfer.
        coming = {id(req): req for req in live.coming}.values()
        kept = WindowsKept(
            growth=sum(need.soon - need.now for need in running),
            lacks=max((need.at_length for need in running), default=0),
            resumes=sum(self.need(req, req.seqlen - 1, reserved).soon for req in live.retracted),
            retractable=sum(self.rule.held(req.kv_allocated_len) for req in live.running),
        )
        for req in coming:
            kept = kept.plus(self.need(req, req.kv_allocated_len, reserved))
        return kept

    def take(self, req: Req, num_tokens: int, plan: AdmissionPlan, delta: torch.Tensor) -> None:
        """Give the end of ``delta`` window slots; the prefix ends at the window's start or before."""
        if plan.beside.now > self.available_size():
            self.free_behind()
        start = self.rule.start(num_tokens)
        self.give(delta[start - plan.found.length :], num_tokens - start)
        req.swa_evicted_seqlen = start

    def targets(self, req: Req, table: torch.Tensor) -> torch.Tensor:
        """The first slot of each page of its window."""
        return self.of(table[req.swa_evicted_seqlen :: self.rule.page_size])

    def indices(self, targets: np.ndarray) -> list[int]:
        return (targets // self.rule.page_size).tolist()

    # ---- slots ----

    def give(self, slots: torch.Tensor, num_tokens: int) -> None:
        """Map the first ``num_tokens`` of ``slots`` (whole full-attention pages, int64) to new window slots.

        The rest of the last page is mapped when decode steps use it.
        """
        own = self.alloc(len(slots))
        if own is None:
            raise RuntimeError("admitted beyond what the window pool has")
        self.allocator.full_to_swa_index_mapping[slots[:num_tokens]] = own[:num_tokens]

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Window slots (int64) of full-attention slots; 0 where there is none."""
        return self.allocator.full_to_swa_index_mapping[slots]

    def drop(self, slots: torch.Tensor) -> None:
        """Free the window slots of full-attention slots, if any."""
        if len(slots) > 0:
            self.allocator.free_swa(slots)

    def save(self, table: torch.Tensor) -> tuple[list, list]:
        """Copy a request's KV and window to host memory. table: its full-attention slots."""
        kv, window = self.allocator.get_kvcache(), self.of(table[self.rule.start(len(table)) :])
        return kv.full_kv_pool.get_cpu_copy(table), kv.swa_kv_pool.get_cpu_copy(window)

    def load(self, window: list, table: torch.Tensor) -> None:
        """Restore a saved window to the request's current slots."""
        self.allocator.get_kvcache().swa_kv_pool.load_cpu_copy(window, self.of(table[self.rule.start(len(table)) :]))

    def behind(self, req: Req) -> int:
        """Tokens of a running request that it will not attend to again, whole pages."""
        return max(0, self.rule.start(req.seqlen - 1) - max(req.swa_evicted_seqlen, req.cache_protected_len))

    def audit(self, held: Sequence[torch.Tensor]) -> list[str]:
        """Faults of pool and mapping, given that exactly the slots ``held`` have windows.

        held: per request its full-attention slots from its window's start on, int64.
        """
        wrong: list[str] = []
        mapping = self.allocator.full_to_swa_index_mapping[:-1]
        slots = torch.cat([mapping.new_empty(0), *held])
        strays = int((mapping != 0).sum()) - int((mapping[slots] != 0).sum())
        if strays:
            wrong.append(f"{strays} slots have a window and no request")
        own = mapping[slots]
        if bool((own == 0).any()):
            wrong.append(f"{int((own == 0).sum())} slots of requests lack their window")
        page = self.rule.page_size
        free = torch.cat([self.pool.free_pages, self.pool.release_pages])
        used = torch.cat([torch.unique(part // page) for part in own.split([len(part) for part in held])] or [own])
        books = torch.sort(torch.cat([free, used])).values.tolist()
        if books != list(range(1, self.size // page + 1)):
            wrong.append(
                f"of {self.size // page} window pages {len(free)} are free and {len(used)} requests', "
                f"{len(set(books))} different ones"
            )
        if bool(((slots - own) % page != 0).any()):
            wrong.append("a slot has another place in its page than its window")
        return wrong


class WindowRadixCache(DecodeRadixCache):
    """The decode tree over the full-attention pool of a model with sliding windows."""

    token_to_kv_pool_allocator: SWATokenToKVPoolAllocator

    def __init__(self, params: CacheInitParams):
        """Raises ValueError if the window pool is too small for one request."""
        assert params.sliding_window_size is not None
        # The engine's name.
        self.sliding_window_size = params.sliding_window_size
        allocator: Any = params.token_to_kv_pool_allocator
        self.state = self.windows = WindowSlots(allocator, Windows(params.sliding_window_size, params.page_size))
        super().__init__(params)

    @property
    def pool(self) -> Any:
        """Replaces the base's: the tree's slots are full-attention slots."""
        return self.token_to_kv_pool_allocator.full_attn_allocator

    @property
    def pool_size(self) -> int:
        return self.token_to_kv_pool_allocator.size_full

    def shareable(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """Replaces the base's: windows are not shared."""
        return token_ids[: self.windows.rule.start(len(token_ids))]

    def _committed_end(self, req: Req) -> int:
        """Replaces the base's: a running request's window stays its own."""
        return min(req.kv_committed_len, req.swa_evicted_seqlen)

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Frees the window first: slots that enter the tree or become free have none."""
        table = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        self.windows.drop(table[req.cache_protected_len : req.kv_allocated_len])
        super().cache_finished_req(req, is_insert=is_insert)

    # ---- for the engine, which expects a tree of two pools ----

    def supports_swa(self) -> bool:
        """Has the engine free slots behind running requests' windows."""
        return True

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    def sanity_check(self) -> None:
        """A no-op: the engine calls it in every idle turn, after its own checks of both pools."""

    def available_and_evictable_str(self) -> str:
        full, windows = self.pool.available_size(), self.windows.available_size()
        return f"Available tokens: {full} and {self.evictable_size()} evictable, of windows {windows}\n"

    def audit(self, holders: Iterable[TreeNode], held: Sequence[torch.Tensor] = ()) -> list[str]:
        """Adds `WindowSlots.audit`."""
        return super().audit(holders) + self.windows.audit(held)
