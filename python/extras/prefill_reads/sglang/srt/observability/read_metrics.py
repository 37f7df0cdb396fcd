"""Counters of what a prefill reads from decode in place of computing it.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.hooks import Events

__all__ = ["ReadCounters"]

# What was read is in the tree; there was no memory for it; it is of other weights; a read from there was late less than
# a minute ago; it failed, was late, or was for a request that has ended.
OUTCOMES = ("read", "memory", "weights", "slow", "failed")


class ReadCounters:
    """Made once in a process, since Prometheus refuses a second registration; without metrics a no-op."""

    def __init__(self, events: Events) -> None:
        """events: of this worker. The rank that counts requests counts these here."""
        self._labels = labels = events.labels if events.counts_requests else {}
        if labels.get("engine_type") == "prefill":
            # After the engine has set PROMETHEUS_MULTIPROC_DIR, as its own collectors do.
            from prometheus_client import Counter

            def counter(name: str, text: str, by: tuple[str, ...] = ()) -> Counter:
                return Counter(f"sglang:{name}", text, [*labels, *by])

            reads = counter("prefill_reads", "Reads of a prompt's KV from decode, by outcome.", by=("outcome",))
            tokens = counter("prefill_read_tokens", "Prompt tokens whose KV was read from decode.")
            # Shown from the start: of a counter that begins at 1, no increase is seen.
            self._ended = {outcome: reads.labels(**labels, outcome=outcome) for outcome in OUTCOMES}
            self._tokens = tokens.labels(**labels)

    def ended(self, outcome: str, num_tokens: int = 0) -> None:
        """A read has ended, or could not begin. outcome: one of `OUTCOMES`. num_tokens: that it brought."""
        if self._labels:
            self._ended[outcome].inc()
            self._tokens.inc(num_tokens)
