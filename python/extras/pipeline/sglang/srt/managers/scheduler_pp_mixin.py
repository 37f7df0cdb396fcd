"""Pipeline stages of a prefill worker begin and fail the same requests in the same iteration.

Upstream: sgl-project/sglang#31869 (merged), by which stages follow their vote; #34569 (open) goes on with it.
"""

from __future__ import annotations

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.managers import scheduler_pp_mixin as engine

__all__ = ["SchedulerPPMixin"]


def _begins() -> KVPoll:
    """Replaces the poll of a sender whose request all stages are about to begin."""
    return KVPoll.WaitingForInput


class SchedulerPPMixin(engine.SchedulerPPMixin):
    """Begins and fails requests as the stages have agreed."""

    def process_bootstrapped_queue(self, bootstrapped_rids: list[list[str]] | None):
        """On every stage, begins or fails a request as all stages agreed.

        The engine polls each request again on every stage. If one fails meanwhile, or on another stage only, some
        stages begin it and others do not, and their batches differ from then on. Here it begins on all, sends nothing
        on the failed stage, and ends as a failed transfer.
        """
        if bootstrapped_rids is None:
            return super().process_bootstrapped_queue(None)
        good, bad = map(set, bootstrapped_rids)
        queue = self.disagg_prefill_bootstrap_queue.queue
        senders = [(req.rid, req.disagg_kv_sender) for req in queue if isinstance(req.disagg_kv_sender, CommonKVSender)]
        for rid, sender in senders:
            if rid in bad and not sender.has_failed():
                sender.fail("failed on another pipeline stage of prefill")
            if rid in good:
                # Ignore its present poll: the stages must run the same batches.
                sender.poll = _begins
        try:
            return super().process_bootstrapped_queue(bootstrapped_rids)
        finally:
            for _, sender in senders:
                vars(sender).pop("poll", None)
