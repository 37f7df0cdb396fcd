"""Metrics of a worker's requests and pools.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.scheduler_gauges_mixin import SchedulerGaugesMixin
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters

__all__ = ["Scheduler"]

hooks.register(hooks.Events, KvTransferCounters.get)


class Scheduler(SchedulerGaugesMixin, engine.Scheduler):
    """Reports requests and pools."""
