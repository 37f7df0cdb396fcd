"""With several tokenizer processes, the router process receives decode's refusals.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import logging

from sglang.srt.disaggregation.peer_calls import listen
from sglang.srt.disaggregation.refusal import REFUSED_ROUTE, RefusedReq
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine

logger = logging.getLogger(__name__)

__all__ = ["MultiTokenizerRouter"]


class MultiTokenizerRouter(engine.MultiTokenizerRouter):
    """Receives refusals on its bootstrap server and forwards them to the scheduler."""

    def __init__(self, server_args, port_args):
        """Adds the route for rooms that decode refuses.

        They go to the scheduler, which has the requests of all processes: the room's process is not known in advance.
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
