"""Digests prompts in the tokenizer process.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.prompt_digests import compares_prompts, prompt_digest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Digests prompts."""

    def _create_tokenized_object(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, *args, **kwargs):
        """Adds the digest, if workers compare prompts; see `prompt_digests`."""
        message = super()._create_tokenized_object(obj, input_text, input_ids, input_embeds, mm_inputs, *args, **kwargs)
        in_pair = self.disaggregation_mode != DisaggregationMode.NULL
        if input_ids and in_pair and mm_inputs is None and compares_prompts():
            message.sampling_params.prompt_digest = len(input_ids), prompt_digest(input_ids, len(input_ids))
        return message
