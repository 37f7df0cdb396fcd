"""Scheduler of a worker whose requests have Mamba or SWA state.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache import state_kind
from sglang.srt.mem_cache.state_slots import StateSlots
from sglang.srt.mem_cache.window_radix_cache import WindowSlots

__all__ = ["Scheduler"]

state_kind.STATE_KINDS.append(StateSlots)
state_kind.STATE_KINDS.append(WindowSlots)


class Scheduler(engine.Scheduler):
    """Reports the state pools; batches that changed states are final."""

    def kv_pool_state(self) -> dict[str, Any]:
        """Adds the state pools' figures."""
        state, windows = super().kv_pool_state(), getattr(self.tree_cache, "windows", None)
        slots = getattr(getattr(self, "req_to_token_pool", None), "mamba_pool", None)
        if windows is not None:
            state |= {"window_size": windows.size, "window_available": windows.available_size()}
        if slots is not None:
            state |= {"state_slots": slots.size, "free_state_slots": slots.available_size()}
        return state

    def is_final(self, batch) -> bool:
        """Adds hybrid models: a state cannot be rolled back."""
        return super().is_final(batch) or hasattr(self.req_to_token_pool, "mamba_pool")
