"""Which time is a step's, and what DP ranks that step together learn of each other with it.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["OtherRanks", "StepWatch", "has_prompts"]


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


class OtherRanks:
    """The DP ranks that step together with this one, by what the engine tells all of each step.

    decoding: requests of the rank that decodes the most of them, this one included, as far as is known; 0 where ranks
    do not step together, and where the engine tells none of the others (DeepEP with --moe-dense-tp-size 1).
    """

    def __init__(self) -> None:
        self.decoding = 0
        # Whether there are any.
        self.together = False

    def idle(self) -> None:
        """The loop has nothing to do, on any of them."""
        self.decoding = 0

    def note_step(self, batch: Any, result: Any = None) -> None:
        """The result of ``batch`` has been processed. A rank that computes prompts counts these, and not requests."""
        everywhere = batch.global_num_tokens or ()
        self.together = len(everywhere) > 1
        if everywhere and not has_prompts(batch):
            self.decoding = max(everywhere)
