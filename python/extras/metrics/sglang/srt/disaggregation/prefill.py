"""The engine's own figures of a transfer are those of what is sent.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from sglang.srt.disaggregation import prefill as engine

__all__ = ["PrefillBootstrapQueue"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Notes of each request what decode holds."""

    def pop_bootstrapped(self, return_failed_reqs: bool = False, rids_to_check: list[str] | None = None):
        """Adds it to the times of a request."""
        popped, failed = super().pop_bootstrapped(True, rids_to_check)
        for req in popped:
            req.time_stats.decode_prefix_len = req.start_send_idx
        return (popped, failed) if return_failed_reqs else popped
