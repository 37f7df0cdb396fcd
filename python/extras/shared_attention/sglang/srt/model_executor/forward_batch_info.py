"""What an attention backend needs to know of a batch on the host.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor import forward_batch_info as engine

__all__ = ["ForwardBatch"]


class ForwardBatch(engine.ForwardBatch):
    """A forward batch whose rows are told to a backend that reads shared prefixes once, where one is in use."""

    @classmethod
    def init_new(cls, batch: Any, model_runner: Any) -> Any:
        """Wraps the making of a batch to hand on which rows it has: afterwards they are known on the device only, and
        the replay of a CUDA graph is not shown the batch at all."""
        groups = getattr(model_runner, "running_groups", None)
        if groups is not None:
            groups.expect(batch)
        return super().init_new(batch, model_runner)
