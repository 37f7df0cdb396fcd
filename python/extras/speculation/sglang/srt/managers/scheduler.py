"""Steps of a decode worker that speculates.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.managers import undrafted_kv
from sglang.srt.mem_cache import draft_support
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Keeps the draft's KV as right as the target's."""

    def init_cache_with_memory_pool(self) -> None:
        """Refuses a draft that is not verified with the decode tree. Raises ValueError."""
        super().init_cache_with_memory_pool()
        drafts = self.draft_runner() if self.takes_decode_tree() else None
        if drafts is not None:
            draft_support.check_draft(self.server_args, self.tp_worker.model_runner.model_config, drafts.model_config)

    def draft_runner(self):
        """The model runner of the draft, None without."""
        worker = self.draft_worker
        if worker is None:
            return None
        return worker.draft_worker.draft_runner if self.enable_overlap else worker.model_runner

    def process_batch_result(self, batch, result) -> None:
        """What the draft model has not seen of a request that ends stays out of the tree."""
        if isinstance(self.tree_cache, DecodeRadixCache):
            undrafted_kv.keep_undrafted_out(batch, result)
        super().process_batch_result(batch, result)

    def is_final(self, batch) -> bool:
        """Of overlapped speculation the engine drops the result of a step in flight, and has a retracted request draft
        once more from where that step began, of which nothing is left."""
        return batch.is_spec_v2 or super().is_final(batch)
