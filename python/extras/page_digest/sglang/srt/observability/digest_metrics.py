"""Counter of transfers whose KV is not what prefill sent.

Upstream: none is known.
"""

from __future__ import annotations

from functools import cache

from sglang.srt.disaggregation.decode_radix.hooks import Events

__all__ = ["DigestCounters"]


class DigestCounters:
    """Made once in a process, since Prometheus refuses a second registration; without metrics a no-op."""

    def __init__(self, events: Events) -> None:
        """events: of this worker. Each rank counts for itself."""
        self._labels = labels = events.labels
        if labels:
            # After the engine has set PROMETHEUS_MULTIPROC_DIR, as its own collectors do.
            from prometheus_client import Counter

            def counter(name: str, text: str) -> Counter:
                return Counter(f"sglang:{name}", text, list(labels)).labels(**labels)

            made = counter("decode_page_digest_mismatches", "Transfers whose KV is not what prefill sent.")
            self._mismatched = made

    @classmethod
    @cache
    def of(cls, events: Events) -> DigestCounters:
        """Those of the worker with these events."""
        return cls(events)

    def mismatched(self) -> None:
        if self._labels:
            self._mismatched.inc()
