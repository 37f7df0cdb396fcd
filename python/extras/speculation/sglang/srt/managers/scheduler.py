"""Steps of a decode worker with speculative decoding.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.managers import undrafted_kv
from sglang.srt.mem_cache import draft_support
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Keeps the draft's KV correct."""

    def init_cache_with_memory_pool(self) -> None:
        """Refuses a draft that is not verified with the decode tree. Raises ValueError."""
        super().init_cache_with_memory_pool()
        args = self.server_args
        if args.speculative_algorithm is not None and self.takes_decode_tree():
            target, draft = self.tp_worker.model_runner, self.draft_runner()
            draft_support.check_draft(args, target.model_config, draft.model_config)

    def draft_runner(self):
        """The draft's model runner, if any."""
        worker = self.draft_worker
        if worker is None:
            return None
        return worker.draft_worker.draft_runner if self.enable_overlap else worker.model_runner

    def process_batch_result(self, batch, result) -> None:
        """Keeps tokens without draft KV out of the tree."""
        if isinstance(self.tree_cache, DecodeRadixCache):
            undrafted_kv.keep_undrafted_out(batch, result)
        super().process_batch_result(batch, result)

    def is_final(self, batch) -> bool:
        """With overlap the engine drops the in-flight result of a retracted request and drafts again from that step's
        start, whose state has not been kept."""
        return batch.is_spec_v2 or super().is_final(batch)
