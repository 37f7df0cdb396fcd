"""How long a request of a model with sliding windows may be.

Upstream: sgl-project/sglang#27770 (merged), by which the decode tree keeps windows apart.
"""

from __future__ import annotations

from sglang.srt.model_executor import model_runner as engine

__all__ = ["ModelRunner"]


class ModelRunner(engine.ModelRunner):
    """A model runner whose pool of windows bounds no request where the decode tree is to be a `WindowRadixCache`."""

    @property
    def max_token_pool_size(self) -> int:
        """Wraps the engine's, the smaller pool of a model with sliding windows.

        With the decode tree a request takes a bounded part of the pool of windows, however long it is, and what no
        tree can do with is refused when it is built.
        """
        if self.is_hybrid_swa and self.server_args.disaggregation_decode_enable_radix_cache:
            return self.max_total_num_tokens
        return super().max_token_pool_size
