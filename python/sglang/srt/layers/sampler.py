"""Logits of which no token can be chosen, and logit processors that raise, cost only their own requests the answer.

Upstream: none is known for logit processors; sgl-project/sglang#33206 (open) aborts requests whose logits are all NaN.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers import sampler as engine

logger = logging.getLogger(__name__)

__all__ = ["Sampler", "apply_custom_logit_processor"]


class Sampler(engine.Sampler):
    """A sampler that says for which requests it had nothing to choose from, and whose logit processor has failed."""

    def forward(self, logits_output, sampling_info, *args, **kwargs):
        """Adds two things to the output, for the scheduler.

        ``failed_processors``: why, by the request's place. ``hopeless``: (requests,) bool, without a finite logit; a
        grammar may allow no token. The engine samples from what is then no distribution, which ends the scheduler. It
        is looked for where a request can bring it about, and on a CPU.
        """
        logits = logits_output.next_token_logits
        drawn = not sampling_info.is_all_greedy and (sampling_info.logit_bias is not None or logits.is_cpu)
        # The mask itself has been applied, and taken off, by now.
        if drawn or any(grammar is not None for grammar in sampling_info.grammars or ()):
            seen = _without_nan(logits) if self.use_nan_detection else logits
            logits_output.hopeless = ~torch.isfinite(seen.max(dim=-1).values)
            logits.masked_fill_(logits_output.hopeless.unsqueeze(-1), 0.0)
        sampling_info.failed_processors = {}
        sampling_info.replaces_nan = self.use_nan_detection
        token_ids = super().forward(logits_output, sampling_info, *args, **kwargs)
        logits_output.failed_processors = sampling_info.failed_processors
        return token_ids


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    """As the engine replaces them, where it was asked to (``--enable-nan-detection``)."""
    return logits.nan_to_num(-1e5, torch.inf, -torch.inf)


def apply_custom_logit_processor(logits: torch.Tensor, sampling_batch_info, num_tokens_in_batch: int = 1) -> None:
    """Replaces the engine's, in which the error of one processor ends the scheduler.

    logits: (requests * num_tokens_in_batch, vocabulary), changed in place. Requests that share a processor are given to
    it together, and where that raises or leaves one of them no token, each by itself. Who fails by itself keeps the
    logits it had, and is noted in ``failed_processors`` by its place, to be failed with the batch's result.
    """
    info = sampling_batch_info
    greedy, params, replaces_nan = info.is_all_greedy, info.custom_params, getattr(info, "replaces_nan", False)
    if getattr(sampling_batch_info, "failed_processors", None) is None:
        # A step of speculation, which does not come from `Sampler.forward`.
        sampling_batch_info.failed_processors = {}
    for processor, mask in sampling_batch_info.custom_logit_processor.values():
        places = mask.nonzero(as_tuple=True)[0].tolist()
        groups = [places]
        while groups:
            group = groups.pop()
            rows = [i * num_tokens_in_batch + j for i in group for j in range(num_tokens_in_batch)]
            try:
                logits[rows] = _processed(processor, logits[rows], [params[i] for i in group], greedy, replaces_nan)
            except Exception as e:
                if len(group) > 1:
                    groups = [[i] for i in group]
                    continue
                logger.error("Custom logit processor %s", type(processor).__name__, exc_info=e)
                reason = f"Custom logit processor {type(processor).__name__} failed: {type(e).__name__}: {e}"
                sampling_batch_info.failed_processors[group[0]] = reason


def _processed(processor, logits: torch.Tensor, params: list, greedy: bool, replaces_nan: bool = False) -> torch.Tensor:
    """What the processor makes of a copy of some requests' logits. Raises what it raises, and for logits of which no
    token can be chosen."""
    changed = processor(logits, params)
    peak = (_without_nan(changed) if replaces_nan else changed).max(dim=-1).values
    # The greatest may be infinite where nothing is drawn.
    possible = peak > -torch.inf if greedy else torch.isfinite(peak)
    if not possible.all():
        raise ValueError("it returned logits of which no token can be chosen")
    return changed
