"""A decode worker with speculative decoding: memory for drafts, and the state the first draft starts from.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.draft_budget import DraftLengths, DraftSlots
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.pair_keys import PairReader

__all__ = ["DecodePreallocQueue", "DecodeTransferQueue"]

DecodeRadixCache.reader_type = PairReader


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Counts drafts in admission."""

    def __init__(self, *args, **kwargs):
        """Names the draft's KV pool, which retraction has to save too."""
        super().__init__(*args, **kwargs)
        self.token_to_kv_pool_allocator.draft_kv_pool = self.draft_token_to_kv_pool

    def _init_radix(self, tree: DecodeRadixCache) -> None:
        super()._init_radix(tree)
        if not self.scheduler.spec_algorithm.is_none():
            plain = self.accounts.lengths
            drafts = DraftSlots.of(self.scheduler)
            self.accounts.lengths = DraftLengths(plain.page_size, plain.most_new_tokens, tree.pool_size, drafts)


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Keeps the state the first draft starts from."""

    def _commit_transfer_to_req(self, decode_req: engine.DecodeRequest) -> bool:
        """Copies the draft's state: the engine keeps views of the metadata buffer.

        The prebuilt batch reads them, maybe after the buffer has gone to the next transfer.
        """
        done = super()._commit_transfer_to_req(decode_req)
        req = decode_req.req
        if done and req.hidden_states_tensor is not None:
            req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = (
                tensor.clone() for tensor in (req.output_topk_p, req.output_topk_index, req.hidden_states_tensor)
            )
        return done
