"""Checks of a /generate request before the engine normalises it.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]

# The engine creates all samples at once; a billion exceed its memory.
MOST_SAMPLES = 2**16


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """A request whose fields may be unchecked."""

    # Whether its field types are unchecked. No annotation, so that it is not a field that clients can set.
    untyped = False

    def normalize_batch_and_arguments(self) -> None:
        """Refuses fields of a wrong type, and too many samples."""
        if self.untyped:
            from sglang.srt.managers.request_checks import check_types

            check_types(self)
            self.untyped = False
        params = self.sampling_params
        first = params[0] if isinstance(params, list) and params else params
        n = first.get("n") if isinstance(first, dict) else None
        if isinstance(n, int) and n > MOST_SAMPLES:
            raise ValueError(f"n must be at most {MOST_SAMPLES}, got {n!r:.80}.")
        super().normalize_batch_and_arguments()
