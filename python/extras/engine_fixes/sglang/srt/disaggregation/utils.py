"""Metadata buffers that keep nothing of a buffer's last request.

Upstream: none is known; sgl-project/sglang#40298 (open) reports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.disaggregation import utils as engine

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["MetadataBuffers", "drop_unasked_logprobs"]


class MetadataBuffers(engine.MetadataBuffers):
    """Metadata buffers of prefill and decode, with a row for each request."""

    def set_buf(self, req) -> None:
        """Clears what the engine may leave unwritten: logprobs (NaN: none), inputs of a draft."""
        at = req.metadata_buffer_index
        for row in self.get_buf(at)[2:9]:
            row.zero_()
        self.output_token_logprobs_val[at] = self.output_top_logprobs_val[at] = torch.nan
        super().set_buf(req)


def drop_unasked_logprobs(req: Req) -> None:
    """Drop logprobs that prefill was not asked for: NaN, or another request's token."""
    if req.return_logprob:
        value, index, token = req.output_token_logprobs_val, req.output_token_logprobs_idx, req.output_ids[-1]
        ours = index[-1] == token and value[-1] == value[-1]
        value[-1], index[-1] = (value[-1] if ours else None), token
        tops, top_ids = req.output_top_logprobs_val, req.output_top_logprobs_idx
        known = [pair for pair in zip(tops[-1], top_ids[-1], strict=True) if ours and pair[0] == pair[0]]
        if tops[-1]:
            tops[-1], top_ids[-1] = map(list, zip(*(known or [(None, token)]), strict=True))
