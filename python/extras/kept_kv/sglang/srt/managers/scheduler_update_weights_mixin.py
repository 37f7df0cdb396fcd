"""Weight updates of a worker: what is kept of its KV elsewhere, or read from there, is of other weights from then on.

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
    """Tells of weights that are about to change."""

    def update_weights_from_disk(self, recv_req):
        """The worker leaves its tier before."""
        return self._update(super().update_weights_from_disk, recv_req)

    def update_weights_from_distributed(self, recv_req):
        """The worker leaves its tier before."""
        return self._update(super().update_weights_from_distributed, recv_req)

    def update_weights_from_tensor(self, recv_req):
        """The worker leaves its tier before."""
        return self._update(super().update_weights_from_tensor, recv_req)

    def update_weights_from_ipc(self, recv_req):
        """The worker leaves its tier before."""
        return self._update(super().update_weights_from_ipc, recv_req)

    def release_memory_occupation(self, recv_req):
        """Waits for copies, since the engine takes the memory away first, and flushes then."""
        tier = getattr(self.tree_cache, "tier", None)
        if tier is not None and self.disaggregation_mode != DisaggregationMode.NULL:
            tier.wait()
        if not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags:
            return self._change(super().release_memory_occupation, recv_req)
        return super().release_memory_occupation(recv_req)

    def check_weights(self, recv_req):
        """One of its actions overwrites the weights, at once and whatever is under way."""
        if recv_req.action == "reset_tensors":
            self.before_weight_update()
            self.weights_changing()
        return super().check_weights(recv_req)

    def before_weight_update(self) -> None:
        """The weights are about to change: what a tier keeps is of others from then on."""
        tier = getattr(self.tree_cache, "tier", None)
        if tier is not None:
            tier.stop()

    def weights_changing(self) -> None:
        """The weights are about to change, or to be taken away, whatever comes of it. For extras."""

    def _update(self, update: Callable[[Any], Any], recv_req):
        self.before_weight_update()
        return self._change(update, recv_req)

    def _change(self, update: Callable[[Any], Any], recv_req):
        """With memory that is given back go the weights; what is there when it is taken again may be others."""
        self.weights_changing()
        return update(recv_req)
