"""Commit of an arrived request: its metadata and cached tokens; report of an aborted one.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.utils import prepare_abort

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.hooks import Events
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


def abort(
    req: Req,
    message: str,
    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR,
    error: Exception | None = None,
) -> None:
    """Abort ``req`` and log why."""
    logger.error(message, exc_info=error)
    prepare_abort(req, message, status_code=status)


def report_end(req: Req, scheduler: Any, failed: bool = False) -> None:
    """Stream the end of an aborted request to its client.

    failed: its transfer failed, which the engine counts too.
    """
    scheduler.stream_output([req], req.return_logprob)
    events_of(scheduler.server_args).ended(req.finished_reason)
    if failed and scheduler.enable_metrics:
        scheduler.metrics_collector.increment_transfer_failed_reqs()


def note_transfer(req: Req, events: Events) -> None:
    """Count decode's prefix as cached tokens.

    Data of the first token that stayed on prefill get an empty entry, so that later entries match.
    """
    prompt_len = len(req.origin_input_ids)
    events.committed(prompt_len, req.transfer_prefix_len or 0)
    if req.transfer_prefix_len is not None:
        # The maximum: in the sum, tokens that both workers held would count twice.
        req.prefill_cached_tokens = req.cached_tokens
        req.cached_tokens = min(max(req.cached_tokens, req.transfer_prefix_len), prompt_len)
        if req.return_logprob and req.token_ids_logprob is not None:
            req.output_token_ids_logprobs_val.append([])
            req.output_token_ids_logprobs_idx.append([])
        if req.return_hidden_states:
            # The engine has the prompt's hidden states in this place.
            req.hidden_states.append([])
