"""Scheduler of a decode worker with HiCache L2 (host memory) below its tree.

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""

from __future__ import annotations

from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size
from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.host_tier.storage import add_storage
from sglang.srt.mem_cache.host_tier.storage_tree import StoredHostTree
from sglang.srt.mem_cache.host_tier.tier import add_host_tier
from sglang.srt.mem_cache.host_tier.tree import HostTierRadixCache, HostTree
from sglang.srt.observability.host_counters import HostCounters

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Scheduler that builds the tree with host memory and reports its figures."""

    _host_counters: HostCounters | None = None

    def init_cache_with_memory_pool(self) -> None:
        """Replaces the decode tree by one with host memory below it. Raises ValueError."""
        super().init_cache_with_memory_pool()
        args = self.server_args
        if not (args.enable_hierarchical_cache and self.takes_decode_tree()):
            return
        tree = HostTierRadixCache.take_over(self.tree_cache)
        # Speculation is another extra, which may be absent.
        drafts = getattr(self, "draft_runner", lambda: None)()
        draft_pool, stored = drafts and drafts.token_to_kv_pool, args.hicache_storage_backend is not None
        host_class = StoredHostTree if stored else HostTree
        add_host_tier(tree, args, lambda: getattr(self, "forward_stream", None), draft_pool, host_class)
        if stored:
            add_storage(tree, args, get_attention_tp_rank(), get_attention_tp_size())
        self.tree_cache = tree

    def _publish_decode(self, gauges, found) -> None:
        """Adds tokens loaded from host memory, and the engine's own gauges."""
        super()._publish_decode(gauges, found)
        if not isinstance(self.tree_cache, DecodeRadixCache):
            return
        if self._host_counters is None:
            self._host_counters = HostCounters(events_of(self.server_args))
        if host := self.tree_cache.tier.report():
            self._host_counters.loaded(host["loaded"])
            self.stats.hicache_host_total_tokens = host["size"]
            self.stats.hicache_host_used_tokens = host["size"] - host["available"]
