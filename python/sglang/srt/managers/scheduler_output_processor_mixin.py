"""What a prefill or decode worker says of its requests.

Upstream: none is known.
"""

from __future__ import annotations

from http import HTTPStatus

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler_output_processor_mixin as engine
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["SchedulerOutputProcessorMixin"]


class SchedulerOutputProcessorMixin(engine.SchedulerOutputProcessorMixin):
    """Says why a request has failed."""

    def process_batch_result_prebuilt(self, batch) -> None:
        """With the decode tree, adds first tokens to those of reasoning, and frees what ends with them as one group."""
        for req in batch.reqs:
            if req.decode_prefix_len is not None and not req.retracted_stain:
                self._maybe_update_reasoning_tokens(req, req.output_ids[0])
        if not isinstance(self.tree_cache, DecodeRadixCache):
            return super().process_batch_result_prebuilt(batch)
        self.token_to_kv_pool_allocator.free_group_begin()
        super().process_batch_result_prebuilt(batch)
        self.token_to_kv_pool_allocator.free_group_end()

    def stream_output_generation(self, reqs, return_logprob, skip_req=None, is_idle_batch=False) -> None:
        """On prefill, the failure of a request that decode has refused is the client's error, as it is on decode.

        Of those that have been answered before their KV was sent nothing more is told.
        """
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            told, reqs = reqs, [req for req in reqs if not (req.finished() and req.finished_output)]
            if told and not reqs:
                return
        for req in reqs if len(self.refused_rooms) else ():
            reason = self.refused_rooms.reason(req.bootstrap_room)
            if reason is not None and isinstance(req.finished_reason, FINISH_ABORT):
                req.finished_reason = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
        super().stream_output_generation(reqs, return_logprob, skip_req, is_idle_batch)
