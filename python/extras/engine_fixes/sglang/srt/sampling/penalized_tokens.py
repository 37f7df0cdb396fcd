"""Output tokens that penalties have received and receive next, on decode with the flag.

Penalties are frequency, presence, repetition and ``min_new_tokens``, which counts tokens. Each step passes them the
last token; with overlap the one before it, since the last is still on the device. The first such token is the prompt's
last.

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
    """Pass the tokens of the next overlapped step to the penalties of ``batch``; disable the engine's own call.

    The engine passes the last processed token. For a request whose KV has just arrived that is its first token, and
    again in the next step; the aggregated engine has not processed it by then. After an interleaved step it passes the
    last token twice and skips the one before.
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
    """The last token of a prompt. In place of an image's tokens the engine has a hash, which is skipped."""
    for token in (req.origin_input_ids[-1], req.origin_input_ids_unpadded[-1]):
        if 0 <= token < vocab_size:
            return token
    return 0


def _before_last(req: Req, vocab_size: int) -> int:
    """The token before the last sampled one, which has no KV yet. Without a decode prefix, the engine's choice."""
    if not req.output_ids:
        return _end_of_prompt(req, vocab_size)
    place = req.kv_committed_len - 1 - len(req.origin_input_ids)
    if req.decode_prefix_len is None or place >= len(req.output_ids):
        return req.output_ids[-1]
    return req.output_ids[place] if place >= 0 else _end_of_prompt(req, vocab_size)


def tell_earlier(batch: ScheduleBatch, place: int) -> None:
    """Pass all earlier output tokens of the retracted request at ``place`` to its penalties.

    Without the token that the next step passes.
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
    """Add ``tokens`` to a penalizer's state for the request at ``place``. state: the penalizer's attributes."""
    if "len_output_tokens" in state:
        state["len_output_tokens"][place] += len(tokens)
    if "cumulated_frequency_penalties" in state:
        row = state["cumulated_frequency_penalties"][place]
        row.scatter_add_(0, tokens, state["frequency_penalties"][place].expand(len(tokens)))
    for kind in ("presence", "repetition"):
        if f"cumulated_{kind}_penalties" in state:
            state[f"cumulated_{kind}_penalties"][place, tokens] = state[f"{kind}_penalties"][place]
