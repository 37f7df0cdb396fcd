"""The request of /generate with samples in rooms of their own.

Upstream: none is known: sgl-project/sglang#9224, #24223, #26486, #30723 and #40297, all closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """Adds the samples of a prompt."""

    # Without annotations, so that they are no fields that a client could set. samples: per prompt, once each has become
    # a prompt (`give_rooms`); otherwise 0.
    samples = 0
    # The prompts' rooms then.
    request_rooms = ()

    def normalize_batch_and_arguments(self) -> None:
        """Does nothing once samples have rooms: it is normalised then."""
        if not self.samples:
            super().normalize_batch_and_arguments()

    def __getitem__(self, i: int) -> GenerateReqInput:
        """Keeps prefill's announcement."""
        item = super().__getitem__(i)
        # On prefill: of a request with samples that is served the engine's way.
        announcement = getattr(self, "announcement", None)
        if announcement is not None:
            item.announcement = announcement
        return item
