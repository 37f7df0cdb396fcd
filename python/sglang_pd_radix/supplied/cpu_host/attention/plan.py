"""The plan of a step: which pieces of KV there are, which go into one block, and where they lie in the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_pd_radix.supplied.shared_prefix.levels import Level

from .kernel import Block, Plan

Ints = np.ndarray[Any, np.dtype[np.int64]]

#: What is gathered for one block at most, if it is not a single piece: it should stay in the caches of a core.
BLOCK_BYTES = 4 << 20
#: A longer piece is cut, so that threads can share a single request, and its memory is bounded.
PIECE_TOKENS = 1024
#: A shared run of slots of this length is read where it is; shorter ones are gathered with others of their kind.
RUN_TOKENS = 256
#: So much is left free behind each growing piece: the layout lasts for so many steps.
ROOM_TOKENS = 32


@dataclass
class _Spot:
    """Where a block lies: its first piece, its first place in the flat arrays, and the number of its first result."""

    piece: int
    count: int
    width: int
    length: int
    token: int
    partial: int
    run: int | None
    padded: bool


class Layout:
    """The blocks of one batch. It lasts until the batch changes; from step to step each request has one token more.

    table: ``req_to_token``. rows: each request's in the batch. lens: how many tokens it has, the new one included.
    kv_bytes: of one token in one layer.
    """

    def __init__(
        self, table: np.ndarray, rows: Ints, lens: Ints, levels: Sequence[Level], page_size: int, kv_bytes: int
    ) -> None:
        self._table, self._page = table, page_size
        self.rows, self.lens = rows, lens
        self._cut(levels)
        self._spots = list(self._blocks(kv_bytes))
        self._place()
        self._merge()

    def _cut(self, levels: Sequence[Level]) -> None:
        """Cut the KV into pieces, in order of their width and length: arrays of where each lies and who attends to it.

        A piece has one row, that of its first member, a start there, a length, and its members by place in the batch.
        """
        most = max(self._page, PIECE_TOKENS // self._page * self._page)
        begins = np.zeros_like(self.lens)
        at = {row: i for i, row in enumerate(self.rows.tolist())} if levels else {}
        starts, lengths, members = [], [], []
        for level in levels:
            own = np.array([at[row] for row in level.rows])
            begins[own] = level.end
            for start in range(level.start, level.end, most):
                starts.append(start)
                lengths.append(min(most, level.end - start))
                members.append(own)
        left = self.lens - begins
        pieces = (left - 1) // most + 1
        owner = np.repeat(np.arange(len(left)), pieces)
        ahead = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
        length = np.concatenate([np.array(lengths, np.int64), np.minimum(left[owner] - ahead, most)])
        start = np.concatenate([np.array(starts, np.int64), begins[owner] + ahead])
        width = np.concatenate([np.array([len(own) for own in members], np.int64), np.ones_like(owner)])
        grows = np.concatenate([np.zeros(len(members), bool), ahead + most >= left[owner]])
        order = np.lexsort((length, width))
        first = np.concatenate([np.array([own[0] for own in members], np.int64), owner])
        self._first, self._start, self._length = first[order], start[order], length[order]
        self._width, self._grows = width[order], grows[order]
        # All members of the pieces that have several, which are the last in this order.
        self._members = [members[i] for i in order.tolist() if i < len(members)]
        room = np.where(self._grows, ROOM_TOKENS, 0)
        self._padded = np.minimum(most, -(-(self._length + room) // self._page) * self._page)

    def _blocks(self, kv_bytes: int) -> Iterable[_Spot]:
        """Cut the pieces into blocks that waste little."""
        widths, padded = self._width.tolist(), self._padded.tolist()
        runs = {i: run for i in np.flatnonzero(self._width > 1).tolist() if (run := self._run(i)) is not None}
        first = token = partial = 0
        for i in range(1, len(widths) + 1):
            count = i - first
            if (
                i < len(widths)
                and i not in runs
                and first not in runs
                and widths[i] <= 1.25 * widths[first]
                and padded[i] <= 1.25 * padded[first] + ROOM_TOKENS
                and (count + 1) * padded[i] * kv_bytes <= BLOCK_BYTES
            ):
                continue
            length, width = max(padded[first:i]), widths[i - 1]
            behind = bool(self._grows[first:i].any() or (self._length[first:i] < length).any())
            yield _Spot(first, count, width, length, token, partial, runs.get(first), behind)
            first, token, partial = i, token + count * length, partial + count * width

    def _run(self, piece: int) -> int | None:
        """The first slot of a long piece whose slots follow each other, None for another."""
        start, length = self._start[piece], self._length[piece]
        slots = self._table[self.rows[self._first[piece]], start : start + length]
        return int(slots[0]) if length >= RUN_TOKENS and (np.diff(slots) == 1).all() else None

    def _place(self) -> None:
        """Fill the flat arrays: the page of each place, and what is masked."""
        page, grows = self._page, self._grows
        padded = np.repeat([spot.length for spot in self._spots], [spot.count for spot in self._spots])
        tokens = np.cumsum(padded) - padded
        row = self.rows[self._first]
        # A page behind the end of a piece is a copy of its first: any that surely holds numbers will do.
        index = np.arange(padded.sum() // page) - np.repeat(tokens // page, padded // page)
        index *= page
        index[index >= np.repeat(self._length, padded // page)] = 0
        at = np.repeat(row * self._table.shape[1] + self._start, padded // page) + index
        self._pages = self._table.reshape(-1)[at] // page
        self._mask = np.zeros(padded.sum(), np.float32)
        behind = np.arange(len(self._mask)) - np.repeat(tokens, padded)
        self._mask[behind >= np.repeat(self._length, padded)] = -np.inf
        # Of the pieces that grow, by place: whose they are, where they begin in the row and in the flat arrays.
        self._owner, self._row, self._begin = self._first[grows], row[grows], self._start[grows]
        self._token, self._room = tokens[grows], padded[grows]

    def _merge(self) -> None:
        """Number the partial results, and find those of each request."""
        lone = len(self._first) - len(self._members)
        # Which request each partial result is of; -1 for a query that only fills a block up.
        owners = [self._first[:lone]]
        self._queries: list[torch.Tensor] = []
        for spot in self._spots:
            if spot.width == 1:
                self._queries.append(torch.from_numpy(self._first[spot.piece : spot.piece + spot.count]))
                continue
            queries = np.full((spot.count, spot.width), -1)
            for i, own in enumerate(self._members[spot.piece - lone :][: spot.count]):
                queries[i, : len(own)] = own
            owners.append(queries.reshape(-1))
            self._queries.append(torch.from_numpy(np.where(queries < 0, queries[:, :1], queries).reshape(-1)))
        owner = np.concatenate(owners)
        self._partials = len(owner)
        partial = np.argsort(owner, kind="stable")[int((owner < 0).sum()) :]
        counts = np.bincount(owner[partial], minlength=len(self.rows))
        order = np.argsort(-counts, kind="stable")
        inverse = np.argsort(order)
        most = int(counts.max())
        filled = np.full((len(counts), most), self._partials)
        nth = np.arange(len(partial)) - np.repeat(np.cumsum(counts) - counts, counts)
        filled[inverse[owner[partial]], nth] = partial
        self._inverse, self._sources = torch.from_numpy(inverse), torch.from_numpy(filled)
        self._counts = [int((counts > i).sum()) for i in range(most)]

    def advance(self, lens: Ints) -> bool:
        """Take in the next token of every request; False if that is not what happened, or a piece has no room left."""
        length = lens[self._owner] - self._begin
        if (lens != self.lens + 1).any() or (length > self._room).any():
            return False
        self.lens = lens.copy()  # the engine counts on in place
        last = length - 1
        slots = self._table[self._row, self._begin + last]
        self._pages[(self._token + last) // self._page] = slots // self._page
        self._mask[self._token + last] = 0
        return True

    def plan(self) -> Plan:
        """The plan of the step that the layout stands at. It shares the layout's memory: good until the next."""
        pages, mask = torch.from_numpy(self._pages), torch.from_numpy(self._mask)
        unwritten = self._unwritten()
        edges = np.searchsorted(unwritten, [spot.token for spot in self._spots] + [len(self._mask)]).tolist()
        blocks = []
        for i, (spot, queries) in enumerate(zip(self._spots, self._queries, strict=True)):
            tokens = slice(spot.token, spot.token + spot.count * spot.length)
            own = unwritten[edges[i] : edges[i + 1]] - spot.token
            blocks.append(
                Block(
                    spot.count,
                    spot.width,
                    spot.length,
                    queries,
                    pages[tokens.start // self._page : tokens.stop // self._page] if spot.run is None else spot.run,
                    mask[tokens].view(spot.count, 1, 1, spot.length) if spot.padded else None,
                    torch.from_numpy(own) if len(own) else None,
                    spot.partial,
                )
            )
        return Plan(blocks, self._partials, self._inverse, self._sources, self._counts)

    def _unwritten(self) -> Ints:
        """The places of growing pieces that come from the unwritten end of a page, in order."""
        page = self._page
        if page == 1:
            return np.empty(0, np.int64)
        length = (self.lens[self._owner] - self._begin)[:, None]
        token, room = self._token[:, None], self._room[:, None]
        places = length + np.arange(page - 1)
        unwritten = (token + places)[places // page == (length - 1) // page]
        short = length[:, 0] < page  # such a piece has copies of its only page behind it
        if short.any():
            places = np.arange(page, room[short].max())
            copied = (places % page >= length[short]) & (places < room[short])
            unwritten = np.sort(np.concatenate([unwritten, (token[short] + places)[copied]]))
        return unwritten
