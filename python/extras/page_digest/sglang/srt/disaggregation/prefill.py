"""Sets up page digests on prefill.

Upstream: sgl-project/sglang#39500 (merged) has a checksum, which #39729 (open) makes safe to enable.
"""

from __future__ import annotations

import contextlib

from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.page_digest import PageDigests

__all__ = ["PrefillBootstrapQueue"]


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """The queue that creates a prefill rank's transfer manager."""

    def _init_kv_manager(self):
        """Adds page digests."""
        manager = super()._init_kv_manager()
        if isinstance(manager, CommonKVManager):
            # Decode refuses the option with another pool, so it requests no digests.
            with contextlib.suppress(ValueError):
                manager.page_digests = PageDigests.of_rank(
                    self.token_to_kv_pool,
                    manager.attn_tp_rank,
                    manager.attn_tp_size,
                    self.scheduler.model_config.get_total_num_kv_heads(),
                    self.scheduler.model_config.num_hidden_layers if self.pp_size > 1 else None,
                )
        return manager
