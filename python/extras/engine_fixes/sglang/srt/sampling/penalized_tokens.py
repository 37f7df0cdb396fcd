"""Which tokens of an answer its penalties have been told of, and are told next, on decode with the flag.

Penalties are of frequency, presence and repetition; ``min_new_tokens`` is one too, which counts what it is told.
Without overlap each step tells them the last token, with overlap the one before: the last is still on the device. The
first time the latter is the prompt's last token.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

__all__ = ["tell_delayed", "tell_earlier"]


@contextmanager
def tell_delayed(batch: ScheduleBatch) -> Iterator[None]:
    """Tell the penalties of ``batch`` what its next overlapped step has to; the engine tells them nothing meanwhile.

    The engine tells the last token that has been processed. Of one whose KV has come that is its first token, twice:
    the aggregated engine has not processed it by then. And where another step came between two, it is the last token
    twice, and never the one before.
    """
    penalties = batch.sampling_info.penalizer_orchestrator
    tokens = [_before_last(req, penalties.vocab_size) for req in batch.reqs]
    penalties.cumulate_output_tokens(torch.tensor(tokens, dtype=torch.int64, device=batch.device))
    penalties.is_required = False
    try:
        yield
    finally:
        penalties.is_required = True


def _end_of_prompt(req: Req, vocab_size: int) -> int:
    """The last token of a prompt. Where that is of an image the engine has a hash in its place, which is no token."""
    for token in (req.origin_input_ids[-1], req.origin_input_ids_unpadded[-1]):
        if 0 <= token < vocab_size:
            return token
    return 0


def _before_last(req: Req, vocab_size: int) -> int:
    """The token before the last one that has been sampled, which has no KV yet. Of others, as the engine has it."""
    if not req.output_ids:
        return _end_of_prompt(req, vocab_size)
    place = req.kv_committed_len - 1 - len(req.origin_input_ids)
    if req.decode_prefix_len is None or place >= len(req.output_ids):
        return req.output_ids[-1]
    return req.output_ids[place] if place >= 0 else _end_of_prompt(req, vocab_size)


def tell_earlier(batch: ScheduleBatch, place: int) -> None:
    """Tell the penalties of the request at ``place``, which has been retracted, what they knew before.

    All that is there but what the next step tells.
    """
    req, penalties = batch.reqs[place], batch.sampling_info.penalizer_orchestrator
    known = req.output_ids[:-1]
    if batch.enable_overlap:
        known = [_end_of_prompt(req, penalties.vocab_size), *req.output_ids][:-2]
    tokens = torch.tensor(known, dtype=torch.int64, device=batch.device)
    for penalizer in penalties.penalizers.values():
        if penalizer.is_prepared():
            _add(vars(penalizer), place, tokens)


def _add(state: dict[str, Any], place: int, tokens: torch.Tensor) -> None:
    """Add ``tokens`` to what a penalizer of the engine has of the request at ``place``. state: its attributes."""
    if "len_output_tokens" in state:
        state["len_output_tokens"][place] += len(tokens)
    if "cumulated_frequency_penalties" in state:
        row = state["cumulated_frequency_penalties"][place]
        row.scatter_add_(0, tokens, state["frequency_penalties"][place].expand(len(tokens)))
    for kind in ("presence", "repetition"):
        if f"cumulated_{kind}_penalties" in state:
            state[f"cumulated_{kind}_penalties"][place, tokens] = state[f"{kind}_penalties"][place]
