"""Transfer figures and spans of a request whose prefix decode held.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); for spans none is known.
"""

from __future__ import annotations

import time

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.observability import req_time_stats as engine

__all__ = ["SchedulerReqTimeStats"]


class SchedulerReqTimeStats(engine.SchedulerReqTimeStats):
    """Request times that exclude the prefix from transfer figures."""

    # Tokens that prefill did not send because decode held them.
    decode_prefix_len = 0

    def note_admitted(self, held: int, host: int, local: bool, followed_s: float) -> None:
        """Add the admission on decode to the trace: an event in the handshake's span, which the request for KV ends.

        held, host: prompt tokens in the tree, and further ones in host memory. local: decode computes the rest.
        followed_s: seconds spent waiting for another's transfer.
        """
        if self.trace_ctx.tracing_enable:
            told = {"held_tokens": held, "host_tokens": host, "computed_here": local, "followed_s": followed_s}
            at = engine.convert_time_to_realtime_ns(time.perf_counter())
            self.trace_ctx.trace_event("admitted", 1, at, told)

    def set_prefill_finished_time(self, ts: float | None = None) -> None:
        """On decode: a prefill span within the decode span, for a prompt computed here.

        The engine would end the decode span, and count this time as the first decode step's.
        """
        if self.disagg_mode != DisaggregationMode.DECODE:
            super().set_prefill_finished_time(ts)
        elif self.last_prefill_finished_time == 0.0:
            ts = time.perf_counter() if ts is None else ts
            self.prefill_finished_time = self.prefill_finished_time or ts
            self.last_prefill_finished_time = self.last_decode_finish_time = ts
            stage = engine.RequestStage.PREFILL_FORWARD
            self.observe_per_stage_req_latency(stage, ts - self.last_forward_entry_time)
            self.trace_slice(stage, self.last_forward_entry_time, ts)

    def compute_and_observe_kv_transfer_metrics(self, num_tokens: int, **kwargs) -> dict | None:
        """Wraps the engine's, which counts every prompt token as sent: size and speed are those of the delta."""
        return super().compute_and_observe_kv_transfer_metrics(num_tokens - self.decode_prefix_len, **kwargs)
