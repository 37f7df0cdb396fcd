"""A prefill ends when that has been sent which its clients have been answered for.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.worker_rest import wait_sent

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Waits at its end for what prefill still sends."""

    async def sigterm_watchdog(self) -> None:
        """As in the engine, but that a prefill sends first what its clients have been answered for."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.server_args.tokenizer_worker_num == 1:
            await wait_sent(self)
        await super().sigterm_watchdog()
