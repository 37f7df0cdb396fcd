"""What of a request's prompt has come from host memory.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req"]


class Req(engine.Req):
    """A request that knows how much of its prompt was copied from host memory."""

    # Of the tokens that host memory had when it was admitted, how many the tree had.
    load_start: int = 0
    # Of those that came from host memory, how many a storage had brought there for this request.
    from_storage: int = 0

    @property
    def from_host(self) -> int:
        """Tokens that came from host memory."""
        return self.host_prefix_len and self.host_prefix_len - self.load_start
