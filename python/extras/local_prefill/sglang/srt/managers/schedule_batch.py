"""Batches of local prefill steps.

Upstream: none is known.
"""

from __future__ import annotations

import torch
from sglang.srt.managers import schedule_batch as engine

__all__ = ["ScheduleBatch", "alloc_for_extend"]


def alloc_for_extend(batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Use the slots that a local prefill step got at admission; other batches are allocated by the engine.

    Returns the slots that the step writes (int64, ``extend_num_tokens``), and the req_to_token rows as an int64 tensor
    and as a list.
    """
    if not batch.has_slots:
        return engine.alloc_for_extend(batch)
    rows = [req.req_pool_idx for req in batch.reqs]
    table = batch.req_to_token_pool.req_to_token
    places = zip(rows, batch.prefix_lens, batch.extend_lens, strict=True)
    slots = torch.cat([table[row, start : start + count] for row, start, count in places])
    return slots.to(torch.int64), torch.tensor(rows, dtype=torch.int64).to(batch.device), rows


class ScheduleBatch(engine.ScheduleBatch):
    """A batch that may be a local prefill step."""

    # Whether its slots are allocated already; and the number of the local prefill step, from 1 on.
    has_slots: bool = False
    prompt_step: int = 0

    def copy(self) -> ScheduleBatch:
        """Copies both fields."""
        batch = super().copy()
        batch.has_slots, batch.prompt_step = self.has_slots, self.prompt_step
        return batch
