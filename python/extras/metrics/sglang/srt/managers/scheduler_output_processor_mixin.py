"""Reports decode's prefix in ``cached_tokens_details``.

Upstream: sgl-project/sglang#25973 (merged) counts cached tokens once. What decode held: none is known.
"""

from __future__ import annotations

from functools import cached_property

from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.managers import scheduler_output_processor_mixin as engine

__all__ = ["SchedulerOutputProcessorMixin"]


class SchedulerOutputProcessorMixin(engine.SchedulerOutputProcessorMixin):
    """Adds decode's prefix to the response."""

    def _get_cached_tokens_details(self, req) -> dict | None:
        """Adds decode's prefix and the sent tokens to prefill's hit; ``cached_tokens`` is the larger hit.

        ``decode_prefix``, ``transferred`` and ``decode_computed`` (only if decode computes the rest) are tokens and add
        up to the prompt. A tier's part of ``decode_prefix`` follows. Bytes are those of all TP ranks.

        Called for every message; once a request decodes the result is cached.
        """
        if req.decode_prefix_len is None:
            return super()._get_cached_tokens_details(req)
        # A resume has a new prefix.
        resumed, details = getattr(req, "cached_tokens_details", (None, None))
        if resumed == req.retraction_count:
            return details
        details = super()._get_cached_tokens_details(req)
        if req.transfer_prefix_len is None:
            return details
        details = self._with_decode_prefix(req, details)
        if req.output_ids:
            req.cached_tokens_details = req.retraction_count, details
        return details

    def _with_decode_prefix(self, req, details: dict | None) -> dict:
        """The engine's ``details`` of an admitted request, with ours."""
        prefix_len, sent = req.transfer_prefix_len, len(req.origin_input_ids) - req.transfer_prefix_len
        computed = {"decode_computed": sent} if req.computed_here else {}
        sent = 0 if computed else sent
        page_size, page_bytes = self.token_to_kv_pool_allocator.page_size, self._page_bytes
        return {
            # Without a prefill hit the engine takes ``cached_tokens`` for one.
            **(details if details and req.prefill_cached_tokens else {"device": 0, "host": 0}),
            "decode_prefix": prefix_len,
            **self.tree_cache.tier.cached_details(req),
            **computed,
            "transferred": sent,
            "transferred_bytes": pages(sent, page_size) * page_bytes,
            "saved_bytes": prefix_len // page_size * page_bytes,
        }

    @cached_property
    def _page_bytes(self) -> int:
        """Bytes of a KV page over all layers and TP ranks."""
        return sum(self.disagg_decode_prealloc_queue.kv_manager.kv_args.kv_item_lens) * self.attn_tp_size
