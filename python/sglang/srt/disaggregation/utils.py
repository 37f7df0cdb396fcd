"""Metadata buffers that keep nothing of a buffer's last request.

Upstream: none is known; sgl-project/sglang#40298 (open) reports it.
"""

import torch
from sglang.srt.disaggregation import utils as engine

__all__ = ["MetadataBuffers"]


class MetadataBuffers(engine.MetadataBuffers):
    """Metadata buffers of prefill and decode, with a row for each request."""

    def set_buf(self, req) -> None:
        """Clears what the engine may leave unwritten: logprobs (NaN: none), inputs of a draft."""
        at = req.metadata_buffer_index
        for row in self.get_buf(at)[2:9]:
            row.zero_()
        self.output_token_logprobs_val[at] = self.output_top_logprobs_val[at] = torch.nan
        super().set_buf(req)
