"""Several tokenizer processes refuse what only one would do.

Upstream: none is known.
"""

from __future__ import annotations

import functools

from fastapi import HTTPException
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine

__all__ = ["TokenizerWorker"]


def _for_all(call):
    """A call that has to reach all tokenizer processes, and reaches one: on a worker of a pair it is refused."""

    @functools.wraps(call)
    async def refuse(self, *args, **kwargs):
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return await call(self, *args, **kwargs)
        reason = f"{call.__name__} would reach one of {self.server_args.tokenizer_worker_num} tokenizer processes"
        raise HTTPException(400, f"{reason}. Start this worker without --tokenizer-worker-num to use it.")

    return refuse


class TokenizerWorker(engine.TokenizerWorker):
    """One of several tokenizer processes. On a worker of a pair it refuses what would pause its own requests alone,
    update weights under those of the others, or change adapters that the others keep."""


_WEIGHTS = map("update_weights_from_{}".format, ("disk", "distributed", "tensor", "ipc"))
_ADAPTERS = "load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"
for _name in ("pause_generation", "continue_generation", *_WEIGHTS, *_ADAPTERS):
    setattr(TokenizerWorker, _name, _for_all(getattr(engine.TokenizerWorker, _name)))
