"""The part of decode's KV pool that is kept free.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

__all__ = ["WATERMARK", "WATERMARK_LEAVES", "WATERMARK_SLACK", "kept_free", "of_first", "watermark_part"]

WATERMARK = "SGLANG_DISAGGREGATION_DECODE_FREE_WATERMARK"
DEFAULT_WATERMARK = 1 / 16
# Leaves evicted per step: the step must not become noticeably longer.
WATERMARK_LEAVES = 16
# Eviction starts when this part of the watermark is missing.
WATERMARK_SLACK = 1 / 8


def watermark_part() -> float:
    """The part of the pool to keep free, from the environment. Raises ValueError."""
    text = os.environ.get(WATERMARK, "").strip()
    if not text:
        return DEFAULT_WATERMARK
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 0.5:
        raise ValueError(f"{WATERMARK} is {text!r}: give the part of the KV pool to keep free, from 0 (none) to 0.5.")
    return part


def of_first(group: dist.ProcessGroup, figure: int) -> int:
    """Rank 0's ``figure``, at least 0, on all ranks."""
    told = torch.tensor([-figure if dist.get_rank(group) == 0 else 0], dtype=torch.int64)
    dist.all_reduce(told, op=dist.ReduceOp.MIN, group=group)
    return -int(told)


def kept_free(group: dist.ProcessGroup, figure: int) -> int:
    """Rank 0's tokens to keep free: nodes may have different environments. Called at the start.

    Logs a differing figure of this rank.
    """
    counts = figure if dist.get_world_size(group) == 1 else of_first(group, figure)
    if counts != figure:
        logger.warning(
            "%s is not the same on all nodes of this worker: it makes %d on this TP rank, and %d on the first, "
            "which counts.",
            WATERMARK,
            figure,
            counts,
        )
    return counts
