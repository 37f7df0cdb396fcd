"""Tokens of a request's prompt that came from host memory, and memory that saves to it hold.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req", "ScheduleBatch"]


class Req(engine.Req):
    """A request with the number of prompt tokens that were loaded from host memory."""

    # Prompt tokens that the tree held at admission; the load from host memory starts there.
    load_start: int = 0
    # Loaded tokens that a storage fetched for this request.
    from_storage: int = 0

    @property
    def from_host(self) -> int:
        """Tokens loaded from host memory."""
        return self.host_prefix_len and self.host_prefix_len - self.load_start


class ScheduleBatch(engine.ScheduleBatch):
    """A batch that can have the memory that saves hold."""

    def check_decode_mem(self, selected_indices: list[int] | None = None) -> bool:
        """If memory is short, waits for saves of the decode tree and unlocks their nodes."""
        enough = super().check_decode_mem(selected_indices)
        tier: Any = getattr(self.tree_cache, "tier", None)
        # Another tier than host memory has none.
        if not enough and hasattr(tier, "release_device") and tier.release_device():
            enough = super().check_decode_mem(selected_indices)
        return enough
