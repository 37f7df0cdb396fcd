"""Transfer figures of a request whose prefix decode held.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from sglang.srt.observability import req_time_stats as engine

__all__ = ["SchedulerReqTimeStats"]


class SchedulerReqTimeStats(engine.SchedulerReqTimeStats):
    """Request times that know how much of the prompt was not sent."""

    # Tokens that decode held, so that prefill did not send them.
    decode_prefix_len = 0

    def compute_and_observe_kv_transfer_metrics(self, num_tokens: int, **kwargs) -> dict | None:
        """Wraps the engine's figures, which take every prompt token for sent: size and speed are those of the delta."""
        return super().compute_and_observe_kv_transfer_metrics(num_tokens - self.decode_prefix_len, **kwargs)
