"""State slots of linear attention or Mamba layers: one per request on decode.

States come from prefill with every request, whatever its prefix: the tree keeps none.

Upstream: sgl-project/sglang#32732 (open) and #40263 (merged), which keep a tree for such models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.hybrid_support import LINEAR, STATES
from sglang.srt.mem_cache.state_kind import StateKind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["StateSlots"]


class StateSlots(StateKind):
    """A request gets its state slot with its req_to_token slot, see ``disaggregation/decode.py``."""

    support, word = LINEAR, "states"
    layers = "linear attention (GDN of Qwen3-Next, KDA of Kimi-Linear), Mamba2 (of Falcon-H1, Nemotron-H)"

    @classmethod
    def is_of(cls, runner: Any) -> bool:
        # Not the config's architecture: a draft that is part of the model (MTP) writes its own there.
        return runner.mambaish_config is not None and type(runner.model).__name__ in STATES

    @classmethod
    def beside(cls, tree: DecodeRadixCache) -> StateSlots:
        return cls(tree.req_to_token_pool)

    def __init__(self, rows: Any):
        """rows: the req_to_token pool."""
        self.rows = rows

    def targets(self, req: Req, table: torch.Tensor) -> torch.Tensor:
        return req.mamba_pool_idx.reshape(1)

    def indices(self, targets: np.ndarray) -> list[int]:
        return targets.tolist()

    def faults(self) -> list[str]:
        size, free = self.rows.mamba_pool.size, sorted(self.rows.mamba_pool.free_slots.tolist())
        if free == list(range(1, size + 1)):
            return []
        different = len({*range(1, size + 1)}.intersection(free))
        return [f"{different} different state slots are free, {len(free)} in all, and there are {size}"]
