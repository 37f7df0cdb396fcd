"""Measures step times from the events `note_step` and `idle` of `DecodeHooks`.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["StepWatch", "has_prompts"]


class StepWatch:
    """Times steps: each from the end of the one before."""

    def __init__(self) -> None:
        # End of the last step; None after an idle loop.
        self._ended: float | None = None

    def idle(self) -> None:
        """The loop is idle: the time until the next step ends is no step time."""
        self._ended = None

    def lap(self, now: float | None = None) -> float | None:
        """Seconds of the step that ended at ``now`` (monotonic); None after an idle loop."""
        now = time.monotonic() if now is None else now
        began, self._ended = self._ended, now
        return None if began is None else now - began


def has_prompts(batch: Any) -> bool:
    """Whether a step computes prompts on any of the DP ranks that step together."""
    return bool(getattr(batch, "is_extend_in_batch", False))
