"""Pages that a PegaFlow server may still read or write though the tree they were for has been reset.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.pegaflow.calls import Load, Save

__all__ = ["FencedPages"]


class FencedPages:
    """Saves and loads that nobody waits for; their pages stay out of the pool until the server is done with them."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.pages: list[Save | Load] = []
        self.tokens = 0

    def add(self, pages: Iterable[Save | Load]) -> None:
        """Before the pool is cleared."""
        self.pages += pages
        self.tokens = sum(len(one.slots) for one in self.pages)

    def reserve(self) -> None:
        """Take their slots out of a pool that has been cleared."""
        if self.pages:
            self._allocator.reserve(torch.cat([one.slots for one in self.pages]))

    def give_back(self, one: Save | Load) -> None:
        """The server is done with it."""
        self.pages.remove(one)
        self.tokens -= len(one.slots)
        self._allocator.free(one.slots)
