"""A logit processor that cannot be made for a batch fails only its own requests.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling import sampling_batch_info as engine

__all__ = ["CustomLogitProcessor"]


class CustomLogitProcessor(engine.CustomLogitProcessor):
    """Makes logit processors; the engine does so again for each batch, and an error there ends the scheduler."""

    @classmethod
    def from_str(cls, json_str: str) -> Any:
        """Returns a placeholder on failure, which fails its requests when they are sampled.

        That happens on all TP ranks, as for any processor that raises, and on the pipeline stage that samples.
        """
        try:
            return engine.CustomLogitProcessor.from_str(json_str)
        except Exception as e:
            return Unmade(e)


class Unmade:
    """Placeholder for a logit processor that could not be made."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, logits: Any, params: Any) -> Any:
        """Raises RuntimeError with the reason."""
        raise RuntimeError(f"it could not be made: {type(self._error).__name__}: {self._error}") from self._error
