"""Drains on SIGTERM.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.drain import Drain

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
        """A worker that drains takes nothing new, and ends by itself; any other as without this."""
        if self.drain is not None:
            await self.drain.run(self)
            return
        await super().sigterm_watchdog()
