"""Counter of transfers whose KV differs from what prefill sent.

Upstream: none is known.
"""

from __future__ import annotations

from functools import cache

from sglang.srt.disaggregation.decode_radix.hooks import Events

__all__ = ["DigestCounters"]


class DigestCounters:
    """One per process, since Prometheus refuses a second registration; a no-op without metrics."""

    def __init__(self, events: Events) -> None:
        """events: of this worker. Each rank counts separately."""
        self._labels = labels = events.labels
        if labels:
            # After the engine has set PROMETHEUS_MULTIPROC_DIR, as its own collectors are.
            from prometheus_client import Counter

            def counter(name: str, text: str) -> Counter:
                return Counter(f"sglang:{name}", text, list(labels)).labels(**labels)

            made = counter("decode_page_digest_mismatches", "Transfers whose KV is not what prefill sent.")
            self._mismatched = made

    @classmethod
    @cache
    def of(cls, events: Events) -> DigestCounters:
        """The counters of the worker with these events."""
        return cls(events)

    def mismatched(self) -> None:
        if self._labels:
            self._mismatched.inc()
