"""A prefill with several tokenizer processes hears what decode refuses, and these are of one build of this package.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import logging

from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine

from sglang_pd_radix.patching import loader

logger = logging.getLogger(__name__)

__all__ = ["MultiTokenizerRouter", "write_data_for_multi_tokenizer"]


def write_data_for_multi_tokenizer(port_args, server_args, scheduler_info):
    """Wraps the engine's, so that tokenizer processes with another build of this package do not read the arguments.

    They take them from memory that is shared, where nobody knows who will read what is pickled.
    """
    return engine.write_data_for_multi_tokenizer(port_args, loader.OfThisBuild(server_args), scheduler_info)


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
