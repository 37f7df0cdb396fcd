"""The request of /generate: each prompt of a batch has its own part of every option.

Upstream: none is known. Samples: sgl-project/sglang#9224, #24223, #26486, #30723 and #40297, all closed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]

# The engine makes as many of everything at once, and has no memory for a billion.
MOST_SAMPLES = 2**16


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """A request whose ``extra_key`` may be a list, as its type says, and whose samples may have rooms of their own."""

    # Without annotations: these are not fields, of which the client sets any.
    # Samples of each prompt, when each has become a prompt of its own (`give_rooms`); else 0.
    samples = 0
    # Then the rooms of the prompts.
    request_rooms = ()

    def normalize_batch_and_arguments(self) -> None:
        """Refuses samples by the million, and gives a name to a request whose name is empty.

        By that, its client would abort all requests when it leaves: a worker aborts those whose name begins with it.
        """
        if self.samples:
            # It has been, with n as it came.
            return
        params = self.sampling_params
        first = params[0] if isinstance(params, list) and params else params
        n = first.get("n") if isinstance(first, dict) else None
        if isinstance(n, int) and n > MOST_SAMPLES:
            raise ValueError(f"n must be at most {MOST_SAMPLES}, got {n!r:.80}.")
        many = isinstance(self.rid, list)
        named = [uuid.uuid4().hex if rid == "" else rid for rid in (self.rid if many else [self.rid])]
        self.rid = named if many else named[0]
        super().normalize_batch_and_arguments()

    def __getitem__(self, i: int) -> GenerateReqInput:
        """Adds the prompt's own key; the engine gives all of them to each, and so does this where they do not fit."""
        item = super().__getitem__(i)
        # On prefill, of a request with samples that is served as the engine does: whether decode gives them rooms.
        announcement = getattr(self, "announcement", None)
        if announcement is not None:
            item.announcement = announcement
        if isinstance(self.extra_key, list) and len(self.extra_key) == self.batch_size:
            # As the other lists with n samples of each prompt: all prompts, n times.
            item.extra_key = self.extra_key[i % self.batch_size]
        return item
