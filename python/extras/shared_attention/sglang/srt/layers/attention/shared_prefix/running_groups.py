"""Shared prefixes of a batch on a device, found on the host without waiting for the device.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_pd_radix.supplied.shared_prefix.prefixes import RunningPrefixes
from sglang_pd_radix.supplied.shared_prefix.written_rows import WrittenRows

#: Rows copied in one step; further ones follow in the next steps. Bounds a step's cost in a burst of requests.
MOST_COPIES = 16


class RowCopies:
    """Copies in flight of ``req_to_token`` rows to the host."""

    def __init__(self, table: torch.Tensor, lens: dict[int, int]) -> None:
        on_gpu = table.is_cuda
        self.rows: dict[int, torch.Tensor] = {}
        for row, length in lens.items():
            slots = table[row, :length]
            self.rows[row] = torch.empty(length, dtype=table.dtype, pin_memory=on_gpu).copy_(slots, non_blocking=on_gpu)
        # In the stream of the step: earlier writes of the scheduler are included; a later write is recorded and
        # invalidates the copy.
        self._event = torch.cuda.Event() if on_gpu else None
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or self._event.query()


class RunningGroups:
    """Prefix tree of the running rows of a device table.

    A row is copied to the host when it enters the batch. Until the copy arrives, after a step or two, it is read
    separately: no step waits. Later a row changes only at its end, or the change is recorded by `WrittenRows`.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        self.prefixes = RunningPrefixes(page_size)
        self._table = pool.req_to_token
        self._written = WrittenRows(pool)
        self._coming: list[RowCopies] = []
        self._left = False
        self._rows: list[int] = []
        self._expected: tuple[list[int], list[int]] | None = None

    def expect(self, batch: Any) -> None:
        """Record the rows of the next batch, which a backend gets on the device only."""
        self._expected = None
        if batch.forward_mode.is_decode() and batch.spec_info is None and batch.seq_lens_cpu is not None:
            self._expected = [req.req_pool_idx for req in batch.reqs], batch.seq_lens_cpu.tolist()

    def take(self) -> tuple[list[int], list[int]] | None:
        """Rows and lengths of the batch whose metadata is built; None if unknown. Valid for one batch."""
        expected, self._expected = self._expected, None
        if expected is None or None in expected[0] or len(set(expected[0])) < len(expected[0]):
            return None  # the engine's dummy batches repeat one row
        return expected

    def follow(self, rows: Sequence[int], lens: Sequence[int]) -> bool:
        """Update the tree to these rows, as far as their copies have arrived. Returns False if nothing changed."""
        written = self._written.rows
        same = rows == self._rows and not self._left and written.isdisjoint(rows)
        if same and not any(copies.arrived() for copies in self._coming):
            return False
        running = dict(zip(rows, lens, strict=True))
        for row in self.prefixes.rows():
            if row not in running or row in written:
                self.prefixes.remove(row)
        for copies in self._coming:
            for row in list(copies.rows):
                if row not in running or row in written:
                    del copies.rows[row]
        written.clear()
        known = self.prefixes.rows().union(*(copies.rows for copies in self._coming))
        unknown = [row for row in rows if row not in known]
        self._left = len(unknown) > MOST_COPIES
        if unknown:
            self._coming.append(RowCopies(self._table, {row: running[row] for row in unknown[:MOST_COPIES]}))
        waiting = []
        for copies in self._coming:
            if copies.arrived():
                for row, slots in copies.rows.items():
                    self.prefixes.add(row, slots.numpy())
            elif copies.rows:
                waiting.append(copies)
        self._coming, self._rows = waiting, list(rows)
        return True
