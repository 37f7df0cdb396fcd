"""Index keys of DeepSeek's sparse attention (the engine's NSA): one index page per KV page.

Both have the same number, so tree, admission, quarantine and flushes need no code for index pages.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged) sends all index pages of a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.index_support import INDEXED, LAYERS
from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool
from sglang.srt.mem_cache.state_kind import StateKind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["IndexPages"]


class IndexPages(StateKind):
    """Prefill writes the delta's index pages; those of the prefix are shared."""

    support, layers = INDEXED, LAYERS

    @classmethod
    def is_of(cls, runner: Any) -> bool:
        return isinstance(runner.token_to_kv_pool, NSATokenToKVPool)

    @classmethod
    def beside(cls, tree: DecodeRadixCache) -> IndexPages:
        return cls(tree.page_size)

    def __init__(self, page_size: int):
        self._page_size = page_size

    def targets(self, req: Req, table: torch.Tensor) -> torch.Tensor:
        return table[req.held_len :: self._page_size]

    def indices(self, targets: np.ndarray) -> list[int] | None:
        # The engine's receivers would wait for an empty list to be written.
        return (targets // self._page_size).tolist() or None
