"""After an update of the weights nobody reads this worker's KV, nor does it read that of others.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.kv_weights import weights_of
from sglang.srt.managers import scheduler_update_weights_mixin as engine

__all__ = ["SchedulerUpdateWeightsMixin"]


class SchedulerUpdateWeightsMixin(engine.SchedulerUpdateWeightsMixin):
    """Notes that the weights change."""

    def weights_changing(self) -> None:
        """Nothing says which ones they are from then on."""
        super().weights_changing()
        weights_of(self.kv_manager()).changing()
