"""What one request of a batch asks for is told to no other; first tokens of prebuilt batches on decode.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import scheduler_output_processor_mixin as engine
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["SchedulerOutputProcessorMixin"]


class SchedulerOutputProcessorMixin(engine.SchedulerOutputProcessorMixin):
    """Sends requests with optional parts of their own in messages of their own."""

    # Whether a request has had hidden states, experts or other parts of its own in its messages, since the start: all
    # that run would have to be asked in every step.
    has_optional_parts = False

    def note_optional_parts(self, asked: Any = None, output: Any = None) -> None:
        """Take note of what a request ``asked`` for, or of what the ``output`` of a step has for its requests."""
        asks = getattr(asked, "return_hidden_states", False) or getattr(asked, "return_routed_experts", False)
        if asks or getattr(output, "customized_info", None):
            self.has_optional_parts = True

    def stream_output_generation(self, reqs, return_logprob, skip_req=None, is_idle_batch=False) -> None:
        """Gives each optional part of a message an entry for all its requests, or for none.

        The engine makes one for those that have asked for it only, and the tokenizer manager looks it up by the place
        among all: it ends, or tells one client what another has asked for.
        """
        if not self.has_optional_parts or not any(
            req.return_hidden_states or req.return_routed_experts or req.customized_info for req in reqs
        ):
            super().stream_output_generation(reqs, return_logprob, skip_req, is_idle_batch)
            return
        alike: dict[tuple, list] = {}
        for req in reqs:
            parts = bool(req.return_hidden_states), bool(req.return_routed_experts), *sorted(req.customized_info or ())
            alike.setdefault(parts, []).append(req)
        for group in alike.values():
            super().stream_output_generation(group, return_logprob, skip_req, is_idle_batch)

    def process_batch_result_prebuilt(self, batch) -> None:
        """Counts first tokens as reasoning tokens, and frees in one group (decode tree)."""
        for req in batch.reqs:
            if req.decode_prefix_len is not None and not req.retracted_stain:
                self._maybe_update_reasoning_tokens(req, req.output_ids[0])
        if not isinstance(self.tree_cache, DecodeRadixCache):
            return super().process_batch_result_prebuilt(batch)
        self.token_to_kv_pool_allocator.free_group_begin()
        super().process_batch_result_prebuilt(batch)
        self.token_to_kv_pool_allocator.free_group_end()
