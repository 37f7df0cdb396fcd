"""Options of HiCache L2 (host memory) below decode's tree.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt import server_args as engine
from sglang.srt.mem_cache.cache_support import FLAG
from sglang.srt.mem_cache.host_tier import support  # noqa: F401

__all__ = ["ServerArgs"]


class ServerArgs(engine.ServerArgs):
    """Server arguments; checks those of HiCache on a decode worker with the flag."""

    def _resolve_storage_layout_compatibility(self) -> None:
        """Keeps the host memory layout: the storages of this extra take pages of any layout.

        Upstream: none is known; the engine's Mooncake storage takes pages in one piece.
        """
        if not self.disaggregation_decode_enable_radix_cache:
            super()._resolve_storage_layout_compatibility()

    def _check_decode_radix_cache(self) -> None:
        """Adds the check of the host memory's size."""
        super()._check_decode_radix_cache()
        if self.enable_hierarchical_cache and not self.hicache_size and not self.hicache_ratio > 1:
            raise ValueError(
                f"--hicache-ratio is {self.hicache_ratio:g}: host memory has to hold more than the KV pool. "
                f"Give more than 1, or --hicache-size, or start with {FLAG} alone."
            )

    def check_server_args(self) -> None:
        """Adds the checks of the storage's options and of free memory, after all defaults are set."""
        super().check_server_args()
        if self.disaggregation_decode_enable_radix_cache and self.enable_hierarchical_cache:
            # Not at the top: they need the engine's modules, which need this one.
            from sglang.srt.mem_cache.host_tier import checks
            from sglang.srt.mem_cache.host_tier.storage import read_options

            if self.hicache_storage_backend is not None:
                read_options(self)
            checks.check_free(self)
