"""The request of /generate: each prompt of a batch has its own key, and each request a name.

Upstream: none is known.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """A request whose ``extra_key`` may be a list, as its type says."""

    def normalize_batch_and_arguments(self) -> None:
        """Gives a name to a request whose name is empty.

        By that, its client would abort all requests when it leaves: a worker aborts those whose name begins with it.
        """
        many = isinstance(self.rid, list)
        named = [uuid.uuid4().hex if rid == "" else rid for rid in (self.rid if many else [self.rid])]
        self.rid = named if many else named[0]
        super().normalize_batch_and_arguments()

    def __getitem__(self, i: int) -> GenerateReqInput:
        """Adds the prompt's own key; the engine gives all of them to each, and so does this where they do not fit."""
        item = super().__getitem__(i)
        if isinstance(self.extra_key, list) and len(self.extra_key) == self.batch_size:
            # As the other lists with n samples of each prompt: all prompts, n times.
            item.extra_key = self.extra_key[i % self.batch_size]
        return item
