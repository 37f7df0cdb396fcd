"""Scheduler in which an error of one request ends only that request.

Upstream: none is known for logit processors; sgl-project/sglang#33206 (open) aborts requests whose logits are all NaN.
"""

from __future__ import annotations

from sglang.srt.constrained.rejected_tokens import check_grammar
from sglang.srt.managers import batch_failures
from sglang.srt.managers import scheduler as engine

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """A scheduler in which an error of one request ends only that request."""

    def handle_generate_request(self, recv_req) -> None:
        """Adds the check of a logit processor: it is refused unless all ranks can make it."""
        self.note_optional_parts(asked=recv_req)
        # The engine ignores an empty one, unless another request in its batch has one; then the worker ends.
        recv_req.custom_logit_processor = recv_req.custom_logit_processor or None
        with_processor = recv_req.custom_logit_processor and self.server_args.enable_custom_logit_processor
        # Pipeline stages do not synchronise here: `Unmade` fails the request, as on a later failure.
        if with_processor and self.pp_size == 1:
            try:
                batch_failures.check_processor(recv_req.custom_logit_processor, self.dp_tp_cpu_group)
            except Exception as e:
                self.refuse_message(recv_req, e)
                return
        super().handle_generate_request(recv_req)

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Adds the check of forced tokens."""
        if req.grammar is not None:
            check_grammar(req)
        super()._add_request_to_queue(req, is_retracted)

    def process_batch_result(self, batch, result) -> None:
        """Ends a request with its own error in a batch, and no other request."""
        batch_failures.pad_token_logprobs(getattr(result, "logits_output", None))
        failed = batch_failures.failed_processors(batch, result)
        # Verification has already chosen the requests of the next draft: failed ones end after the result.
        verified = bool(failed) and getattr(result, "accept_length_per_req_cpu", None) is not None
        if not verified:
            batch_failures.fail_running(batch.reqs, failed | batch_failures.without_token(result))
        self.note_optional_parts(output=getattr(result, "logits_output", None))
        super().process_batch_result(batch, result)
        if verified:
            batch_failures.fail_running(batch.reqs, failed)
