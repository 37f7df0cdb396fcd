"""Passes a batch's rows on the host to an attention backend that shares prefixes.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor import forward_batch_info as engine

__all__ = ["ForwardBatch"]


class ForwardBatch(engine.ForwardBatch):
    """A forward batch whose rows are passed to a backend that reads shared prefixes once."""

    @classmethod
    def init_new(cls, batch: Any, model_runner: Any) -> Any:
        """Passes the batch's rows on: later they are known on the device only, and a CUDA graph's replay does not get
        the batch."""
        groups = getattr(model_runner, "running_groups", None)
        if groups is not None:
            groups.expect(batch)
        return super().init_new(batch, model_runner)
