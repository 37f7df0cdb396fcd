"""Pauses and aborts on a decode worker with local prefill.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.local_steps import end_local_step
from sglang.srt.managers import scheduler as engine

__all__ = ["Scheduler"]

# The engine's message.
ABORTED = "Aborted by AbortReq."


class Scheduler(engine.Scheduler):
    """A scheduler that also pauses and aborts local prefills."""

    def _local_prefills(self):
        """Local prefills of this worker; None if prefill computes all."""
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return None if queue is None else queue.local

    def pause_generation(self, recv_req) -> None:
        """Ends the local prefill step: its requests do not decode yet, so the engine does not know them."""
        if recv_req.mode != "in_place":
            end_local_step(self, self._local_prefills())
        super().pause_generation(recv_req)

    def is_final(self, batch) -> bool:
        """A prompt that was computed here has no earlier output tokens."""
        return batch.has_slots or super().is_final(batch)

    def _abort(self, recv_req, matches) -> None:
        super()._abort(recv_req, matches)
        local = self._local_prefills()
        if local is None:
            return
        local.abort(matches)
        for dr in [*self.disagg_decode_prealloc_queue.queue, *self.disagg_decode_transfer_queue.queue]:
            if matches(dr.req):
                # A locally computed request no longer has a room, so no reason is recorded for it.
                dr.mark_failed(ABORTED)
