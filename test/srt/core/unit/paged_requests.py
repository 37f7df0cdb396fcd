"""Requests that decode over a paged pool, for the tests of attention backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


class PagedRequests:
    """To be mixed into what has a pool, its ``free_pages``, and the length of each request by its row."""

    page: int
    lens: dict[int, int]
    pool: ReqToTokenPool
    kv: Any
    free_pages: list[int]

    def new_pages(self, tokens: int, contiguous: bool = False) -> torch.Tensor:
        count = -(-tokens // self.page)
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        if contiguous:
            taken.sort()
        slots = (np.array(taken, np.int64)[:, None] * self.page + np.arange(self.page)).reshape(-1)
        return torch.from_numpy(slots)

    def enter(self, row: int, shared: torch.Tensor, own: int) -> None:
        """Admit a request with these slots before ``own`` tokens (at least 1) of its own."""
        slots = torch.cat([shared, self.new_pages(own)])[: len(shared) + own]
        self.pool.write((row, slice(0, len(slots))), slots.to(torch.int32))
        self.lens[row] = len(slots)

    def leave(self, row: int, shared: int) -> None:
        """End a request; its own pages go to the next one."""
        pages = sorted(set((self.slots(row)[shared:] // self.page).tolist()))
        self.free_pages = pages + self.free_pages
        del self.lens[row]

    def slots(self, row: int) -> torch.Tensor:
        return self.pool.req_to_token[row, : self.lens[row]].long().cpu()

    def next_batch(self, rows: list[int] | None = None) -> ForwardBatch:
        """The next token of each request."""
        rows = list(self.lens) if rows is None else rows
        last = []
        for row in rows:
            length = self.lens[row]
            slot = int(self.pool.req_to_token[row, length - 1]) + 1
            if length % self.page == 0:
                slot = int(self.new_pages(1)[0])
            last.append(slot)
            self.lens[row] += 1
        lens = torch.tensor([self.lens[row] for row in rows])
        index, where, on_device = (each.to(self.pool.device) for each in (torch.tensor(rows), torch.tensor(last), lens))
        self.pool.write((index, on_device - 1), where.to(torch.int32))
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=torch.zeros(len(rows), dtype=torch.int64),
            req_pool_indices=index,
            seq_lens=on_device,
            seq_lens_cpu=lens,
            out_cache_loc=where,
            seq_lens_sum=int(lens.sum()),
            req_to_token_pool=self.pool,
            token_to_kv_pool=self.kv,
        )
