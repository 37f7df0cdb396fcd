"""Decode workers that report to prefills which of their requests wait here.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.announcements import Announcements
from sglang.srt.environ import envs

__all__ = ["DecodePreallocQueue", "SchedulerDisaggregationDecodeMixin"]


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Reports waiting requests: prefill then does not time them out, and fails them if this worker is lost."""

    def __init__(self, *args, **kwargs):
        """Adds the reports."""
        super().__init__(*args, **kwargs)
        self.announcements = Announcements(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get() / 4)

    def _register(self, decode_req: engine.DecodeRequest) -> None:
        super()._register(decode_req)
        self.announcements.add(decode_req)


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """The decode loop with reports."""

    def process_decode_queue(self) -> None:
        """Reports requests that still wait at the end of a step, so not those it admitted at once."""
        super().process_decode_queue()
        queue = self.disagg_decode_prealloc_queue
        if queue.has_radix:
            queue.announcements.announce(queue.queue)
