"""Drains on SIGTERM.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.drain import Drain
from sglang.srt.managers.worker_rest import wait_sent

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Takes nothing new after SIGTERM, where the worker drains."""

    # None where SIGTERM is the engine's.
    drain: Drain | None = None

    def auto_create_handle_loop(self) -> None:
        """Looks first at who heeds SIGTERM, before the engine does."""
        if self.event_loop is None:
            self.drain = Drain.of(self.server_args)
        super().auto_create_handle_loop()

    async def sigterm_watchdog(self) -> None:
        """A worker that drains takes nothing new, and ends by itself.

        Any other as in the engine, but that a prefill sends first what its clients have been answered for.
        """
        if self.drain is not None:
            await self.drain.run(self)
            return
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.server_args.tokenizer_worker_num == 1:
            await wait_sent(self)
        await super().sigterm_watchdog()
