"""The scheduler of a decode worker that computes remainders of prompts: pauses and aborts.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.local_steps import end_local_step
from sglang.srt.managers import scheduler as engine

__all__ = ["Scheduler"]

# As the engine has it.
ABORTED = "Aborted by AbortReq."


class Scheduler(engine.Scheduler):
    """Ends what is computed here when the engine ends what it knows."""

    def _local_prefills(self):
        """What computes remainders of prompts here; None where prefill computes all."""
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return None if queue is None else queue.local

    def pause_generation(self, recv_req) -> None:
        """A prompt of which a step has computed a part does not decode yet."""
        if recv_req.mode != "in_place":
            end_local_step(self, self._local_prefills())
        super().pause_generation(recv_req)

    def is_final(self, batch) -> bool:
        """A prompt that was computed here has no tokens before those of the step."""
        return batch.has_slots or super().is_final(batch)

    def _abort(self, recv_req, matches) -> None:
        super()._abort(recv_req, matches)
        local = self._local_prefills()
        if local is None:
            return
        local.abort(matches)
        for dr in [*self.disagg_decode_prealloc_queue.queue, *self.disagg_decode_transfer_queue.queue]:
            if matches(dr.req):
                # The room of one that is computed here has ended: no reason is recorded of it.
                dr.mark_failed(ABORTED)
