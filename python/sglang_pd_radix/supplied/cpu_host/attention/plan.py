"""The plan of a step: which pieces of KV there are, which go into one block, and where they lie in the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .kernel import Block, Plan
from .levels import Level

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
class _Piece:
    """Positions ``start`` to ``start + length`` of a row, for the requests in ``members`` (places in the batch)."""

    row: int
    start: int
    length: int
    members: Sequence[int]
    grows: bool = False


@dataclass
class _Spot:
    """Where a block's pieces lie in the flat arrays of a layout."""

    count: int
    width: int
    length: int
    token: int
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
        self._most = max(page_size, PIECE_TOKENS // page_size * page_size)
        self.rows, self.lens = rows, lens
        pieces = sorted(self._pieces(levels), key=lambda p: (len(p.members), p.length))
        self._spots: list[_Spot] = []
        placed = [piece for block in self._blocks(pieces, kv_bytes) for piece in block]
        self._place(placed)
        self._merge(placed)

    def _pieces(self, levels: Sequence[Level]) -> Iterable[_Piece]:
        at = {int(row): i for i, row in enumerate(self.rows)}
        begins = [0] * len(at)
        for level in levels:
            members = [at[row] for row in level.rows]
            for member in members:
                begins[member] = level.end
            for start in range(level.start, level.end, self._most):
                yield _Piece(level.rows[0], start, min(self._most, level.end - start), members)
        for i, (row, start, length) in enumerate(zip(self.rows.tolist(), begins, self.lens.tolist(), strict=True)):
            while length - start > self._most:
                yield _Piece(row, start, self._most, [i])
                start += self._most
            yield _Piece(row, start, length - start, [i], grows=True)

    def _blocks(self, pieces: Sequence[_Piece], kv_bytes: int) -> Iterable[list[_Piece]]:
        """Cut pieces, in order of width and length, into blocks that waste little; and note the sizes of each."""
        token = 0
        block: list[_Piece] = []

        def close(run: int | None = None) -> list[_Piece]:
            nonlocal token, block
            length = max(self._padded(piece) for piece in block)
            padded = any(piece.grows or piece.length < length for piece in block)
            self._spots.append(_Spot(len(block), len(block[-1].members), length, token, run, padded))
            token += len(block) * length
            done, block = block, []
            return done

        for piece in pieces:
            width, length = len(piece.members), self._padded(piece)
            if block and (
                width > 1.25 * len(block[0].members)
                or length > 1.25 * self._padded(block[0]) + ROOM_TOKENS
                or (len(block) + 1) * length * kv_bytes > BLOCK_BYTES
            ):
                yield close()
            run = None if piece.grows or piece.length < RUN_TOKENS else self._run(piece)
            if run is not None:
                if block:
                    yield close()
                block.append(piece)
                yield close(run)
            else:
                block.append(piece)
        if block:
            yield close()

    def _padded(self, piece: _Piece) -> int:
        room = ROOM_TOKENS if piece.grows else 0
        return min(self._most, -(-(piece.length + room) // self._page) * self._page)

    def _run(self, piece: _Piece) -> int | None:
        """The first slot of a piece whose slots follow each other, None for another."""
        slots = self._table[piece.row, piece.start : piece.start + piece.length]
        return int(slots[0]) if (np.diff(slots) == 1).all() else None

    def _place(self, pieces: Sequence[_Piece]) -> None:
        """Fill the flat arrays: the page of each place, and what is masked."""
        page = self._page
        counts = [spot.count for spot in self._spots]
        padded = np.repeat([spot.length for spot in self._spots], counts)
        row, start, length = np.array([(p.row, p.start, p.length) for p in pieces], np.int64).T
        tokens = np.concatenate([[0], np.cumsum(padded)])
        # A page behind the end of a piece is a copy of its first: any that surely holds numbers will do.
        index = np.arange(tokens[-1] // page) - np.repeat(tokens[:-1] // page, padded // page)
        index *= page
        index[index >= np.repeat(length, padded // page)] = 0
        at = np.repeat(row * self._table.shape[1] + start, padded // page) + index
        self._pages = self._table.reshape(-1)[at] // page
        self._mask = np.zeros(tokens[-1], np.float32)
        grows = np.array([piece.grows for piece in pieces])
        behind = np.arange(tokens[-1]) - np.repeat(tokens[:-1], padded)
        self._mask[behind >= np.repeat(length, padded)] = -np.inf
        # Of the pieces that grow, by place: whose they are, where they begin in the row and in the flat arrays.
        self._owner = np.array([piece.members[0] for piece in pieces if piece.grows])
        self._row, self._start = row[grows], start[grows]
        self._token, self._room = tokens[:-1][grows], padded[grows]

    def _merge(self, pieces: Sequence[_Piece]) -> None:
        """Number the partial results, and find those of each request."""
        sources: list[list[int]] = [[] for _ in self.rows]
        self._queries: list[torch.Tensor] = []
        self._firsts: list[int] = []
        partial = at = 0
        for spot in self._spots:
            queries: list[int] = []
            for piece in pieces[at : at + spot.count]:
                for i, member in enumerate(piece.members):
                    sources[member].append(partial + len(queries) + i)
                queries += piece.members
                queries += piece.members[:1] * (spot.width - len(piece.members))
            self._queries.append(torch.tensor(queries))
            self._firsts.append(partial)
            partial += len(queries)
            at += spot.count
        self._partials = partial
        counts = np.array([len(own) for own in sources])
        order = np.argsort(-counts, kind="stable")
        most = int(counts.max())
        filled = np.full((len(sources), most), partial)
        for place, i in enumerate(order.tolist()):
            filled[place, : counts[i]] = sources[i]
        self._order = torch.from_numpy(order)
        self._inverse = torch.from_numpy(np.argsort(order))
        self._sources = torch.from_numpy(filled)
        self._counts = [int((counts > i).sum()) for i in range(most)]

    def advance(self, lens: Ints) -> bool:
        """Take in the next token of every request; False if that is not what happened, or a piece has no room left."""
        length = lens[self._owner] - self._start
        if (lens != self.lens + 1).any() or (length > self._room).any():
            return False
        self.lens = lens.copy()  # the engine counts on in place
        last = length - 1
        slots = self._table[self._row, self._start + last]
        self._pages[(self._token + last) // self._page] = slots // self._page
        self._mask[self._token + last] = 0
        return True

    def plan(self) -> Plan:
        """The plan of the step that the layout stands at. It shares the layout's memory: good until the next."""
        pages, mask = torch.from_numpy(self._pages), torch.from_numpy(self._mask)
        unwritten = self._unwritten()
        edges = np.searchsorted(unwritten, [spot.token for spot in self._spots] + [len(self._mask)]).tolist()
        blocks = []
        for i, (spot, queries, first) in enumerate(zip(self._spots, self._queries, self._firsts, strict=True)):
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
                    first,
                )
            )
        return Plan(blocks, self._partials, self._order, self._inverse, self._sources, self._counts)

    def _unwritten(self) -> Ints:
        """The places of growing pieces that come from the unwritten end of a page, in order."""
        page = self._page
        if page == 1:
            return np.empty(0, np.int64)
        length = (self.lens[self._owner] - self._start)[:, None]
        token, room = self._token[:, None], self._room[:, None]
        places = length + np.arange(page - 1)
        unwritten = (token + places)[places // page == (length - 1) // page]
        short = length[:, 0] < page  # such a piece has copies of its only page behind it
        if short.any():
            places = np.arange(page, room[short].max())
            copied = (places % page >= length[short]) & (places < room[short])
            unwritten = np.sort(np.concatenate([unwritten, (token[short] + places)[copied]]))
        return unwritten
