"""Transfer figures of a request whose prefix decode held, and its time stamps for `pd-radix trace`.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); for the time stamps none is known.
"""

from __future__ import annotations

from sglang.srt.observability import req_time_stats as engine
from sglang.srt.observability import request_life

__all__ = ["SchedulerReqTimeStats"]


class SchedulerReqTimeStats(engine.SchedulerReqTimeStats):
    """Request times that know how much of the prompt was not sent, and that tell all stamps where these are kept."""

    # Tokens that decode held, so that prefill did not send them.
    decode_prefix_len = 0
    # When each stage was reached, as the scheduler has told it; in other processes.
    life: dict[str, float] | None = None

    def __getstate__(self) -> dict:
        """Adds all stamps, where a worker remembers them: the engine sends five, and its detokenizer drops these."""
        state = super().__getstate__()
        if request_life.remembered():
            life = self.life
            if life is None:
                life = request_life.stamps(self, request_life.SCHEDULER_STAGES, engine.global_diff_realtime_monotonic)
            state = {**state, "life": life}
        return state

    def compute_and_observe_kv_transfer_metrics(self, num_tokens: int, **kwargs) -> dict | None:
        """Wraps the engine's figures, which take every prompt token for sent: size and speed are those of the delta."""
        return super().compute_and_observe_kv_transfer_metrics(num_tokens - self.decode_prefix_len, **kwargs)
