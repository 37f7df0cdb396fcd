"""Admission by prefix on a decode worker.

Upstream: none is known that goes by prefixes or waits for a transfer.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.prefix_admission import PrefixAdmission
from sglang.srt.disaggregation.prefix_policy import Expired, PrefixPolicy
from sglang.srt.disaggregation.prefix_schedule import PrefixSchedule
from sglang.srt.mem_cache.decode_radix_cache import add_layer
from sglang.srt.mem_cache.prefix_watch import WatchedRadixCache

__all__ = ["DecodePreallocQueue", "DecodeTransferQueue"]

add_layer(WatchedRadixCache)


class WaitHooks(hooks.DecodeHooks):
    """Connects the wait limits to the core's events."""

    def __init__(self, policy: PrefixPolicy):
        self._policy = policy

    @classmethod
    def of(cls, queue: Any) -> WaitHooks | None:
        """queue: the transfer queue."""
        return cls(queue.policy) if isinstance(queue.policy, PrefixPolicy) else None

    def measured(self) -> Expired:
        return self._policy.expired


hooks.register(hooks.DecodeHooks, WaitHooks.of)


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Admission by prefix."""

    schedule_type, admission_type = PrefixSchedule, PrefixAdmission


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Transfers for which requests wait."""

    policy_type = PrefixPolicy
