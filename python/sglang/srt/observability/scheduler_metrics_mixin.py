"""What a worker tells load balancers of its requests, with those that decode computes itself.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.observability import scheduler_metrics_mixin as engine

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetLoadReqOutput, GetLoadsReqOutput
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["SchedulerMetricsMixin"]


class SchedulerMetricsMixin(engine.SchedulerMetricsMixin):
    """Counts requests that are in no queue of the engine."""

    def get_load(self, *args, **kwargs) -> GetLoadReqOutput:
        """Adds prompts that decode computes itself, as requests that wait, like those in transfer.

        As of those, tokens are all of a request's, beside what it holds of the pool. Asked for with every output.
        """
        load = super().get_load(*args, **kwargs)
        reqs = self._computed_here()
        if reqs:
            load.num_reqs += len(reqs)
            load.num_waiting_reqs += len(reqs)
            load.num_tokens += sum(req.seqlen for req in reqs)
        return load

    def get_loads(self, *args, **kwargs) -> GetLoadsReqOutput:
        """Adds the same to the requests that wait; tokens are here those of the pool, which these have already."""
        loads = super().get_loads(*args, **kwargs)
        loads.num_waiting_reqs += len(self._computed_here())
        return loads

    def _computed_here(self) -> list[Req]:
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return [] if queue is None or queue.local is None else queue.local.beside(queue.queue)
