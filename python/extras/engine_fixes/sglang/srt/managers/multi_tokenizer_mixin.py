"""With several tokenizer processes, refuses calls that would reach only one of them.

Upstream: none is known.
"""

from __future__ import annotations

import functools

from fastapi import HTTPException
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine

__all__ = ["TokenizerWorker"]


def _for_all(call):
    """Refuses a call on a worker of a pair: it must reach all tokenizer processes but reaches one."""

    @functools.wraps(call)
    async def refuse(self, *args, **kwargs):
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return await call(self, *args, **kwargs)
        reason = f"{call.__name__} would reach one of {self.server_args.tokenizer_worker_num} tokenizer processes"
        raise HTTPException(400, f"{reason}. Start this worker without --tokenizer-worker-num to use it.")

    return refuse


class TokenizerWorker(engine.TokenizerWorker):
    """One of several tokenizer processes. On a worker of a pair it refuses pauses, which would hold only its own
    requests, and updates of weights or adapters, which the others would not notice."""


_WEIGHTS = map("update_weights_from_{}".format, ("disk", "distributed", "tensor", "ipc"))
_ADAPTERS = "load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"
for _name in ("pause_generation", "continue_generation", *_WEIGHTS, *_ADAPTERS):
    setattr(TokenizerWorker, _name, _for_all(getattr(engine.TokenizerWorker, _name)))
