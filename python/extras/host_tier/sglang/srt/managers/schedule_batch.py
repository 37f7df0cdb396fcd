"""Tokens of a request's prompt that came from host memory.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req"]


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
