"""A logit processor that cannot be made for a batch costs only its own requests the answer.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling import sampling_batch_info as engine

__all__ = ["CustomLogitProcessor"]


class CustomLogitProcessor(engine.CustomLogitProcessor):
    """As batches make logit processors, which the engine does anew for each: an error there ends the scheduler."""

    @classmethod
    def from_str(cls, json_str: str) -> Any:
        """Wraps the engine's: what cannot be made is stood in for, and fails its requests when they are sampled.

        On all TP ranks then, as any processor that raises, and on the pipeline stage that samples.
        """
        try:
            return engine.CustomLogitProcessor.from_str(json_str)
        except Exception as e:
            return Unmade(e)


class Unmade:
    """Stands in for a logit processor that could not be made."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, logits: Any, params: Any) -> Any:
        """Raises RuntimeError with why there is none."""
        raise RuntimeError(f"it could not be made: {type(self._error).__name__}: {self._error}") from self._error
