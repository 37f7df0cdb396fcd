"""Which of decode's layers a pipeline stage of prefill writes.

Upstream: sgl-project/sglang#28229 (open).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pointers_of_stage"]

Pointers = Sequence[int]


def pointers_of_stage(
    source: Pointers, target: Pointers, first_layer: int
) -> tuple[Pointers, Pointers, Pointers, Pointers, int]:
    """K and V of the stage's layers, here and there, and their number.

    source: addresses of this stage's buffers, K of all its layers and then V. target: the same of a decode worker that
    has all layers. first_layer: of the stage.
    """
    total, here = len(target) // 2, len(source) // 2
    k, v = (target[start + first_layer : start + first_layer + here] for start in (0, total))
    return source[:here], source[here:], k, v, here
