"""Index pages on the wire: prefill sends those of the delta.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.common import conn as engine

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver"]

# Capability of a prefill that sends the delta's index pages; earlier releases send all.
INDEX_PAGES = "index_pages"


class CommonKVManager(engine.CommonKVManager):
    """Sends index pages to decode workers with a radix cache."""

    @property
    def has_index_pages(self) -> bool:
        """Whether the model has index keys."""
        return self.kv_args.state_type == "nsa"

    def unfit(self, name: str) -> str | None:
        """Layouts are equal on all workers; pipeline stages are not verified."""
        if not self.has_index_pages:
            return super().unfit(name)
        return "pipeline stages with index pages are not verified; start prefill without" if self.pp_size > 1 else None

    def index_pages_of_delta(self, pages: Sequence[int], num_delta: int) -> Any:
        """The delta's part of the prompt's index ``pages``. Raises ValueError if there are too few."""
        if not self.has_index_pages:
            return pages
        if num_delta > len(pages):
            raise ValueError(f"decode asks for {num_delta} index pages of a prompt of {len(pages)}")
        return pages[len(pages) - num_delta :]


class CommonKVReceiver(engine.CommonKVReceiver):
    """Asks for the whole prompt if prefill sends all index pages."""

    @property
    def peer_takes_prefix(self) -> bool:
        """Adds that prefill sends the delta's index pages."""
        takes = super().peer_takes_prefix
        return takes and (
            not self.kv_mgr.has_index_pages or INDEX_PAGES in self.kv_mgr.prefills.of(self.bootstrap_addr).others
        )


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Announces index pages."""

    def _said_by_ranks(self) -> dict[str, Any]:
        """Adds `INDEX_PAGES`."""
        return super()._said_by_ranks() | {INDEX_PAGES: 1}
