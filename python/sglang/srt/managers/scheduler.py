"""Scheduler of a decode worker with a radix cache.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

from functools import cached_property

from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.disaggregation.decode_prefix import pages
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Gives a decode worker its tree and tells from outside what the pools hold."""

    # The most tokens that requests held at the end of a step of the decode queue, since the last flush.
    kv_used_peak = 0

    def init_cache_with_memory_pool(self) -> None:
        """Puts the decode tree in the place of the engine's radix cache when the flag asks for it."""
        super().init_cache_with_memory_pool()
        if not self.server_args.disaggregation_decode_enable_radix_cache:
            return
        if type(self.tree_cache) is not RadixCache:
            raise ValueError(
                "--disaggregation-decode-enable-radix-cache is not verified for this model: the engine chose "
                f"{type(self.tree_cache).__name__} for it, and only full-attention models (RadixCache) are. "
                "Start this decode worker without the flag."
            )
        self.tree_cache = DecodeRadixCache.take_over(self.tree_cache)

    def get_internal_state(self, recv_req):
        """Adds the pool figures of invariant I1 under ``kv_pool``, all in tokens."""
        output = super().get_internal_state(recv_req)
        if not self._has_plain_pool():
            return output
        output.internal_state = {**output.internal_state, "kv_pool": self._kv_pool_state()}
        return output

    def _has_plain_pool(self) -> bool:
        """Whether one pool has all KV, so that its figures say what requests hold."""
        return type(self.tree_cache) in (DecodeRadixCache, RadixCache, ChunkCache)

    def process_decode_queue(self) -> None:
        """Adds two things.

        Failures are told, and transfers end, also while retracted requests wait for memory. The engine looks at neither
        until all of these are back: if what they wait for is held by transfers, both wait for ever.

        And the record of the most tokens that requests held, with the flag as without it. A step of the queue ends when
        what it admitted has its pages, and begins after a decode step has freed those of the answers that ended in it,
        so this misses no request, however short its life.
        """
        super().process_decode_queue()
        queue = self.disagg_decode_prealloc_queue
        if queue.retracted_queue and isinstance(self.tree_cache, DecodeRadixCache):
            queue.pop_preallocated()
            self.waiting_queue.extend(self.disagg_decode_transfer_queue.pop_transferred())
        if self._has_plain_pool():
            free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
            self.kv_used_peak = max(self.kv_used_peak, self.max_total_num_tokens - free)

    def _kv_pool_state(self) -> dict:
        tree = self.tree_cache
        state = {
            "size": self.max_total_num_tokens,
            "available": self.token_to_kv_pool_allocator.available_size(),
            "evictable": tree.evictable_size(),
            "protected": tree.protected_size(),
            "used_peak": self.kv_used_peak,
            "idle": self.is_fully_idle() and not self._has_quarantine(),
            "free_req_slots": len(self.req_to_token_pool.free_slots),
        }
        if isinstance(tree, DecodeRadixCache):
            state |= {"locks_taken": tree.locks_taken, "locks_released": tree.locks_released}
            if state["idle"]:
                state["audit"] = tree.audit([])
        return state

    def _get_cached_tokens_details(self, req) -> dict | None:
        """Adds what decode held and what was sent, apart from prefill's hit, which ``cached_tokens`` still is.

        ``decode_prefix`` and ``transferred`` are tokens and add up to the prompt; the bytes are those of all TP ranks.
        """
        details = super()._get_cached_tokens_details(req)
        if req.decode_prefix_len is None or req.transfer_prefix_len is None:
            return details
        prefix_len, prompt_len = req.transfer_prefix_len, len(req.origin_input_ids)
        page_size, page_bytes = self.token_to_kv_pool_allocator.page_size, self._page_bytes
        return {
            **(details or {"device": 0, "host": 0}),
            "decode_prefix": prefix_len,
            "transferred": prompt_len - prefix_len,
            "transferred_bytes": pages(prompt_len - prefix_len, page_size) * page_bytes,
            "saved_bytes": prefix_len // page_size * page_bytes,
        }

    @cached_property
    def _page_bytes(self) -> int:
        """Bytes of one page of KV over all layers and TP ranks."""
        return sum(self.disagg_decode_prealloc_queue.kv_manager.kv_args.kv_item_lens) * self.attn_tp_size

    def handle_generate_request(self, recv_req) -> None:
        """Adds ``extra_key`` to the request: the engine receives it (also as ``cache_salt``) and then drops it.

        On decode workers with the flag, where prefixes of different keys must not be shared.
        """
        if not isinstance(self.tree_cache, DecodeRadixCache):
            super().handle_generate_request(recv_req)
            return
        Req.incoming_extra_key = recv_req.extra_key
        try:
            super().handle_generate_request(recv_req)
        finally:
            Req.incoming_extra_key = None

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Adds a case the engine forgets: a pause that retracts sends decode requests back without saying so.

        They would shake hands anew with a prefill that has long finished them, and wait for ever.
        """
        if isinstance(self.tree_cache, DecodeRadixCache) and req.is_retracted:
            is_retracted = True
        super()._add_request_to_queue(req, is_retracted)

    def abort_request(self, recv_req) -> None:
        """Adds that a request aborted in prefill's waiting queue fails its transfer, or decode would wait for it."""
        leaving = []
        if self.disaggregation_mode == engine.DisaggregationMode.PREFILL:
            leaving = [r for r in self.waiting_queue if recv_req.abort_all or r.rid.startswith(recv_req.rid)]
        super().abort_request(recv_req)
        for req in leaving:
            if isinstance(req.disagg_kv_sender, CommonKVSender):
                req.disagg_kv_sender.abort()
                req.disagg_kv_sender.poll()

    # ---- quarantine: pages of failed transfers are neither free nor a request's ----

    def _has_quarantine(self) -> bool:
        queue = getattr(self, "disagg_decode_transfer_queue", None)
        return queue is not None and bool(queue.quarantine)

    def flush_cache(self) -> bool:
        """Adds that a flush leaves pages in quarantine where they are, and begins the record of the peak anew."""
        self.kv_used_peak = 0
        if not self._has_quarantine():
            return super().flush_cache()
        return self.disagg_decode_transfer_queue.flush_around_quarantine(super().flush_cache)

    def self_check_during_idle(self) -> None:
        """Puts the leak check off while pages are in quarantine, which it would report as lost."""
        if not self._has_quarantine():
            super().self_check_during_idle()
