"""Logits of which no token can be chosen, and logit processors that raise, cost only their own requests the answer.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers import sampler as engine

logger = logging.getLogger(__name__)

__all__ = ["Sampler", "apply_custom_logit_processor"]


class Sampler(engine.Sampler):
    """A sampler that says for which requests it had nothing to choose from, and which logit processors have failed."""

    def forward(self, logits_output, sampling_info, *args, **kwargs):
        """Adds two things to the output, for the scheduler.

        ``failed_processors``: why each failed, by its key. ``hopeless``: (requests,) bool, without a finite logit; a
        grammar may allow no token. The engine samples from what is then no distribution, which ends the scheduler. It
        is looked for where a request can bring it about, and on a CPU.
        """
        logits = logits_output.next_token_logits
        drawn = not sampling_info.is_all_greedy and (sampling_info.logit_bias is not None or logits.is_cpu)
        # The mask itself has been applied, and taken off, by now.
        if drawn or any(grammar is not None for grammar in sampling_info.grammars or ()):
            # A NaN is the engine's to replace, where it was asked to.
            seen = logits.nan_to_num(-1e5, torch.inf, -torch.inf) if self.use_nan_detection else logits
            logits_output.hopeless = ~torch.isfinite(seen.max(dim=-1).values)
            logits.masked_fill_(logits_output.hopeless.unsqueeze(-1), 0.0)
        sampling_info.failed_processors = {}
        token_ids = super().forward(logits_output, sampling_info, *args, **kwargs)
        logits_output.failed_processors = sampling_info.failed_processors
        return token_ids


def apply_custom_logit_processor(logits: torch.Tensor, sampling_batch_info, num_tokens_in_batch: int = 1) -> None:
    """Replaces the engine's, in which the error of one processor ends the scheduler.

    logits: (requests * num_tokens_in_batch, vocabulary), changed in place. A processor that raises, or leaves a request
    no token to choose, changes nothing, and its requests are failed with the batch's result.
    """
    for key, (processor, mask) in sampling_batch_info.custom_logit_processor.items():
        rows = mask.repeat_interleave(num_tokens_in_batch)
        params = [sampling_batch_info.custom_params[i] for i in mask.nonzero(as_tuple=True)[0]]
        try:
            changed = processor(logits[rows], params)
            peak = changed.max(dim=-1).values
            # The greatest may be infinite where nothing is drawn.
            possible = peak > -torch.inf if sampling_batch_info.is_all_greedy else torch.isfinite(peak)
            if not possible.all():
                raise ValueError("it returned logits of which no token can be chosen")
            logits[rows] = changed
        except Exception as e:
            logger.error("Custom logit processor %s", type(processor).__name__, exc_info=e)
            reason = f"Custom logit processor {type(processor).__name__} failed: {type(e).__name__}: {e}"
            failed = getattr(sampling_batch_info, "failed_processors", None)
            if failed is None:
                raise
            failed[key] = reason
