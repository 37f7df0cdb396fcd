"""Optional output of one request in a batch goes to no other; first tokens of prebuilt batches on decode.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import scheduler_output_processor_mixin as engine
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["SchedulerOutputProcessorMixin"]


class SchedulerOutputProcessorMixin(engine.SchedulerOutputProcessorMixin):
    """Sends requests with different optional outputs in separate messages."""

    # Whether any request had hidden states, experts or other optional output since the start; otherwise all running
    # requests would be checked in every step.
    has_optional_parts = False

    def note_optional_parts(self, asked: Any = None, output: Any = None) -> None:
        """Record optional output that a request ``asked`` for, or that the ``output`` of a step has."""
        asks = getattr(asked, "return_hidden_states", False) or getattr(asked, "return_routed_experts", False)
        if asks or getattr(output, "customized_info", None):
            self.has_optional_parts = True

    def stream_output_generation(self, reqs, return_logprob, skip_req=None, is_idle_batch=False) -> None:
        """Sends messages in which each optional output has an entry for all requests, or for none.

        The engine adds entries only for requests that asked, but the tokenizer manager reads them by the index among
        all requests: it raises, or one client receives another's output.
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
