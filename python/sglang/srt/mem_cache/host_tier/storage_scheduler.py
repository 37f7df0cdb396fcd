"""A scheduler whose host memory has a storage below it: weight updates, and the engine's routes for storages.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqOutput,
    ClearHiCacheReqOutput,
    DetachHiCacheStorageReqOutput,
)

logger = logging.getLogger(__name__)

__all__ = ["HostStorageScheduler"]

# The engine's scheduler comes behind.
Base: Any = object


class HostStorageScheduler(Base):
    """What ``--hicache-storage-backend`` adds to the scheduler of a decode worker with a host tier."""

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
        """Clears what is below a host tier; the engine's asks its own tree."""
        tier = self._host_tier()
        if tier is None:
            return super().clear_hicache_storage_wrapped(recv_req)
        if tier.storage is None:
            logger.warning("There is no storage to be cleared: this worker has no --hicache-storage-backend.")
            return ClearHiCacheReqOutput(success=False)
        try:
            tier.storage.clear()
        except Exception as e:
            logger.error("The storage of KV could not be cleared", exc_info=e)
            return ClearHiCacheReqOutput(success=False)
        return ClearHiCacheReqOutput(success=True)

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
