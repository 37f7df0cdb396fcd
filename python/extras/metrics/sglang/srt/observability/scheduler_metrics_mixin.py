"""Load reports to load balancers, including requests that decode computes itself.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.observability import scheduler_metrics_mixin as engine

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetLoadReqInput, GetLoadReqOutput, GetLoadsReqOutput
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["SchedulerMetricsMixin"]


class SchedulerMetricsMixin(engine.SchedulerMetricsMixin):
    """Counts requests that are in no queue of the engine."""

    def get_load(self, recv_req: GetLoadReqInput | None = None) -> GetLoadReqOutput | None:
        """Adds prompts that decode computes itself as waiting requests, like those in transfer.

        Like for those, all of a request's tokens count, beside what it holds of the pool. Called for every output with
        ``recv_req`` None; returns None then if the load is not read.
        """
        if recv_req is None and not self._is_load_read():
            return None
        load = super().get_load(recv_req)
        reqs = self._computed_here()
        if reqs:
            load.num_reqs += len(reqs)
            load.num_waiting_reqs += len(reqs)
            load.num_tokens += sum(req.seqlen for req in reqs)
        return load

    def get_loads(self, *args, **kwargs) -> GetLoadsReqOutput:
        """Adds the same requests; tokens are those of the pool here, which include theirs."""
        loads = super().get_loads(*args, **kwargs)
        loads.num_waiting_reqs += len(self._computed_here())
        return loads

    def _is_load_read(self) -> bool:
        """Whether the load of an output is read: a DP controller reads it.

        It costs a look at each waiting request per output, and many failures of one step are as many outputs. Decode
        without the flag is unchanged.
        """
        pd = self.disaggregation_mode == DisaggregationMode.PREFILL or isinstance(self.tree_cache, DecodeRadixCache)
        return not pd or self.server_args.dp_size > 1

    def _computed_here(self) -> list[Req]:
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return [] if queue is None else [req for beside in queue.hooks.beside for req in beside(queue.queue)]
