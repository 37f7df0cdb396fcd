"""Index pages on the wire: prefill sends those of the delta.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.prefill_peers import listen_for

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver"]

# A prefill says so that it sends the index pages of the delta; an earlier release sends all.
INDEX_PAGES = "index_pages"
listen_for(INDEX_PAGES)


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


class CommonKVReceiver(engine.CommonKVReceiver):
    """Asks a prefill that sends all index pages for the whole prompt."""

    @property
    def peer_takes_prefix(self) -> bool:
        """Adds that the prefill sends the delta's index pages."""
        takes = super().peer_takes_prefix
        return takes and (
            not self.kv_mgr.has_index_pages or INDEX_PAGES in self.kv_mgr.prefills.of(self.bootstrap_addr).others
        )


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Tells decode of index pages."""

    def _said_by_ranks(self) -> dict[str, Any]:
        """Adds `INDEX_PAGES`."""
        return super()._said_by_ranks() | {INDEX_PAGES: 1}
