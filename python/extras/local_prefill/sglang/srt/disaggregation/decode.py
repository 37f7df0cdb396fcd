"""A decode worker that computes short remainders of prompts itself; see local_prefill.py.

Upstream: none is known. NVIDIA Dynamo decides the same in its router (conditional disaggregation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.local_steps import make_local_prefills, next_local_batch

if TYPE_CHECKING:
    from sglang.srt.disaggregation.local_prefill import LocalPrefills

__all__ = ["DecodeTransferQueue", "SchedulerDisaggregationDecodeMixin"]

hooks.register(hooks.DecodeHooks, make_local_prefills)


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Transfers of a decode worker, and what is computed in the place of one."""

    local: LocalPrefills | None = None


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """A decode worker's loop with steps over remainders of prompts."""

    def get_next_disagg_decode_batch_to_run(self):
        """Adds a step over remainders of prompts that are computed here; after each, requests that decode have one."""
        batch = next_local_batch(self, self.disagg_decode_transfer_queue.local)
        return super().get_next_disagg_decode_batch_to_run() if batch is None else batch
