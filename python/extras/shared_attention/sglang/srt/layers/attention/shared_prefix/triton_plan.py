"""The shared pieces of KV of a step and the queries of each, as one array for the kernels.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from sglang_pd_radix.supplied.shared_prefix.levels import Costs, LayerShape, Level, choose_levels
from sglang_pd_radix.supplied.shared_prefix.prefixes import RunningPrefixes

Ints = np.ndarray[Any, np.dtype[np.int64]]

#: Partial results of a step, at most, per request on average. Bounds their memory.
PARTS = 4
#: Least tokens of a piece: a partial result takes as many bytes as several tokens.
PIECE_TOKENS = 256

# Layout of the array: a header of three numbers, then per-request values in an array of fixed size.
HEADER = 4
ITEM = 6


@dataclass(frozen=True)
class Tiling:
    """Tiling for a device: query rows of a product, tokens of a loop iteration, programs that keep the device busy."""

    group: int
    kv_heads: int
    block_rows: int
    block_tokens: int
    programs: int

    def most_items(self, parts: int) -> int:
        """Items, at most, of a plan with ``parts`` partial results: each piece has two queries or more, and may have a
        last, partial block."""
        return parts // 2 + parts * self.group // self.block_rows


def make_tiling(group: int, kv_heads: int, dim: int, element_size: int, processors: int) -> Tiling:
    """The largest tiling for heads of ``dim`` numbers that compiles without spilling registers (sm_80 and sm_90).

    Two programs per processor of the device, since their times differ.
    """
    narrow, half = dim <= 128, element_size == 2
    rows = 64 if narrow and half else 32 if narrow or half else 16
    return Tiling(group, kv_heads, rows, 64 if narrow and half else 32, 2 * max(1, processors))


@dataclass(frozen=True)
class SharedPlan:
    """begins: start of each request's own part. queries: batch position of each partial result's request.

    sources: partial results of each request, concatenated; ``ends`` are their ends. items, one per program and KV head:
    row, start and end of the piece, its first partial result, the block of its query rows, its number of queries.
    """

    begins: Ints
    queries: Ints
    sources: Ints
    ends: Ints
    items: Ints

    @property
    def saved(self) -> int:
        """Tokens saved by reading a piece once for all its queries."""
        first = self.items[self.items[:, 4] == 0]
        return int(((first[:, 2] - first[:, 1]) * (first[:, 5] - 1)).sum())

    def gain(self, shape: LayerShape, costs: Costs) -> float:
        """Nanoseconds that a layer saves by sharing."""
        return self.saved * shape.kv_bytes * costs.byte - len(self.queries) * costs.query

    def packed(self, capacity: int) -> np.ndarray:
        """One int32 array with capacity for ``capacity`` requests: a graph needs fixed positions.

        [items, where queries begin, where items begin, 0], begins[capacity], starts of sources[capacity + 1], sources,
        queries, items.
        """
        requests, parts = len(self.begins), len(self.queries)
        starts = HEADER + capacity
        sources = starts + capacity + 1
        queries, items = sources + parts, sources + 2 * parts
        out = np.zeros(items + self.items.size, np.int32)
        out[:3] = len(self.items), queries, items
        out[HEADER : HEADER + requests] = self.begins
        out[starts + 1 : starts + 1 + requests] = self.ends
        out[starts + 1 + requests : sources] = parts
        out[sources:queries] = self.sources
        out[queries:items] = self.queries
        out[items:] = self.items.reshape(-1)
        return out


def nothing_shared() -> SharedPlan:
    none = np.empty(0, np.int64)
    return SharedPlan(none, none, none, none, np.empty((0, ITEM), np.int64))


def levels_within(prefixes: RunningPrefixes, shape: LayerShape, costs: Costs, most_parts: int) -> list[Level]:
    """The levels to share, with at most ``most_parts`` partial results."""
    levels = choose_levels(prefixes, shape, costs)
    while sum(len(level.rows) for level in levels) > most_parts:
        costs = replace(costs, query=4 * costs.query + 1)
        levels = choose_levels(prefixes, shape, costs)
    return levels


def make_plan(levels: Sequence[Level], rows: Sequence[int], tiling: Tiling, most_parts: int) -> SharedPlan:
    """Cut levels into pieces of about equal size, so that there are enough programs."""
    index = {row: i for i, row in enumerate(rows)}
    members = np.fromiter(map(index.__getitem__, chain.from_iterable(level.rows for level in levels)), np.int64)
    start = np.array([level.start for level in levels])
    end = np.array([level.end for level in levels])
    count = np.array([len(level.rows) for level in levels])
    blocks = -(-count * tiling.group // tiling.block_rows)

    begins = np.zeros(len(rows), np.int64)
    np.maximum.at(begins, members, np.repeat(end, count))

    work = int(((end - start) * blocks).sum()) * tiling.kv_heads
    tokens = max(PIECE_TOKENS, _rounded_up(work // tiling.programs + 1, tiling.block_tokens))
    while True:
        pieces = -(-(end - start) // tokens)
        parts = int((pieces * count).sum())
        if parts <= most_parts or pieces.max() == 1:
            break
        tokens *= 2
    # All pieces of a level but the last have the same length, in whole iterations of the kernel's loop.
    length = _rounded_up(-(-(end - start) // pieces), tiling.block_tokens)
    pieces = -(-(end - start) // length)

    level = np.repeat(np.arange(len(levels)), pieces)
    piece_start = start[level] + _within(pieces) * length[level]
    piece_end = np.minimum(piece_start + length[level], end[level])
    width = count[level]
    first = np.cumsum(width) - width
    queries = members[np.repeat((np.cumsum(count) - count)[level], width) + _within(width)]

    piece = np.repeat(np.arange(len(level)), blocks[level])
    row = np.asarray(rows)[queries[first]]
    items = np.stack(
        [row[piece], piece_start[piece], piece_end[piece], first[piece], _within(blocks[level]), width[piece]], axis=1
    )
    sources = np.argsort(queries, kind="stable")
    ends = np.cumsum(np.bincount(queries, minlength=len(rows)))
    return SharedPlan(begins, queries, sources, ends, items)


def _rounded_up(value: Any, to: int) -> Any:
    return -(-value // to) * to


def _within(counts: Ints) -> Ints:
    """0 to n - 1 for each n."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
