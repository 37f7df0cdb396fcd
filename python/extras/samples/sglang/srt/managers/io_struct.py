"""The request of /generate, whose samples may have rooms of their own.

Upstream: none is known: sgl-project/sglang#9224, #24223, #26486, #30723 and #40297, all closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """A request whose samples may have rooms of their own."""

    # Without annotations: these are not fields, of which the client sets any.
    # Samples of each prompt, when each has become a prompt of its own (`give_rooms`); else 0.
    samples = 0
    # Then the rooms of the prompts.
    request_rooms = ()

    def normalize_batch_and_arguments(self) -> None:
        """With rooms for its samples it has been, with n as it came."""
        if not self.samples:
            super().normalize_batch_and_arguments()

    def __getitem__(self, i: int) -> GenerateReqInput:
        """Adds what prefill knows of the request's samples."""
        item = super().__getitem__(i)
        # On prefill, of a request with samples that is served as the engine does: whether decode gives them rooms.
        announcement = getattr(self, "announcement", None)
        if announcement is not None:
            item.announcement = announcement
        return item
