"""Counters of HiCache L2 on decode.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.hooks import Events

__all__ = ["HostCounters"]


class HostCounters:
    """Counters of one rank."""

    def __init__(self, events: Events):
        self._counts, self._before = events.counts_requests, 0
        if labels := events.labels:
            from prometheus_client import Counter

            def counter(name: str, text: str):
                return Counter(f"sglang:{name}", text, list(labels)).labels(**labels)

            self._loaded = counter("decode_host_loaded_tokens", "Prompt tokens whose KV came from host memory.")

    def loaded(self, tokens: int) -> None:
        """Advance the counter to ``tokens``, the total since the start."""
        if self._counts:
            self._loaded.inc(tokens - self._before)
            self._before = tokens
