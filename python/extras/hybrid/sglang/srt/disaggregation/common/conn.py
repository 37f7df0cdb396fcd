"""Mamba and SWA state on the wire: refused where the engine would write it to the wrong place.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.delta_sender import names_prefix
from sglang.srt.disaggregation.common.state_sizes import unlike_states

__all__ = ["CommonKVManager", "CommonKVSender"]


class CommonKVManager(engine.CommonKVManager):
    """Checks that states fit."""

    @property
    def has_own_state(self) -> bool:
        """Whether the model has Mamba or SWA state."""
        return self.kv_args.state_type in ("mamba", "swa")

    def unfit(self, name: str) -> str | None:
        """Compares state sizes."""
        return unlike_states(self, name) if self.has_own_state else super().unfit(name)

    def not_cut(self) -> str | None:
        """Adds states.

        NIXL has no message for a part of one. Mooncake cuts them in one dimension, which is wrong: a rank's convolution
        has queries, keys and values (Mamba2: x, B and C) one after the other, each cut by TP.
        """
        return "states" if self.has_own_state else super().not_cut()


class CommonKVSender(engine.CommonKVSender):
    """Refuses windows from pipeline stages."""

    def accept_decode_prefix(self) -> bool:
        """Each stage numbers the layers of both pools from 0 in the engine, so they would overwrite each other."""
        manager = self.kv_mgr
        accepted = super().accept_decode_prefix()
        if accepted and manager.pp_size > 1 and manager.kv_args.state_type == "swa":
            if names_prefix(self.state.asked.values()):
                reason = "pipeline stages with sliding windows are not supported; start prefill without"
                self.fail(f"refused decode's request for KV: {reason}")
                return False
        return accepted
