"""Metrics of the targets for ITL and TTFT.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sglang.srt.disaggregation.decode_radix.hooks import Events, events_of

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["TargetMetrics"]


class TargetMetrics:
    """Prometheus metrics of one decode worker; every method is a no-op unless it runs with ``--enable-metrics``."""

    _made: WeakKeyDictionary[Events, TargetMetrics] = WeakKeyDictionary()

    @classmethod
    def get(cls, server_args: ServerArgs) -> TargetMetrics:
        """One instance per set of events of this process."""
        events = events_of(server_args)
        if events not in cls._made:
            cls._made[events] = cls(events)
        return cls._made[events]

    def __init__(self, events: Events):
        labels = events.labels
        self.enabled, self._counts_requests = bool(labels), events.counts_requests
        if self.enabled:
            from prometheus_client import Counter, Gauge

            def counter(name: str, text: str):
                return Counter(f"sglang:{name}", text, [*labels]).labels(**labels)

            def gauge(name: str, text: str):
                return Gauge(f"sglang:{name}", text, [*labels], multiprocess_mode="mostrecent").labels(**labels)

            self._itl_target = gauge("decode_itl_target_seconds", "The ITL target.")
            self._step = gauge("decode_step_seconds", "Mean time of the last decode steps, with an ITL target.")
            self._predicted = gauge("decode_step_predicted_seconds", "Predicted mean time of the same steps.")
            self._held_back = gauge("decode_itl_waiting_requests", "Requests that wait for the ITL target.")
            self._held = counter("decode_itl_held_requests", "Times that the ITL target delayed the next request.")
            self._late = counter("decode_ttft_late_requests", "Requests admitted too late for the TTFT target.")
            self._refused = counter("decode_ttft_refused_requests", "Requests refused for the TTFT target.")

    def itl_target(self, seconds: float) -> None:
        if self.enabled:
            self._itl_target.set(seconds)

    def itl(self, step_s: float, predicted_s: float) -> None:
        if self.enabled:
            self._step.set(step_s)
            self._predicted.set(predicted_s)

    def itl_waiting(self, waiting: int) -> None:
        if self.enabled:
            self._held_back.set(waiting)

    def itl_held(self) -> None:
        if self._counts_requests:
            self._held.inc()

    def ttft_late(self) -> None:
        if self._counts_requests:
            self._late.inc()

    def ttft_refused(self) -> None:
        if self._counts_requests:
            self._refused.inc()
