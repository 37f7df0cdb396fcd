"""Serves requests: the other worker hears of what is refused.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.refused_requests import RefusedRequests
from sglang.srt.managers.worker_rest import wait_sent

__all__ = ["ReqState", "TokenizerManager"]


@dataclass
class ReqState(engine.ReqState):
    """The state of one prompt, which knows whether the scheduler has been told of it."""

    sent: bool = False


class TokenizerManager(RefusedRequests, engine.TokenizerManager):
    """Speaks of what it refuses. On prefill, ends when that has been sent which its clients have been answered for."""

    async def sigterm_watchdog(self) -> None:
        """As in the engine, but that a prefill sends first what its clients have been answered for."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.server_args.tokenizer_worker_num == 1:
            await wait_sent(self)
        await super().sigterm_watchdog()
