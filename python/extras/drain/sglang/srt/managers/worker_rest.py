"""Work that a worker still has when no client waits.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from sglang.srt.utils import get_bool_env_var

__all__ = ["LOOK_S", "is_hopeless", "of_schedulers", "wait_sent"]

# Seconds between checks.
LOOK_S = 0.1


def is_hopeless(manager: Any) -> bool:
    """Whether the engine would not wait either: its health check failed, or it is forced to shut down."""
    return manager.server_status.name == "UnHealthy" or get_bool_env_var("SGL_FORCE_SHUTDOWN")


async def of_schedulers(manager: Any, until: float = math.inf) -> str:
    """What the schedulers still have, for the log; "" if nothing.

    Includes pages that a prefill may still write to, or that are being written, whose requests have ended.
    """
    asked = asyncio.ensure_future(manager.get_internal_state())
    # Not cancelled: its answer would be taken for the next call's.
    while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
        if time.monotonic() >= until or is_hopeless(manager):
            return "the scheduler does not answer"
    rests = all(state["kv_pool"]["idle"] for state in asked.result() if "kv_pool" in state)
    return "" if rests else "the scheduler is not idle"


async def wait_sent(manager: Any) -> None:
    """Wait for the engine's SIGTERM; on a prefill also until KV is sent whose clients have been answered."""
    while not manager.gracefully_exit:
        await asyncio.sleep(LOOK_S)
    while not is_hopeless(manager) and (manager.rid_to_state or await of_schedulers(manager)):
        await asyncio.sleep(LOOK_S)
