"""Counters of KV that prefill reads from decode.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.hooks import Events

__all__ = ["ReadCounters"]

# In the tree; no memory for it; other weights; a late read from that rank in the last minute; failed, late, or for a
# request that has ended.
OUTCOMES = ("read", "memory", "weights", "slow", "failed")


class ReadCounters:
    """Once per process, since Prometheus refuses a second registration; a no-op without metrics."""

    def __init__(self, events: Events) -> None:
        """events: of this worker; its rank that counts requests counts reads too."""
        self._labels = labels = events.labels if events.counts_requests else {}
        if labels.get("engine_type") == "prefill":
            # After the engine has set PROMETHEUS_MULTIPROC_DIR.
            from prometheus_client import Counter

            def counter(name: str, text: str, by: tuple[str, ...] = ()) -> Counter:
                return Counter(f"sglang:{name}", text, [*labels, *by])

            reads = counter("prefill_reads", "Reads of a prompt's KV from decode, by outcome.", by=("outcome",))
            tokens = counter("prefill_read_tokens", "Prompt tokens whose KV was read from decode.")
            # Exposed from the start: a counter that starts at 1 shows no increase.
            self._ended = {outcome: reads.labels(**labels, outcome=outcome) for outcome in OUTCOMES}
            self._tokens = tokens.labels(**labels)

    def ended(self, outcome: str, num_tokens: int = 0) -> None:
        """Count an ended read. outcome: one of `OUTCOMES`. num_tokens: read."""
        if self._labels:
            self._ended[outcome].inc()
            self._tokens.inc(num_tokens)
