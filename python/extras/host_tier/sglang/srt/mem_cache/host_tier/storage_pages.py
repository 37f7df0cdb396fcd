"""Bytes of pages in host memory as they are stored: the model's pool, then its draft's.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool_host import MLATokenToKVPoolHost

__all__ = ["HostPages"]


class HostPages:
    """Pages of one rank's host pools, and how often each was freed.

    Pages are not kept in host memory for a storage: a thread reads without a lock, then checks the count.
    """

    def __init__(self, pools: Sequence[Any], page_size: int):
        """pools: the engine's, with equal numbers of slots."""
        self._pools, self.page_size = pools, page_size
        self._sizes = [self._bytes(pool.get_data_page(0)).numel() for pool in pools]
        self.page_bytes = sum(self._sizes)
        self.given_away = np.zeros(min(pool.size for pool in pools) // page_size + 1, dtype=np.int64)

    @staticmethod
    def _bytes(page: torch.Tensor) -> torch.Tensor:
        return page.contiguous().view(torch.uint8).flatten()

    @property
    def shared(self) -> bool:
        """Whether the pages are equal on all TP ranks (MLA)."""
        return all(isinstance(pool, MLATokenToKVPoolHost) for pool in self._pools)

    def made_of(self) -> list[object]:
        """Format of a page: for each pool its class, layout, dtype and shape."""
        return [
            (type(pool).__name__, pool.layout, str(pool.dtype), tuple(pool.get_data_page(0, flat=False).shape))
            for pool in self._pools
        ]

    def buffer(self) -> torch.Tensor:
        """A buffer for one page, uint8."""
        return torch.empty(self.page_bytes, dtype=torch.uint8)

    def numbers(self, slots: torch.Tensor) -> np.ndarray:
        """Page numbers of ``slots`` (int64 on the CPU, whole pages)."""
        return slots[:: self.page_size].numpy() // self.page_size

    def note_given_away(self, slots: torch.Tensor) -> None:
        """Count ``slots`` as freed."""
        self.given_away[self.numbers(slots)] += 1

    def read(self, page: int, buffer: torch.Tensor) -> None:
        """Copy a page into ``buffer``."""
        start = 0
        for pool, size in zip(self._pools, self._sizes, strict=True):
            buffer[start : start + size] = self._bytes(pool.get_data_page(page * self.page_size))
            start += size

    def write(self, page: int, buffer: torch.Tensor) -> None:
        """Copy ``buffer`` into a page."""
        start = 0
        for pool, size in zip(self._pools, self._sizes, strict=True):
            pool.set_from_flat_data_page(page * self.page_size, buffer[start : start + size].view(pool.dtype))
            start += size
