"""Errors of a batch that are one request's, in the scheduler.

Upstream: none is known for logit processors; sgl-project/sglang#33206 (open) aborts requests whose logits are all NaN.
"""

from __future__ import annotations

from sglang.srt.constrained.rejected_tokens import check_grammar
from sglang.srt.managers import batch_failures
from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """A scheduler in which an error of one request ends that request, and no other."""

    def handle_generate_request(self, recv_req) -> None:
        """Adds the check of a logit processor: it can be made on all ranks, or is refused."""
        self.note_optional_parts(asked=recv_req)
        # An empty one is none to the engine, until there is another in its batch, which then ends the worker.
        recv_req.custom_logit_processor = recv_req.custom_logit_processor or None
        with_processor = recv_req.custom_logit_processor and self.server_args.enable_custom_logit_processor
        # Pipeline stages do not meet here: `Unmade` fails it, as where a later batch cannot make it again.
        if with_processor and self.pp_size == 1:
            try:
                batch_failures.check_processor(recv_req.custom_logit_processor, self.dp_tp_cpu_group)
            except Exception as e:
                self.refuse_message(recv_req, e)
                return
        super().handle_generate_request(recv_req)

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Adds the check of tokens that are forced, and two cases that the engine misses.

        A pause in mode ``retract`` requeues decode requests without ``is_retracted``: they would start another
        handshake, with a prefill that has finished them, and wait forever.

        With priorities, prefill and decode (with the flag) sort the queue by priority. A request without one, such as a
        warm-up, would end the worker: it gets the lowest.
        """
        if req.grammar is not None:
            check_grammar(req)
        decodes = isinstance(self.tree_cache, DecodeRadixCache)
        is_retracted = is_retracted or (decodes and req.is_retracted)
        if self.enable_priority_scheduling:
            if decodes or self.disaggregation_mode == engine.DisaggregationMode.PREFILL:
                self._set_or_validate_priority(req)
        super()._add_request_to_queue(req, is_retracted)

    def process_batch_result(self, batch, result) -> None:
        """Adds the errors of a batch that are one request's: that request ends with its error, and no other."""
        batch_failures.pad_token_logprobs(getattr(result, "logits_output", None))
        failed = batch_failures.failed_processors(batch, result)
        # Which requests go on to the next draft has been decided by then: those that fail end with that.
        verified = bool(failed) and getattr(result, "accept_length_per_req_cpu", None) is not None
        if not verified:
            batch_failures.fail_running(batch.reqs, failed | batch_failures.without_token(result))
        self.note_optional_parts(output=getattr(result, "logits_output", None))
        super().process_batch_result(batch, result)
        if verified:
            batch_failures.fail_running(batch.reqs, failed)
