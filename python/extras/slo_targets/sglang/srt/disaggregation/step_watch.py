"""Which time is a step's, for what learns from the events `note_step` and `idle` of `DecodeHooks`.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["StepWatch", "has_prompts"]


class StepWatch:
    """Takes the time of each step: that since the step before ended."""

    def __init__(self) -> None:
        # When the last step ended, if the loop has not been idle since.
        self._ended: float | None = None

    def idle(self) -> None:
        """The loop has nothing to do: the next step's time is not what passes until its end."""
        self._ended = None

    def lap(self, now: float | None = None) -> float | None:
        """A step has ended, ``now`` by the monotonic clock. Returns its seconds; None after an idle loop."""
        now = time.monotonic() if now is None else now
        began, self._ended = self._ended, now
        return None if began is None else now - began


def has_prompts(batch: Any) -> bool:
    """Whether a step computes prompts, on this or another of the DP ranks that step together."""
    return bool(getattr(batch, "is_extend_in_batch", False))
