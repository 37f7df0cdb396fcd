"""The decode tree of a model with sliding windows: it holds KV of the layers with full attention.

The engine's tree for such models keeps windows as well, and frees those of long prefixes while the rest of the KV
stays. Its table from slots of one pool to slots of the other has one entry for each slot, so two requests cannot each
have a window in slots that they share. Here nothing that is shared has a window: see `decode_windows`.

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
    """The window pool of a worker, and which of its slots belongs to which slot of the other pool.

    A request has slots here from where its window begins. No slot that is free, or in the tree, has one.
    """

    support, layers, word, has_pool = WINDOWS, "sliding windows", "windows", True
    # Frees what no step attends to again. The queue of a worker, which is made later, knows its batch.
    free_behind: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def is_of(cls, runner: Any) -> bool:
        return runner.is_hybrid_swa

    @classmethod
    def take_over(cls, engines: RadixCache, scheduler: Any) -> DecodeRadixCache:
        return WindowRadixCache.take_over(engines, sliding_window_size=scheduler.sliding_window_size)

    def __init__(self, allocator: SWATokenToKVPoolAllocator, rule: Windows):
        """Raises ValueError where the pool is too small for a single request."""
        self.allocator = allocator
        self.rule = rule
        self.pool = allocator.swa_attn_allocator
        self.alloc = self.pool.alloc
        # By which requests save theirs when they are retracted.
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

    # ---- of one request ----

    def available(self, running: Iterable[Req] = ()) -> int:
        """Adds what lies behind the windows of ``running`` requests; the engine frees that from time to time."""
        return self.available_size() + sum(self.behind(req) for req in running)

    def need(self, req: Req, num_tokens: int, reserved: int) -> Need:
        """Up to the token after its last one: nobody reads that one, but an overlapped step has its slot before the
        result that ends the answer is known."""
        at_length = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        return self.rule.need(num_tokens, max(0, at_length - num_tokens), reserved)

    def kept(self, live: LiveReqs, reserved: int) -> WindowsKept:
        running = [self.need(req, req.kv_allocated_len, reserved) for req in live.running]
        # One can be on its way in two lists at once.
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
        """Give the end of ``delta`` slots of this pool. The prefix ends where the window begins, or before."""
        if plan.beside.now > self.available_size():
            self.free_behind()
        start = self.rule.start(num_tokens)
        self.give(delta[start - plan.found.length :], num_tokens - start)
        req.swa_evicted_seqlen = start

    def targets(self, req: Req, table: torch.Tensor) -> torch.Tensor:
        """The first slots of its window's pages."""
        return self.of(table[req.swa_evicted_seqlen :: self.rule.page_size])

    def indices(self, targets: np.ndarray) -> list[int]:
        return (targets // self.rule.page_size).tolist()

    # ---- of slots ----

    def give(self, slots: torch.Tensor, num_tokens: int) -> None:
        """Give the first ``num_tokens`` of ``slots`` (whole pages of the other pool, int64) slots of this one.

        What is left of the last page gets its entries when decode steps use it.
        """
        own = self.alloc(len(slots))
        if own is None:
            raise RuntimeError("admitted beyond what the window pool has")
        self.allocator.full_to_swa_index_mapping[slots[:num_tokens]] = own[:num_tokens]

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots here, int64, of slots of the other pool; 0 where there is none."""
        return self.allocator.full_to_swa_index_mapping[slots]

    def drop(self, slots: torch.Tensor) -> None:
        """Free what slots of the other pool have here, if they have any."""
        if len(slots) > 0:
            self.allocator.free_swa(slots)

    def save(self, table: torch.Tensor) -> tuple[list, list]:
        """KV and window of a request, whose slots of the other pool are ``table``, in host memory."""
        kv, window = self.allocator.get_kvcache(), self.of(table[self.rule.start(len(table)) :])
        return kv.full_kv_pool.get_cpu_copy(table), kv.swa_kv_pool.get_cpu_copy(window)

    def load(self, window: list, table: torch.Tensor) -> None:
        """Write a window that was saved to the slots that it has now."""
        self.allocator.get_kvcache().swa_kv_pool.load_cpu_copy(window, self.of(table[self.rule.start(len(table)) :]))

    def behind(self, req: Req) -> int:
        """Tokens that a running request holds and will not attend to again, whole pages."""
        return max(0, self.rule.start(req.seqlen - 1) - max(req.swa_evicted_seqlen, req.cache_protected_len))

    def audit(self, held: Sequence[torch.Tensor]) -> list[str]:
        """Every way in which pool and table contradict that requests have windows for the slots ``held``, and no other.

        held: for each request its slots of the other pool from where its window begins, int64.
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
    """Decode tree over the full-attention pool of a model with sliding windows."""

    token_to_kv_pool_allocator: SWATokenToKVPoolAllocator

    def __init__(self, params: CacheInitParams):
        """Raises ValueError where the window pool is too small for a single request."""
        assert params.sliding_window_size is not None
        # The engine's name for it.
        self.sliding_window_size = params.sliding_window_size
        allocator: Any = params.token_to_kv_pool_allocator
        self.state = self.windows = WindowSlots(allocator, Windows(params.sliding_window_size, params.page_size))
        super().__init__(params)

    @property
    def pool(self) -> Any:
        """Replaces the base's: slots of the tree are slots of one of the two pools."""
        return self.token_to_kv_pool_allocator.full_attn_allocator

    @property
    def pool_size(self) -> int:
        return self.token_to_kv_pool_allocator.size_full

    def shareable(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """Replaces the base's: the window of a request is nobody else's."""
        return token_ids[: self.windows.rule.start(len(token_ids))]

    def _committed_end(self, req: Req) -> int:
        """Replaces the base's: while a request runs, its window stays its own."""
        return min(req.kv_committed_len, req.swa_evicted_seqlen)

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Drops the window first: what then enters the tree, or becomes free, has none."""
        table = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        self.windows.drop(table[req.cache_protected_len : req.kv_allocated_len])
        super().cache_finished_req(req, is_insert=is_insert)

    # ---- what the engine asks of a tree for two pools ----

    def supports_swa(self) -> bool:
        """So the engine frees what is behind the windows of running requests."""
        return True

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    def sanity_check(self) -> None:
        """Asked in every idle turn, after the engine's own sums of both pools; `audit` is asked from outside."""

    def available_and_evictable_str(self) -> str:
        full, windows = self.pool.available_size(), self.windows.available_size()
        return f"Available tokens: {full} and {self.evictable_size()} evictable, of windows {windows}\n"

    def audit(self, holders: Iterable[TreeNode], held: Sequence[torch.Tensor] = ()) -> list[str]:
        """Adds how the window pool contradicts that live requests hold the windows of ``held``, see `WindowSlots`."""
        return super().audit(holders) + self.windows.audit(held)
