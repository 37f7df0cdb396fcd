"""How much of a decode worker's KV pool is kept free.

Upstream: none is known.
"""

from __future__ import annotations

import os

__all__ = ["WATERMARK_LEAVES", "WATERMARK_SLACK", "watermark_part"]

WATERMARK = "SGLANG_DISAGGREGATION_DECODE_FREE_WATERMARK"
DEFAULT_WATERMARK = 1 / 16
# Leaves that one step evicts to reach it: it must not be felt.
WATERMARK_LEAVES = 16
# The part of it that may be missing before anything is evicted.
WATERMARK_SLACK = 1 / 8


def watermark_part() -> float:
    """The part of the pool to keep free, from the environment, or the default. Raises ValueError."""
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
