"""Logits without a possible token, and logit processors that raise, fail only their own requests.

Upstream: none is known for logit processors; sgl-project/sglang#33206 (open) aborts requests whose logits are all NaN.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.layers import sampler as engine

logger = logging.getLogger(__name__)

__all__ = ["Sampler", "apply_custom_logit_processor"]


class Sampler(engine.Sampler):
    """A sampler that reports requests without a possible token or with a failed logit processor."""

    def forward(self, logits_output, sampling_info, *args, **kwargs):
        """Adds two fields to the output, for the scheduler.

        ``failed_processors``: reasons by batch index. ``hopeless``: bool (requests,), whether no token was possible:
        then token 0 is chosen although it is forbidden. This needs no pass over the logits and no wait for the device.
        """
        sampling_info.failed_processors, sampling_info.first_is_forbidden = {}, None
        sampling_info.replaces_nan = self.use_nan_detection
        token_ids = super().forward(logits_output, sampling_info, *args, **kwargs)
        logits_output.failed_processors = sampling_info.failed_processors
        if sampling_info.first_is_forbidden is not None:
            logits_output.hopeless = (sampling_info.first_is_forbidden & (token_ids == 0)).to("cpu", non_blocking=True)
        return token_ids

    def _preprocess_logits(self, logits, sampling_info):
        """Makes token 0 possible if a grammar, or biases and ``min_new_tokens``, forbid all tokens.

        Otherwise the engine samples from an invalid distribution, which ends the scheduler; on a CPU also from NaN.
        """
        logits, info = super()._preprocess_logits(logits, sampling_info), sampling_info
        drawn = not info.is_all_greedy and hasattr(info, "first_is_forbidden")
        penalties = getattr(info, "penalizer_orchestrator", None)
        penalized = penalties.is_required if penalties else getattr(info, "acc_additive_penalties", None) is not None
        if any(info.grammars or ()) or (drawn and (penalized or info.logit_bias is not None or logits.is_cpu)):
            first = logits[:, 0]
            if drawn and logits.is_cpu:
                logits[first.isnan()] = -torch.inf
            info.first_is_forbidden = first == -torch.inf
            if drawn:
                first.clamp_(min=-1e30)
        return logits


def apply_custom_logit_processor(logits: torch.Tensor, sampling_batch_info, num_tokens_in_batch: int = 1) -> None:
    """Replaces the engine's, in which an error of one processor ends the scheduler.

    logits: (requests * num_tokens_in_batch, vocabulary), changed in place. Requests that share a processor are passed
    to it together; if that raises or leaves one of them no token, each separately. A request that fails keeps its
    logits and is entered in ``failed_processors`` by batch index, to be failed with the batch's result. So is one that
    fails on another TP rank.
    """
    info = sampling_batch_info
    greedy, params, replaces_nan = info.is_all_greedy, info.custom_params, getattr(info, "replaces_nan", False)
    # A speculative step does not call `Sampler.forward`.
    vars(info).setdefault("failed_processors", {})
    # By batch index: why requests that share a processor were passed to it separately.
    apart: dict[int, str] = {}
    for processor, mask in sampling_batch_info.custom_logit_processor.values():
        places = [place for place, asks in enumerate(mask.tolist()) if asks]
        groups = [places]
        while groups:
            group = groups.pop()
            rows = [i * num_tokens_in_batch + j for i in group for j in range(num_tokens_in_batch)]
            try:
                logits[rows] = _processed(processor, logits[rows], [params[i] for i in group], greedy, replaces_nan)
            except Exception as e:
                reason = f"Custom logit processor {type(processor).__name__} failed: {type(e).__name__}: {e}"
                if len(group) > 1:
                    together = f"{reason} (on this TP rank only, for {len(group)} requests together)"
                    apart |= dict.fromkeys(group, together)
                    groups = [[i] for i in group]
                    continue
                logger.error("Custom logit processor %s", type(processor).__name__, exc_info=e)
                sampling_batch_info.failed_processors[group[0]] = reason
    _agree_on_failures(logits, info, apart, num_tokens_in_batch)


def _agree_on_failures(logits: torch.Tensor, info: Any, apart: Mapping[int, str], num_tokens: int) -> None:
    """Fail on all TP ranks what failed on one: otherwise their batches differ from then on, and the worker hangs.

    apart: reasons of requests that were passed to a processor separately. If other ranks passed one together with
    others, it fails too, since their logits may differ. It gets the same token on all ranks: it may enter their trees.

    One collective on the device, like the engine's for tokens, over the ranks that sample the same requests; only in
    steps with logit processors, and never on a single rank.
    """
    group = engine.get_attention_tp_group() if engine.is_dp_attention_enabled() else engine.get_tp_group()
    if group.world_size == 1:
        return
    failed, processors = info.failed_processors, info.custom_logit_processor.values()
    places = range(len(logits) // num_tokens)
    came = [2 if place in failed else int(place in apart) for place in places]
    reduced = torch.tensor([came, [-one for one in came]], dtype=torch.int32, device=logits.device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group.device_group)
    for place, most, least in zip(places, *reduced.tolist(), strict=True):
        if most == -least:
            continue
        if place not in failed:
            name = next(type(processor).__name__ for processor, mask in processors if mask[place])
            elsewhere = f"Custom logit processor {name} failed: on another TP rank, see its log"
            failed[place] = apart[place] if most == 1 and place in apart else elsewhere
            logger.error(failed[place])
        logits[place * num_tokens : (place + 1) * num_tokens] = 0.0


def _processed(processor, logits: torch.Tensor, params: list, greedy: bool, replaces_nan: bool = False) -> torch.Tensor:
    """The processor's result for a copy of some requests' logits. Raises its errors, and if no token is possible."""
    changed = processor(logits, params)
    # As the engine replaces NaN with ``--enable-nan-detection``.
    peak = (changed.nan_to_num(-1e5, torch.inf, -torch.inf) if replaces_nan else changed).max(dim=-1).values
    # The maximum may be infinite in greedy decoding.
    possible = peak > -torch.inf if greedy else torch.isfinite(peak)
    if not possible.all():
        raise ValueError("no token can be chosen from the logits it returned")
    return changed
