"""Which slots a step of speculation reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .chain import chain_only


def table_to_flat(table: torch.Tensor, rows: torch.Tensor, begins: Any, lens: Any, starts: Any, out: Any) -> None:
    """Copy ``table[row, begin : begin + len]`` of each request to ``out``, from its start on."""
    for row, begin, length, start in zip(
        rows.tolist(), begins.tolist(), lens.tolist(), starts.tolist()[: len(rows)], strict=True
    ):
        out[start : start + length] = table[row, begin : begin + length]


def kv_indices_of(table: Any, rows: Any, lens: Any, indptr: Any, begins: Any, out: Any, stride: int) -> None:
    """``create_flashinfer_kv_indices_triton``."""
    table_to_flat(table, rows, torch.zeros_like(lens) if begins is None else begins, lens, indptr, out)


def table_from_flat(rows: Any, table: Any, begins: Any, ends: Any, slots: Any, *shape: int) -> None:
    """``assign_req_to_token_pool``: the slots of all requests, one after another, into their rows."""
    at = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[row, begin:end] = slots[at : at + end - begin].to(table.dtype)
        at += end - begin


def extend_slots(rows: Any, table: Any, begins: Any, ends: Any, out: Any, *shape: int) -> None:
    """``assign_extend_cache_locs``: the same the other way round."""
    lens = ends - begins
    table_to_flat(table, rows, begins, lens, lens.cumsum(0) - lens, out)


def draft_slots_to_table(
    rows: Any,
    table: Any,
    seq_lens: Any,
    extend_lens: Any,
    new_pages: Any,
    slots: Any,
    source: Any,
    target: Any,
    last_page_lens: Any,
    duplicates: int,
    width: int,
    topk: int,
    steps: int,
    *shape: int,
) -> None:
    """``assign_draft_cache_locs`` of a chain: each request's slots for its draft steps, into its row."""
    chain_only(topk)
    table_from_flat(rows, table, seq_lens, seq_lens + steps, slots)


def draft_slots_from_table(rows: Any, table: Any, seq_lens: Any, out: Any, width: int, topk: int, steps: int) -> None:
    """``assign_draft_cache_locs_page_size_1``."""
    extend_slots(rows, table, seq_lens, seq_lens + topk * steps, out)


class DraftDecodeIndices:
    """``generate_draft_decode_kv_indices``: of each draft step, the KV that it reads: the request's and the draft's."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        steps, _, topk = grid
        chain_only(topk)

        def fill(rows: Any, table: Any, seq_lens: Any, indices: Any, indptr: Any, *more: Any) -> None:
            for step in range(steps):
                ends = (seq_lens + step + 1).cumsum(0)
                indptr[step, 1 : len(rows) + 1] = ends
                lens = seq_lens + step + 1
                table_to_flat(table, rows, torch.zeros_like(lens), lens, ends - lens, indices[step])

        return fill


def extend_after_decode(
    verified_id: Any, seq_lens: Any, accept_lens: Any, positions: Any, new_verified_id: Any, upper: int
) -> None:
    """``create_extend_after_decode_spec_info``: positions of the accepted tokens, and the last of each request."""
    ends = accept_lens.cumsum(0)
    owner = torch.repeat_interleave(accept_lens)
    positions[: len(owner)] = torch.arange(len(owner)) - (ends - seq_lens)[owner]
    new_verified_id.copy_(verified_id[ends - 1])


def keep_page_in_use(seq_lens: Any, evict_mask: Any, page_size: int, num_draft_tokens: int, upper: int) -> None:
    """``align_evict_mask_to_page_size``: of what was not accepted, only whole pages are given back."""
    mask = evict_mask.view(-1, num_draft_tokens)
    for row, seq_len in zip(mask, seq_lens.tolist(), strict=True):
        accepted = num_draft_tokens - int(row.sum())
        start = (seq_len + accepted - 1) // page_size * page_size - seq_len
        row[max(start, 0) : min(start + page_size, num_draft_tokens)] = False


def last_verified(verified_id: Any, accept_lens: Any, new_verified_id: Any, num_draft_tokens: int) -> None:
    """``fill_new_verified_id``; verified_id: (requests, num_draft_tokens)."""
    ends = torch.arange(len(accept_lens)) * num_draft_tokens + accept_lens
    new_verified_id.copy_(verified_id.reshape(-1)[ends - 1])
