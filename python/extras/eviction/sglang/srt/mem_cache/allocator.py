"""Page allocators of a decode worker with a radix cache: long runs of free pages are kept for what prefill writes.

Upstream: none is known; sgl-project/sglang#35036 (open) sends fragmented KV by way of staging buffers.
"""

from __future__ import annotations

from functools import cached_property

import torch
from sglang.srt.mem_cache import allocator as engine

__all__ = ["PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator", "by_run_length"]


def by_run_length(pages: torch.Tensor) -> torch.Tensor:
    """``pages`` (distinct page numbers) so that those of short contiguous runs come first and each run is in order.

    Two sorts and a few passes on the pool's device, without waiting for it.
    """
    pages, _ = torch.sort(pages)
    begins = torch.ones_like(pages)
    begins[1:] = (pages[1:] - pages[:-1] != 1).to(pages.dtype)
    run = torch.cumsum(begins, 0) - 1
    length = torch.zeros_like(pages).scatter_add_(0, run, torch.ones_like(pages))
    return pages[torch.argsort(length[run], stable=True)]


class _Runs:
    """What both allocators get: with ``long_runs_last``, which only the decode radix cache sets, another order.

    A transfer takes one descriptor per run of contiguous pages, layer and K or V. What decode steps allocate is never
    sent, so they take the short runs at the front of the free list, where the engine takes pages from anyway.
    """

    long_runs_last = False
    page_size: int
    device: str
    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def available_size(self) -> int:
        """As the engine's, which takes ``len`` of the two tensors: a call into Python each, several times a step."""
        return (self.free_pages.numel() + self.release_pages.numel()) * self.page_size

    def merge_and_sort_free(self) -> None:
        """Replaces, where it is set, the engine's order by page number with one by length of run.

        Called as the engine calls its own, when the free list is used up and there are pages that were freed since; and
        for a transfer when these have become as many as are left in the list.
        """
        if not self.long_runs_last:
            super().merge_and_sort_free()  # type: ignore[misc]
        elif len(self.release_pages) > 0:
            self.free_pages = by_run_length(torch.cat((self.free_pages, self.release_pages)))
            self.release_pages = self.release_pages[:0]

    def alloc_long_runs(self, need_size: int) -> torch.Tensor | None:
        """Slots for what a remote worker will write, from the end of the free list; None if there are too few.

        need_size: tokens, whole pages. Returns int64 slots, in ascending order within each run.
        """
        num_pages = need_size // self.page_size
        # Used up to the end, the list would give its short runs too. Half of what is sorted has just been freed, so a
        # page is sorted a few times at most before it is used.
        free = self.free_pages.numel()
        if num_pages > free or self.release_pages.numel() >= max(free, 1):
            self.merge_and_sort_free()
        rest = self.free_pages.numel() - num_pages
        if rest < 0:
            return None
        pages, self.free_pages = self.free_pages[rest:], self.free_pages[:rest]
        if self.page_size == 1:
            return pages
        return torch.add(self._offsets, pages[:, None], alpha=self.page_size).reshape(-1)

    @cached_property
    def _offsets(self) -> torch.Tensor:
        """Slots of a page, from its first."""
        return torch.arange(self.page_size, device=self.device)


class TokenToKVPoolAllocator(_Runs, engine.TokenToKVPoolAllocator):
    """Allocator of pages of one token."""


class PagedTokenToKVPoolAllocator(_Runs, engine.PagedTokenToKVPoolAllocator):
    """Allocator of larger pages."""
