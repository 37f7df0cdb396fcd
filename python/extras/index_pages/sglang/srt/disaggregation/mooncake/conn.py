"""Index pages over Mooncake.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.mooncake import conn as engine

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo

__all__ = ["MooncakeKVManager"]


class MooncakeKVManager(engine.MooncakeKVManager):
    """Sends the index pages of the delta."""

    def maybe_send_extra(self, req: TransferInfo, prefill_state_indices: list[int], *args, **kwargs):
        """Leaves out decode's prefix; none without the flag."""
        ours = prefill_state_indices
        if req.names_prefix:
            ours = self.index_pages_of_delta(ours, len(req.dst_state_indices))
        return super().maybe_send_extra(req, ours, *args, **kwargs)
