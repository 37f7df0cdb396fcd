"""What a request takes along from its metadata buffer, and what is noted of its transfer, when all has arrived.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_prefix import KvTransferCounters
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["keep_draft_start", "note_transfer"]


def keep_draft_start(req: Req) -> None:
    """Copy what a request's first draft starts from, of which the engine gives it views of the metadata buffer.

    They are read when the prebuilt batch is made, which may wait for a place to run, and the buffer goes to the next
    transfer before that.
    """
    req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = (
        tensor.clone() for tensor in (req.output_topk_p, req.output_topk_index, req.hidden_states_tensor)
    )


def note_transfer(req: Req, counters: KvTransferCounters) -> None:
    """Count a transfer, and what decode held to the tokens that count as cached."""
    prompt_len = len(req.origin_input_ids)
    counters.committed(prompt_len, req.transfer_prefix_len or 0)
    if req.transfer_prefix_len is not None:
        # A token that either worker held was cached. They are not added: what both hold would count twice.
        req.prefill_cached_tokens = req.cached_tokens
        req.cached_tokens = min(max(req.cached_tokens, req.transfer_prefix_len), prompt_len)
