"""Decode workers that tell prefills which of their requests wait here.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.announcements import Announcements
from sglang.srt.environ import envs

__all__ = ["DecodePreallocQueue", "SchedulerDisaggregationDecodeMixin"]


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Has prefills know what waits here: they do not give it up, and lose it with this worker."""

    def __init__(self, *args, **kwargs):
        """Adds what they have been told."""
        super().__init__(*args, **kwargs)
        self.announcements = Announcements(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get() / 4)

    def _register(self, decode_req: engine.DecodeRequest) -> None:
        super()._register(decode_req)
        self.announcements.add(decode_req)


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """Turns of a decode worker's loop."""

    def process_decode_queue(self) -> None:
        """Tells prefills of what waits in the end. Not of what is admitted in its first step."""
        super().process_decode_queue()
        queue = self.disagg_decode_prealloc_queue
        if queue.has_radix:
            queue.announcements.announce(queue.queue)
