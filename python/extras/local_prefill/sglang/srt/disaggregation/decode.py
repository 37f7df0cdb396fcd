"""A decode worker with local prefill; see local_prefill.py.

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
    """Transfers of a decode worker, and its local prefills."""

    local: LocalPrefills | None = None


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """The event loop of a decode worker with local prefill steps."""

    def get_next_disagg_decode_batch_to_run(self):
        """Adds local prefill steps; after each, running requests have a decode step."""
        batch = next_local_batch(self, self.disagg_decode_transfer_queue.local)
        return super().get_next_disagg_decode_batch_to_run() if batch is None else batch
