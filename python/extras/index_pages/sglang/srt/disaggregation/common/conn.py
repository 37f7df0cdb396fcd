"""Index pages on the wire: prefill sends those of the delta.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.common import conn as engine

__all__ = ["CommonKVManager"]


class CommonKVManager(engine.CommonKVManager):
    """Sends index pages to decode workers with a radix cache."""

    @property
    def has_index_pages(self) -> bool:
        """Whether the model has index keys."""
        return self.kv_args.state_type == "nsa"

    def unfit(self, name: str) -> str | None:
        """Their layout is the same on all workers; pipeline stages are not verified."""
        if not self.has_index_pages:
            return super().unfit(name)
        return "pipeline stages with index pages are not verified; start prefill without" if self.pp_size > 1 else None

    def index_pages_of_delta(self, pages: Sequence[int], num_delta: int) -> Any:
        """The index pages to send, of all ``pages`` of the prompt. Raises ValueError if they are fewer."""
        if not self.has_index_pages:
            return pages
        if num_delta > len(pages):
            raise ValueError(f"decode asks for {num_delta} index pages of a prompt of {len(pages)}")
        return pages[len(pages) - num_delta :]
