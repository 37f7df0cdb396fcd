"""Index pages over NIXL.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.nixl import conn as engine

__all__ = ["NixlKVManager"]


class NixlKVManager(engine.NixlKVManager):
    """Sends the index pages of the delta."""

    def maybe_send_extra(
        self,
        peer_name: str,
        prefill_state_indices: list[int],
        dst_state_data_ptrs: list[int],
        dst_state_indices: list[int],
        *args,
        **kwargs,
    ):
        """Leaves out decode's prefix."""
        ours = self.index_pages_of_delta(prefill_state_indices, len(dst_state_indices))
        return super().maybe_send_extra(peer_name, ours, dst_state_data_ptrs, dst_state_indices, *args, **kwargs)
