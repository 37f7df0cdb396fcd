"""The longest request of a model with sliding windows.

Upstream: sgl-project/sglang#27770 (merged), by which the decode tree keeps windows apart.
"""

from __future__ import annotations

from sglang.srt.model_executor import model_runner as engine

__all__ = ["ModelRunner"]


class ModelRunner(engine.ModelRunner):
    """With the decode tree the window pool does not bound the request length."""

    @property
    def max_token_pool_size(self) -> int:
        """Wraps the engine's, which takes the smaller pool.

        With the decode tree a request takes a bounded part of the window pool. A pool too small for one request is
        refused when the tree is built.
        """
        if self.is_hybrid_swa and self.server_args.disaggregation_decode_enable_radix_cache:
            return self.max_total_num_tokens
        return super().max_token_pool_size
