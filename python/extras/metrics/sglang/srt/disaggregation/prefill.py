"""Corrects the engine's transfer metrics to what is sent.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from sglang.srt.disaggregation import prefill as engine

__all__ = ["PrefillBootstrapQueue"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Notes decode's prefix of each request."""

    def pop_bootstrapped(self, return_failed_reqs: bool = False, rids_to_check: list[str] | None = None):
        """Adds decode's prefix length to the request's times."""
        popped, failed = super().pop_bootstrapped(True, rids_to_check)
        for req in popped:
            req.time_stats.decode_prefix_len = req.start_send_idx
        return (popped, failed) if return_failed_reqs else popped
