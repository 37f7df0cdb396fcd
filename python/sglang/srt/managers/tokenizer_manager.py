"""Serves requests: the other worker hears of what is refused.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.disaggregation.decode_prefix import compares_prompts, prompt_digest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.refused_requests import RefusedRequests
from sglang.srt.managers.worker_rest import wait_sent

__all__ = ["ReqState", "TokenizerManager"]


@dataclass
class ReqState(engine.ReqState):
    """The state of one prompt, which knows whether the scheduler has been told of it."""

    sent: bool = False
    # Of what was sent.
    prompt_tokens: int = 0


class TokenizerManager(RefusedRequests, engine.TokenizerManager):
    """Compares prompts with the other worker of a pair."""

    def _create_tokenized_object(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, *args, **kwargs):
        """With PD, makes the digest by which the workers compare a prompt, if they do; see `prompt_digests`."""
        message = super()._create_tokenized_object(obj, input_text, input_ids, input_embeds, mm_inputs, *args, **kwargs)
        in_pair = self.disaggregation_mode != DisaggregationMode.NULL
        if input_ids and in_pair and mm_inputs is None and compares_prompts():
            message.sampling_params.prompt_digest = len(input_ids), prompt_digest(input_ids, len(input_ids))
        return message

    async def sigterm_watchdog(self) -> None:
        """As in the engine, but that a prefill sends first what its clients have been answered for."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.server_args.tokenizer_worker_num == 1:
            await wait_sent(self)
        await super().sigterm_watchdog()
