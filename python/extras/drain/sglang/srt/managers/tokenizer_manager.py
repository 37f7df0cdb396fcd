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
    """Tokenizer manager that drains on SIGTERM."""

    # None if the engine handles SIGTERM.
    drain: Drain | None = None

    def auto_create_handle_loop(self) -> None:
        """Creates the drain before the engine installs its signal handler."""
        if self.event_loop is None:
            self.drain = Drain.of(self.server_args)
        super().auto_create_handle_loop()

    async def sigterm_watchdog(self) -> None:
        """Drains on SIGTERM, if configured.

        Otherwise as in the engine, except that a prefill first sends KV whose clients have been answered.
        """
        if self.drain is not None:
            await self.drain.run(self)
            return
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.server_args.tokenizer_worker_num == 1:
            await wait_sent(self)
        await super().sigterm_watchdog()
