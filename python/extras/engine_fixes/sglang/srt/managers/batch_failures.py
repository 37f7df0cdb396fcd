"""Errors in a batch that are caused by one request.

Upstream: none is known for logit processors; sgl-project/sglang#33206 (open) aborts requests whose logits are all NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.common.conn import CommonKVSender
from sglang.srt.disaggregation.common.delta_sender import AT_FAULT
from sglang.srt.disaggregation.decode_radix.tp_agreement import told_by_all
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

__all__ = ["check_processor", "fail_running", "failed_processors", "pad_token_logprobs", "without_token"]

NO_TOKEN = "No token can be chosen: the grammar, logit_bias or the model leave none"


def check_processor(text: str, group: dist.ProcessGroup) -> None:
    """Raise on all ranks of ``group`` if one of them cannot make the logit processor ``text``.

    group: CPU group of the ranks that have the request; all call this. Making a processor runs the client's code, whose
    result may differ between ranks (files, memory, randomness). Each batch makes it again, with `Unmade` on failure.
    One collective per such request, none on a single rank. Raises this rank's error, else ValueError with the number
    and reason of a failed rank.
    """
    error = None
    try:
        CustomLogitProcessor.from_str(text)
    except Exception as e:
        error = e
    if dist.get_world_size(group) > 1:
        made = torch.tensor([error is None], dtype=torch.int32)
        dist.all_reduce(made, op=dist.ReduceOp.MIN, group=group)
        if not made.item():
            told = told_by_all(["" if error is None else f"{type(error).__name__}: {error}"], group)
            rank, reason = next((n, why) for n, (why,) in enumerate(told) if why)
            error = error or ValueError(f"the custom logit processor could not be made on TP rank {rank}: {reason}")
    if error is not None:
        raise error


def failed_processors(batch: Any, result: Any) -> dict[int, str]:
    """Reasons of failed logit processors in a step, by batch index. Removes them from the batch."""
    # With pipeline stages they are on the result, else on its output.
    found = (getattr(of, "failed_processors", None) for of in (result, getattr(result, "logits_output", None)))
    failed = next(filter(None, found), None)
    # A speculative step leaves them on the batch.
    info = getattr(batch, "sampling_info", None)
    left = vars(info).pop("failed_processors", None) if info is not None else None
    return failed or left or {}


def without_token(result: Any) -> dict[int, str]:
    """Reasons of requests without a possible token. Waits for the result once, as the engine does next anyway."""
    found = (getattr(of, "hopeless", None) for of in (result, getattr(result, "logits_output", None)))
    hopeless = next((flags for flags in found if flags is not None), None)
    if hopeless is None:
        return {}
    if getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()
    elif isinstance(getattr(result, "next_token_ids", None), torch.Tensor):
        result.next_token_ids = result.next_token_ids.cpu()
    return {place: NO_TOKEN for place, none in enumerate(hopeless.tolist()) if none}


def pad_token_logprobs(output: Any) -> None:
    """Use an empty tensor for a request without ``token_ids_logprob`` in a batch that has others with it.

    The engine has an empty list there and raises.
    """
    values = getattr(output, "next_token_token_ids_logprobs_val", None)
    if values:
        output.next_token_token_ids_logprobs_val = [torch.as_tensor(row) for row in values]


def fail_running(reqs: Any, reasons: Mapping[int, str]) -> None:
    """Fail requests of a batch with the batch's result. reasons: by batch index."""
    for place, reason in reasons.items():
        # A padded batch has entries without a request.
        if place >= len(reqs) or reqs[place].finished():
            continue
        req = reqs[place]
        # Its sampled token does not follow its grammar.
        req.grammar = None
        sender = getattr(req, "disagg_kv_sender", None)
        if isinstance(sender, CommonKVSender):
            sender.fail(AT_FAULT + reason)
        else:
            req.to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
