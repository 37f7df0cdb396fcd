"""Page allocators of a decode worker with a radix cache: keep long runs of free pages for transfers.

Upstream: none is known; sgl-project/sglang#35036 (open) sends fragmented KV by way of staging buffers.
"""

from __future__ import annotations

from functools import cached_property

import torch
from sglang.srt.mem_cache import allocator as engine

__all__ = ["PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator", "by_run_length"]


def by_run_length(pages: torch.Tensor) -> torch.Tensor:
    """Order ``pages`` (distinct page numbers) by the length of their contiguous run; each run stays in order.

    Two sorts and a few passes on the pool's device, without a synchronization.
    """
    pages, _ = torch.sort(pages)
    begins = torch.ones_like(pages)
    begins[1:] = (pages[1:] - pages[:-1] != 1).to(pages.dtype)
    run = torch.cumsum(begins, 0) - 1
    length = torch.zeros_like(pages).scatter_add_(0, run, torch.ones_like(pages))
    return pages[torch.argsort(length[run], stable=True)]


class _Runs:
    """For both allocators: another order of the free list if ``long_runs_last`` is set, as the decode radix cache does.

    A transfer takes one descriptor per run of contiguous pages, layer and K or V. Pages of decode steps are never sent:
    they take short runs from the front of the free list, where the engine allocates from.
    """

    long_runs_last = False
    page_size: int
    device: str
    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def available_size(self) -> int:
        """As the engine's, without its two Python calls of ``len``: it runs several times a step."""
        return (self.free_pages.numel() + self.release_pages.numel()) * self.page_size

    def merge_and_sort_free(self) -> None:
        """With ``long_runs_last``, replaces the engine's order by page number with one by run length.

        Called when the free list is used up, as the engine's; and for a transfer once as many pages have been freed as
        are left in the list.
        """
        if not self.long_runs_last:
            super().merge_and_sort_free()  # type: ignore[misc]
        elif len(self.release_pages) > 0:
            self.free_pages = by_run_length(torch.cat((self.free_pages, self.release_pages)))
            self.release_pages = self.release_pages[:0]

    def alloc_long_runs(self, need_size: int) -> torch.Tensor | None:
        """Slots for a transfer, from the end of the free list; None if there are too few.

        need_size: tokens, whole pages. Returns int64 slots, ascending within each run.
        """
        num_pages = need_size // self.page_size
        # An exhausted list would yield its short runs too. Half of the sorted pages have just been freed, so each page
        # is sorted a few times at most.
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
        """Offsets of a page's slots."""
        return torch.arange(self.page_size, device=self.device)


class TokenToKVPoolAllocator(_Runs, engine.TokenToKVPoolAllocator):
    """Pages of one token."""


class PagedTokenToKVPoolAllocator(_Runs, engine.PagedTokenToKVPoolAllocator):
    """Larger pages."""
