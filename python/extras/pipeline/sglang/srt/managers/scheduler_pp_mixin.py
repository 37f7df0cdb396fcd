"""Pipeline stages of a prefill worker that begin the same requests in the same turn, and end those that fail.

Upstream: sgl-project/sglang#31869 (merged), by which stages follow their vote; #34569 (open) goes on with it.
"""

from __future__ import annotations

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.managers import scheduler_pp_mixin as engine

__all__ = ["SchedulerPPMixin"]


def _begins() -> KVPoll:
    """What a sender polls whose request all stages are about to begin."""
    return KVPoll.WaitingForInput


class SchedulerPPMixin(engine.SchedulerPPMixin):
    """Begins and fails requests as the stages have agreed."""

    def process_bootstrapped_queue(self, bootstrapped_rids: list[list[str]] | None):
        """Every stage does with a request what all have agreed on: begin it, or fail it.

        The engine looks at each anew, stage by stage. One that has failed on a stage since, or on another only, then
        begins on some of them and not on all, which run different batches from there on. Here it begins, sends nothing
        where it has failed, and ends as a failed transfer does.
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
                # And not what has become of it here meanwhile: the stages must run the same batches.
                sender.poll = _begins
        try:
            return super().process_bootstrapped_queue(bootstrapped_rids)
        finally:
            for _, sender in senders:
                vars(sender).pop("poll", None)
