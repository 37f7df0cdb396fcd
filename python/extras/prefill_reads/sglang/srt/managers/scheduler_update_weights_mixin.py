"""Ends reads of and from this worker after a weight update.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.kv_weights import weights_of
from sglang.srt.managers import scheduler_update_weights_mixin as engine

__all__ = ["SchedulerUpdateWeightsMixin"]


class SchedulerUpdateWeightsMixin(engine.SchedulerUpdateWeightsMixin):
    """Notes weight updates."""

    def weights_changing(self) -> None:
        """The KV's weights are unknown from now on."""
        super().weights_changing()
        weights_of(self.kv_manager()).changing()
