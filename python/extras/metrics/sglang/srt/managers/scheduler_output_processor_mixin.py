"""What a decode worker says of what it held of a prompt.

Upstream: sgl-project/sglang#25973 (merged) counts cached tokens once. What decode held: none is known.
"""

from __future__ import annotations

from functools import cached_property

from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.managers import scheduler_output_processor_mixin as engine

__all__ = ["SchedulerOutputProcessorMixin"]


class SchedulerOutputProcessorMixin(engine.SchedulerOutputProcessorMixin):
    """Says what decode held of a prompt."""

    def _get_cached_tokens_details(self, req) -> dict | None:
        """Adds what decode held and what was sent, apart from prefill's hit; ``cached_tokens`` is the greater hit.

        ``decode_prefix``, ``transferred`` and ``decode_computed`` (there only if decode computes the rest itself) are
        tokens and add up to the prompt; what a tier says of the first comes behind them; the bytes are those of all TP
        ranks.

        Asked for every message of every request, and the same in all of them once it decodes.
        """
        if req.decode_prefix_len is None:
            return super()._get_cached_tokens_details(req)
        # What a resume finds is another matter.
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
        """The engine's ``details`` of a request that decode has admitted, and what is ours."""
        prefix_len, sent = req.transfer_prefix_len, len(req.origin_input_ids) - req.transfer_prefix_len
        computed = {"decode_computed": sent} if req.computed_here else {}
        sent = 0 if computed else sent
        page_size, page_bytes = self.token_to_kv_pool_allocator.page_size, self._page_bytes
        return {
            # Without a hit of prefill, the engine takes ``cached_tokens`` for one.
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
        """Bytes of one page of KV over all layers and TP ranks."""
        return sum(self.disagg_decode_prealloc_queue.kv_manager.kv_args.kv_item_lens) * self.attn_tp_size
