"""The request of /generate: what is looked at before the engine makes anything of it.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]

# The engine makes as many of everything at once, and has no memory for a billion.
MOST_SAMPLES = 2**16


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """A request that may have been made of anything."""

    # Without annotation: this is not a field, of which the client sets any. Whether nobody has looked at its types.
    untyped = False

    def normalize_batch_and_arguments(self) -> None:
        """Refuses fields of another type, and samples by the million."""
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
