"""Sets up page digests on decode.

Upstream: sgl-project/sglang#39500 (merged) has a checksum, which #39729 (open) makes safe to enable.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.page_digest import PageDigests
from sglang.srt.observability.digest_metrics import DigestCounters

__all__ = ["DecodePreallocQueue"]


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """The queue that creates a decode rank's transfer manager."""

    def _init_kv_manager(self):
        """Adds page digests, with --disaggregation-decode-verify-pages."""
        manager = super()._init_kv_manager()
        manager.digest_counters = DigestCounters.of(events_of(self.scheduler.server_args))
        if self.scheduler.server_args.disaggregation_decode_verify_pages:
            manager.page_digests = PageDigests.of_rank(
                self.token_to_kv_pool,
                manager.attn_tp_rank,
                manager.attn_tp_size,
                self.scheduler.model_config.get_total_num_kv_heads(),
            )
        return manager
