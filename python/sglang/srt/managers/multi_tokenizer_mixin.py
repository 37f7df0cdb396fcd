"""Several tokenizer processes: they hear what decode refuses, and refuse what only one would do.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from fastapi import HTTPException
from sglang.srt.disaggregation.peer_calls import REFUSED_ROUTE, listen
from sglang.srt.disaggregation.refusal import RefusedReq
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine

logger = logging.getLogger(__name__)

__all__ = ["MultiTokenizerRouter", "TokenizerWorker"]


class MultiTokenizerRouter(engine.MultiTokenizerRouter):
    """Has the bootstrap server in its process, and a way to the scheduler."""

    def __init__(self, server_args, port_args):
        """A prefill's scheduler is told of rooms that decode refuses: it knows the requests of all processes.

        Which of these a request comes to, nobody knows before.
        """
        if server_args.disaggregation_mode == DisaggregationMode.PREFILL.value:
            listen(REFUSED_ROUTE, self._on_refused_by_decode)
        super().__init__(server_args, port_args)

    def _on_refused_by_decode(self, rooms: list[int], reason: str) -> None:
        """Called on the bootstrap server's thread."""
        asyncio.run_coroutine_threadsafe(self._refuse_rooms(rooms, reason), self._loop)

    async def _refuse_rooms(self, rooms: list[int], reason: str) -> None:
        for room in rooms:
            logger.info("Decode has refused room %s: %s", room, reason)
            await self.send_to_scheduler.send_pyobj(RefusedReq(room, reason, by_decode=True))


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
