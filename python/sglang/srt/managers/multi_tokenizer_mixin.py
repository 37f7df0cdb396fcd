"""A prefill with several tokenizer processes hears what decode refuses.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import logging

from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine

logger = logging.getLogger(__name__)

__all__ = ["MultiTokenizerRouter"]


class MultiTokenizerRouter(engine.MultiTokenizerRouter):
    """Has the bootstrap server in its process, and a way to the scheduler."""

    def __init__(self, server_args, port_args):
        """A prefill's scheduler is told of rooms that decode refuses: it knows the requests of all processes.

        Which of these a request comes to, nobody knows before.
        """
        if server_args.disaggregation_mode == DisaggregationMode.PREFILL.value:
            refusal.listen(self._on_refused_by_decode)
        super().__init__(server_args, port_args)

    def _on_refused_by_decode(self, room: int, reason: str) -> None:
        """Called on the bootstrap server's thread."""
        asyncio.run_coroutine_threadsafe(self._refuse_room(room, reason), self._loop)

    async def _refuse_room(self, room: int, reason: str) -> None:
        logger.info("Decode has refused room %s: %s", room, reason)
        await self.send_to_scheduler.send_pyobj(refusal.RefusedReq(room, reason, by_decode=True))
