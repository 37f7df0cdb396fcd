"""Addresses of decode's layers that a pipeline stage of prefill writes.

Upstream: sgl-project/sglang#28229 (open).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pointers_of_stage"]

Pointers = Sequence[int]


def pointers_of_stage(
    source: Pointers, target: Pointers, first_layer: int
) -> tuple[Pointers, Pointers, Pointers, Pointers, int]:
    """K and V addresses of the stage's layers, source and target, and their number.

    source: buffer addresses of this stage, K of all its layers, then V. target: those of a decode worker with all
    layers. first_layer: of the stage.
    """
    total, here = len(target) // 2, len(source) // 2
    k, v = (target[start + first_layer : start + first_layer + here] for start in (0, total))
    return source[:here], source[here:], k, v, here
