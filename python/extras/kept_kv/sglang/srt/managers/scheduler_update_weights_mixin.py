"""Weight updates: KV kept outside of the worker belongs to the old weights afterwards.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler_update_weights_mixin as engine

__all__ = ["SchedulerUpdateWeightsMixin"]


class SchedulerUpdateWeightsMixin(engine.SchedulerUpdateWeightsMixin):
    """Announces weight changes to tiers and extras."""

    def update_weights_from_disk(self, recv_req):
        """Stops the tier first."""
        return self._update(super().update_weights_from_disk, recv_req)

    def update_weights_from_distributed(self, recv_req):
        """Stops the tier first."""
        return self._update(super().update_weights_from_distributed, recv_req)

    def update_weights_from_tensor(self, recv_req):
        """Stops the tier first."""
        return self._update(super().update_weights_from_tensor, recv_req)

    def update_weights_from_ipc(self, recv_req):
        """Stops the tier first."""
        return self._update(super().update_weights_from_ipc, recv_req)

    def release_memory_occupation(self, recv_req):
        """Waits for copies: the engine frees the memory before it flushes."""
        tier = getattr(self.tree_cache, "tier", None)
        if tier is not None and self.disaggregation_mode != DisaggregationMode.NULL:
            tier.wait()
        if not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags:
            return self._change(super().release_memory_occupation, recv_req)
        return super().release_memory_occupation(recv_req)

    def check_weights(self, recv_req):
        """``reset_tensors`` overwrites the weights at once, without waiting for requests."""
        if recv_req.action == "reset_tensors":
            self.before_weight_update()
            self.weights_changing()
        return super().check_weights(recv_req)

    def before_weight_update(self) -> None:
        """The weights are about to change: the tier's KV becomes invalid."""
        tier = getattr(self.tree_cache, "tier", None)
        if tier is not None:
            tier.stop()

    def weights_changing(self) -> None:
        """The weights are about to change or be released; the result does not matter. For extras."""

    def _update(self, update: Callable[[Any], Any], recv_req):
        self.before_weight_update()
        return self._change(update, recv_req)

    def _change(self, update: Callable[[Any], Any], recv_req):
        """Releasing memory counts as a change: other weights may be loaded later."""
        self.weights_changing()
        return update(recv_req)
