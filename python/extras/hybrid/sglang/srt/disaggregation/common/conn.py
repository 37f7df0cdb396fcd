"""States and windows on the wire: they are refused where they would be written to the wrong place.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.delta_sender import names_prefix
from sglang.srt.disaggregation.common.state_sizes import unlike_states

__all__ = ["CommonKVManager", "CommonKVSender"]


class CommonKVManager(engine.CommonKVManager):
    """Knows which states fit."""

    def unfit(self, name: str) -> str | None:
        """Those of the same size do."""
        return unlike_states(self, name)

    def not_cut(self) -> str | None:
        """Adds states.

        NIXL has no message for a part of one. Mooncake cuts them in one dimension, which is wrong: a rank's convolution
        has its queries, keys and values, or Mamba2's x, B and C, one after the other, each cut by TP.
        """
        return "states" if self.has_state else super().not_cut()


class CommonKVSender(engine.CommonKVSender):
    """Sends no windows from pipeline stages."""

    def accept_decode_prefix(self) -> bool:
        """The engine numbers the layers of both pools from 0 on each stage, and writes them over each other."""
        manager = self.kv_mgr
        accepted = super().accept_decode_prefix()
        if accepted and manager.pp_size > 1 and manager.kv_args.state_type == "swa":
            if names_prefix(self.state.asked.values()):
                reason = "pipeline stages with sliding windows are not supported; start prefill without"
                self.fail(f"refused decode's request for KV: {reason}")
                return False
        return accepted
