"""Requests of /generate: an ``extra_key`` per prompt, and a rid for each request.

Upstream: none is known.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sglang.srt.managers import io_struct as engine

__all__ = ["GenerateReqInput"]


@dataclass
class GenerateReqInput(engine.GenerateReqInput):
    """A request whose ``extra_key`` may be a list, as declared."""

    def normalize_batch_and_arguments(self) -> None:
        """Replaces an empty rid.

        A client that disconnects would abort all requests: an abort covers all rids that begin with its own.
        """
        many = isinstance(self.rid, list)
        named = [uuid.uuid4().hex if rid == "" else rid for rid in (self.rid if many else [self.rid])]
        self.rid = named if many else named[0]
        super().normalize_batch_and_arguments()

    def __getitem__(self, i: int) -> GenerateReqInput:
        """Adds the prompt's own key; the engine passes the whole list, and so does this if the lengths differ."""
        item = super().__getitem__(i)
        if isinstance(self.extra_key, list) and len(self.extra_key) == self.batch_size:
            # Ordered as other lists with n samples per prompt: all prompts, n times.
            item.extra_key = self.extra_key[i % self.batch_size]
        return item
