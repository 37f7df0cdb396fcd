"""Errors of a batch that are one request's.

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
    """Raise on all ranks of ``group`` if one of them cannot make the logit processor that ``text`` says.

    group: on the CPU, of the ranks that have been given its request; all come here with it. To make a processor runs
    the client's code, which may go by what is another on each rank: files, memory, chance. Each batch makes it anew,
    with `Unmade` in place of what it cannot make. One collective for each such request, none for a rank alone. Raises
    what the making has raised here, else ValueError with a rank that knows why.
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
    """Why the logit processors of a step's requests failed, by their place in the batch. Takes them off the batch."""
    # With pipeline stages the result has them, else its output.
    found = (getattr(of, "failed_processors", None) for of in (result, getattr(result, "logits_output", None)))
    failed = next(filter(None, found), None)
    # A step of speculation leaves them with the batch.
    info = getattr(batch, "sampling_info", None)
    left = vars(info).pop("failed_processors", None) if info is not None else None
    return failed or left or {}


def without_token(result: Any) -> dict[int, str]:
    """The same for requests that no token was left for. Waits for the result, once, as is done next anyway."""
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
    """Give a request without ``token_ids_logprob`` an empty tensor beside those of a request with it.

    The engine has an empty list there and raises.
    """
    values = getattr(output, "next_token_token_ids_logprobs_val", None)
    if values:
        output.next_token_token_ids_logprobs_val = [torch.as_tensor(row) for row in values]


def fail_running(reqs: Any, reasons: Mapping[int, str]) -> None:
    """Have requests of a batch fail with the batch's result. reasons: by their place."""
    for place, reason in reasons.items():
        # Of a batch that is padded, the result has places that are nobody's.
        if place >= len(reqs) or reqs[place].finished():
            continue
        req = reqs[place]
        # What was sampled for it is no token of its grammar.
        req.grammar = None
        sender = getattr(req, "disagg_kv_sender", None)
        if isinstance(sender, CommonKVSender):
            sender.fail(AT_FAULT + reason)
        else:
            req.to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
