"""A scheduler whose host memory has a storage below it: weight updates, and the engine's routes for storages.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqOutput,
    ClearHiCacheReqOutput,
    DetachHiCacheStorageReqOutput,
)

logger = logging.getLogger(__name__)

__all__ = ["HostStorageScheduler"]

# How long a client waits for the storage to be cleared, behind the write that is under way.
CLEAR_S = 20.0

# The engine's scheduler comes behind.
Base: Any = object


class HostStorageScheduler(Base):
    """What ``--hicache-storage-backend`` adds to the scheduler of a decode worker with a host tier."""

    # Clients that wait for it to be cleared: what they have asked, whether it is done, and until when they wait.
    storage_clears: tuple[tuple[Any, Future[bool], float], ...] = ()

    def _host_tier(self) -> Any:
        return getattr(self.tree_cache, "tier", None)

    def before_weight_update(self) -> None:
        """Stops using the storage: what it holds is of other weights than this worker has after the update."""
        super().before_weight_update()
        tier = self._host_tier()
        if tier is not None and tier.storage is not None and not tier.storage.stopped:
            logger.warning(
                "The weights have been changed: this worker uses the storage of KV no more. Start it anew to use it."
            )
            tier.storage.stop()

    def clear_hicache_storage_wrapped(self, recv_req: Any) -> Any:
        """Has what is below a host tier cleared in a thread, and answers later; the engine's asks its own tree."""
        tier = self._host_tier()
        if tier is None:
            return super().clear_hicache_storage_wrapped(recv_req)
        if tier.storage is None:
            logger.warning("There is no storage to be cleared: this worker has no --hicache-storage-backend.")
            return ClearHiCacheReqOutput(success=False)
        self.storage_clears = (*self.storage_clears, (recv_req, tier.storage.clear(), time.monotonic() + CLEAR_S))
        return None

    def process_input_requests(self, recv_reqs: Any) -> None:
        """Answers, once per turn of every event loop, those that have had a storage cleared."""
        super().process_input_requests(recv_reqs)
        self.answer_storage_clears()

    def answer_storage_clears(self) -> None:
        """Answer who waits for what has been done, or for too long."""
        waiting = []
        for recv_req, done, until in self.storage_clears:
            ended = done.done()
            if not ended:
                if time.monotonic() <= until:
                    waiting.append((recv_req, done, until))
                    continue
                logger.warning("The storage of KV is not cleared after %g s: that is done when it answers.", CLEAR_S)
            success = ended and done.result()
            self.send_to_tokenizer.send_output(ClearHiCacheReqOutput(success=success), recv_req)
        self.storage_clears = tuple(waiting)

    def maybe_sleep_on_idle(self) -> None:
        """Does not sleep while somebody waits for an answer."""
        if not self.storage_clears:
            super().maybe_sleep_on_idle()

    def attach_hicache_storage_wrapped(self, recv_req: Any) -> Any:
        """Refused below a host tier, whose tree knows the names of its pages from the start, or never."""
        if self._host_tier() is None:
            return super().attach_hicache_storage_wrapped(recv_req)
        return AttachHiCacheStorageReqOutput(success=False, message=_refusal("attached"))

    def detach_hicache_storage_wrapped(self, recv_req: Any) -> Any:
        """Refused below a host tier."""
        if self._host_tier() is None:
            return super().detach_hicache_storage_wrapped(recv_req)
        return DetachHiCacheStorageReqOutput(success=False, message=_refusal("detached"))


def _refusal(done: str) -> str:
    return (
        f"On a decode worker with a host tier a storage cannot be {done} while it runs: start it with "
        "--hicache-storage-backend, or without."
    )
