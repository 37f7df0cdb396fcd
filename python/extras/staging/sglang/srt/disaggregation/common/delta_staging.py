"""Decode's staging buffer for deltas: allocation of pieces, and copies to the KV pool.

With different TP sizes, a page holds different heads on prefill and decode, so each token of each layer would need its
own descriptor. With staging, prefill gathers a piece of the delta into one block and writes that into decode's staging
buffer; decode scatters it into its pages.

The engine divides its buffer in advance into cells of one chunk, counted from the first page, and finds a cell by
dividing the position of what is sent. Sends are not always whole chunks: behind a prefix, after a hit of prefill's own
cache, or beside another prompt in a batch, two sends would share a cell or one would cross its end. Here a piece is one
send: prefill asks for exactly that memory when it has computed the piece, and owns it until it is scattered. Positions
count in the list of delta pages, which decode has sent to prefill.

Upstream: sgl-project/sglang#30545 (merged), which has staging buffers behind a prefix.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.common import staging_buffer as engine

__all__ = ["PIECES", "DeltaStaging", "Space", "piece_bytes"]

# Alignment of a piece's memory in bytes, as word-wise copies on a GPU require.
ALIGNMENT = 256
# One prefill may hold 1/SHARES of the buffer unwritten. If it is hung, that memory comes back only when it continues,
# is lost, or its requests time out.
SHARES = 4
# The largest piece is 1/PIECES of the buffer.
PIECES = 8
# Seconds of silence of such a prefill after which it gets another piece, up to half of the buffer: a message may have
# been lost with a connection, and then its memory is never written.
SILENT_S = 5.0


def piece_bytes(prefill_tp: int, decode_tp: int, total_heads: int, head_bytes: int, num_layers: int) -> int:
    """Bytes per token of a piece in a decode rank's buffer: K and V of all heads of that rank.

    head_bytes: of one head of one token in one layer. Includes all prefill ranks that write to the decode rank.
    """
    # Equal for all decode ranks.
    return engine.compute_staging_layout(prefill_tp, decode_tp, 0, total_heads, 1, head_bytes, num_layers)[2]


class Space:
    """Byte ranges of one buffer, allocated first fit in multiples of ``ALIGNMENT``."""

    def __init__(self, size: int):
        self.size = size
        # Free ranges as (offset, length), sorted and not adjacent.
        self.free = [(0, size)]

    def take(self, length: int) -> int | None:
        """The offset of ``length`` free bytes, None if there is no such range."""
        length = _aligned(length)
        for i, (offset, free) in enumerate(self.free):
            if free >= length:
                self.free[i : i + 1] = [(offset + length, free - length)] if free > length else []
                return offset
        return None

    def give(self, offset: int, length: int) -> None:
        """Free a range of `take`."""
        insort(self.free, (offset, _aligned(length)))
        joined: list[tuple[int, int]] = []
        for start, free in self.free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + free)
            else:
                joined.append((start, free))
        self.free = joined


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(eq=False)
class _Piece:
    """``num_pages`` pages of a delta, staged in ``length`` bytes at ``offset`` (None until allocated)."""

    num_pages: int
    length: int
    # Order of the requests over all rooms.
    number: int
    offset: int | None = None
    # Prefill ranks with their grant callbacks, and ranks that have written.
    askers: dict[int, Callable[[int], None]] = dataclasses.field(default_factory=dict)
    writers: set[int] = dataclasses.field(default_factory=set)
    # The copy to the KV pool: begun; launched on the device; on a GPU, its end.
    started: bool = False
    handed: bool = False
    event: torch.cuda.Event | None = None


@dataclasses.dataclass
class _Room:
    pages: npt.NDArray[np.int32]
    prefill_tp: int
    # The prefill's name and its share of the buffer.
    prefill: str
    share: _Share
    # By position of the first page in ``pages``; in order, without gaps.
    pieces: dict[int, _Piece] = dataclasses.field(default_factory=dict)
    # Pages requested, and pages copied to the KV pool.
    end: int = 0
    copied: int = 0
    closed: bool = False


class _Share:
    """One prefill's pending pieces, and its granted ones that are not written.

    Writing a piece shows that the prefill is alive, so earlier unwritten pieces no longer count against its share.
    """

    def __init__(self) -> None:
        # May include closed rooms, which are skipped.
        self._waiting: deque[tuple[_Room, _Piece]] = deque()
        # In order of the grants.
        self._counted: dict[_Piece, None] = {}
        self._counted_bytes = 0
        self.heard_at = 0.0
        # Open rooms, which may request pieces.
        self.rooms = 0

    def wait(self, room: _Room, piece: _Piece) -> None:
        self._waiting.append((room, piece))

    def first(self) -> _Piece | None:
        """The oldest pending piece."""
        while self._waiting and self._waiting[0][0].closed:
            self._waiting.popleft()
        return self._waiting[0][1] if self._waiting else None

    def may_take(self, piece: _Piece, size: int) -> bool:
        """Whether it may get ``piece``, of a buffer of ``size`` bytes."""
        taken = self._counted_bytes + piece.length
        if not self._counted or taken <= size // SHARES:
            return True
        return taken <= size // 2 and time.monotonic() - self.heard_at > SILENT_S

    def take(self) -> None:
        """Its oldest pending piece was granted."""
        _, piece = self._waiting.popleft()
        self._counted[piece] = None
        self._counted_bytes += piece.length
        self.heard_at = time.monotonic()

    def written(self, piece: _Piece) -> None:
        """``piece`` was written."""
        if piece in self._counted:
            for earlier in list(self._counted):
                self._uncount(earlier)
                if earlier is piece:
                    break
        self.heard_at = time.monotonic()

    def give_back(self, piece: _Piece) -> None:
        """``piece`` will not be written any more."""
        if piece in self._counted:
            self._uncount(piece)

    def _uncount(self, piece: _Piece) -> None:
        del self._counted[piece]
        self._counted_bytes -= piece.length


class _Shares:
    """The shares of all prefills, and the order of their grants."""

    def __init__(self) -> None:
        # By the prefill's name.
        self.all: dict[str, _Share] = {}
        # The oldest piece without a large enough free range, and since when.
        self._stuck: _Piece | None = None
        self._stuck_at = 0.0

    def join(self, prefill: str) -> _Share:
        share = self.all.setdefault(prefill, _Share())
        share.rooms += 1
        return share

    def leave(self, prefill: str) -> None:
        self.all[prefill].rooms -= 1
        if not self.all[prefill].rooms:
            del self.all[prefill]

    def give(self, space: Space) -> Iterator[tuple[_Piece, int]]:
        """Grant pieces in order of their requests, within shares; yields each with its offset.

        In order, so that a large piece cannot wait for ever; see `_may_pass`.
        """
        # A prefill at its limit is skipped entirely: a later, smaller piece must not bypass its first.
        asking = {share: piece for share in self.all.values() if (piece := share.first())}
        while asking:
            share, piece = min(asking.items(), key=lambda item: item[1].number)
            if not share.may_take(piece, space.size):
                del asking[share]
                continue
            offset = space.take(piece.length)
            if offset is None:
                if not self._may_pass(piece):
                    return
                del asking[share]
                continue
            piece.offset = offset
            share.take()
            yield piece, offset
            following = share.first()
            if following is None:
                del asking[share]
            else:
                asking[share] = following

    def _may_pass(self, piece: _Piece) -> bool:
        """Whether others may bypass ``piece``, which fits no free range: in every other interval of `SILENT_S` seconds.

        In the intervals between, all freed memory is kept for it. So neither it nor the others wait for ever if a hung
        prefill holds memory in the middle of the buffer.
        """
        now = time.monotonic()
        if self._stuck is None or self._stuck.offset is not None or piece.number < self._stuck.number:
            self._stuck, self._stuck_at = piece, now
        return int((now - self._stuck_at) / SILENT_S) % 2 == 1


class DeltaStaging:
    """The staging buffer of one decode rank. Thread-safe.

    buffer: uint8, as registered with the transfer backend. k_buffers, v_buffers: the KV pool, one tensor a layer, of
    shape [slot, head, head_dim].
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        k_buffers: list[torch.Tensor],
        v_buffers: list[torch.Tensor],
        page_size: int,
        tp_size: int,
        tp_rank: int,
    ):
        self.buffer, self.k_buffers, self.v_buffers = buffer, k_buffers, v_buffers
        self.page_size, self.tp_size, self.tp_rank = page_size, tp_size, tp_rank
        _, heads, head_dim = k_buffers[0].shape
        self.total_heads = heads * tp_size
        self.head_bytes = head_dim * k_buffers[0].element_size()
        self.space = Space(buffer.numel())
        self.rooms: dict[int, _Room] = {}
        self.shares = _Shares()
        self.asked = 0
        self.looked_at = 0.0
        self.copying: list[tuple[_Room, _Piece]] = []
        # Granted under the lock; callbacks run after its release, see `_locked`.
        self.granted: list[tuple[Callable[[int], None], int]] = []
        self.stream = torch.cuda.Stream(device=buffer.device) if buffer.is_cuda else None
        self.lock = threading.Lock()

    def open(self, room: int, pages: npt.NDArray[np.int32], prefill_tp: int, prefill: str) -> None:
        """Expect pieces for ``room``; ``pages`` are those requested from prefill, in order.

        prefill: its name, for its share of the buffer.
        """
        with self._locked():
            self.rooms[room] = _Room(pages, prefill_tp, prefill, self.shares.join(prefill))

    def request(self, room: int, start: int, num_pages: int, rank: int, grant: Callable[[int], None]) -> None:
        """Prefill rank ``rank`` requests memory for pages from ``start`` on; ``grant`` is called with its offset.

        Now or later, or never if the room ends before. All ranks of a piece get the same offset; their parts follow
        from their number. Raises ValueError for an invalid piece.
        """
        with self._locked():
            self._settle()
            state = self._open_room(room)
            if state is None:
                return
            piece = state.pieces.get(start)
            if piece is None:
                if start != state.end or num_pages < 1 or start + num_pages > len(state.pages):
                    raise ValueError(
                        f"a piece of {num_pages} pages at {start} is not the next one of {len(state.pages)} pages, "
                        f"{state.end} of them already requested"
                    )
                token = piece_bytes(
                    state.prefill_tp, self.tp_size, self.total_heads, self.head_bytes, len(self.k_buffers)
                )
                piece = _Piece(num_pages, num_pages * self.page_size * token, self.asked)
                if piece.length > self.space.size:
                    raise ValueError(
                        f"a piece of {piece.length} bytes is larger than the staging buffer ({self.space.size} bytes)"
                    )
                state.pieces[start] = piece
                state.end += num_pages
                self.asked += 1
                state.share.wait(state, piece)
            elif piece.num_pages != num_pages:
                raise ValueError(f"prefill ranks disagree: a piece of {piece.num_pages} and of {num_pages} pages")
            piece.askers[rank] = grant
            if piece.offset is not None:
                self.granted.append((grant, piece.offset))
            self._grant()

    def written(self, room: int, start: int, rank: int) -> None:
        """Prefill rank ``rank`` has written its part of the piece at ``start``; the last rank starts the copy.

        Raises ValueError for an invalid piece, and errors of the copy.
        """
        with self._locked():
            state = self._open_room(room)
            if state is None:
                return
            piece = state.pieces.get(start)
            if piece is None or piece.offset is None or rank not in piece.askers:
                raise ValueError(f"prefill rank {rank} has written a piece at {start} that was not granted to it")
            piece.writers.add(rank)
            if piece.started or len(piece.writers) < max(1, state.prefill_tp // self.tp_size):
                return
            piece.started = True
            state.share.written(piece)
            self.copying.append((state, piece))
            self._grant()
        # Not under the lock: the launch can take a while, and the scheduler polls `landed`.
        try:
            self._copy(state, start, piece)
        except Exception:
            state.closed = True
            raise
        finally:
            piece.handed = True
        with self._locked():
            self._settle()

    def landed(self, room: int) -> bool:
        """Whether all staged pages of ``room`` have been copied; True also if none was staged.

        To be polled: it frees the memory of completed copies.
        """
        with self._locked():
            self._settle()
            state = self.rooms.get(room)
            return state is None or not state.pieces or (state.copied == len(state.pages) and not state.closed)

    def is_missing(self, room: int) -> bool:
        """Whether pages of ``room`` are missing without a copy in flight."""
        with self._locked():
            self._settle()
            state = self.rooms.get(room)
            if state is None or not state.pieces:
                return False
            under_way = sum(piece.num_pages for other, piece in self.copying if other is state)
            return state.closed or state.copied + under_way < len(state.pages)

    def close(self, room: int) -> bool:
        """Start no more copies for ``room``; returns whether none is in flight."""
        with self._locked():
            self._settle()
            state = self.rooms.get(room)
            if state is None:
                return True
            if not state.closed:
                state.closed = True
                self._grant()
            return not any(other is state for other, _ in self.copying)

    def drop(self, room: int) -> None:
        """Remove ``room``, to which no prefill writes any more, and free its memory."""
        with self._locked():
            state = self.rooms.pop(room, None)
            if state is None:
                return
            state.closed = True
            copying = [piece for _, piece in self.copying]
            for piece in state.pieces.values():
                # Copies in flight still read their memory; `_settle` frees it.
                if not any(piece is other for other in copying):
                    state.share.give_back(piece)
                    self._free(piece)
            self.shares.leave(state.prefill)
            self._grant()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; grant callbacks run after its release, in order.

        A callback may take another lock whose holder waits for this one.
        """
        granted: list[tuple[Callable[[int], None], int]] = []
        try:
            with self.lock:
                try:
                    yield
                finally:
                    granted, self.granted = self.granted, []
        finally:
            for grant, offset in granted:
                grant(offset)

    def _open_room(self, room: int) -> _Room | None:
        state = self.rooms.get(room)
        return None if state is None or state.closed else state

    def _grant(self) -> None:
        for piece, offset in self.shares.give(self.space):
            self.granted += [(grant, offset) for grant in piece.askers.values()]

    def _free(self, piece: _Piece) -> None:
        if piece.offset is not None:
            self.space.give(piece.offset, piece.length)
            piece.offset = None

    def _settle(self) -> None:
        """Free the memory of completed copies."""
        under_way = []
        for state, piece in self.copying:
            if not piece.handed or (piece.event is not None and not piece.event.query()):
                under_way.append((state, piece))
                continue
            state.copied += piece.num_pages
            self._free(piece)
        now = time.monotonic()
        if len(under_way) < len(self.copying) or now - self.looked_at > SILENT_S / 10:
            self.copying, self.looked_at = under_way, now
            self._grant()

    def _copy(self, state: _Room, start: int, piece: _Piece) -> None:
        """Launch the copy of a piece to its pages; on a GPU in a stream beside the forward pass."""
        pages = torch.from_numpy(state.pages[start : start + piece.num_pages].astype(np.int64))
        layout = (self.page_size, state.prefill_tp, self.tp_size, self.tp_rank, self.total_heads)
        block = self.buffer[piece.offset :]
        if self.stream is None:
            engine.scatter_staging_to_kv(block, self.k_buffers, self.v_buffers, pages, *layout)
            return
        # This thread may not have used the device before.
        torch.cuda.set_device(self.buffer.device)
        piece.event = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            try:
                engine.scatter_staging_to_kv(
                    block, self.k_buffers, self.v_buffers, pages.to(self.buffer.device), *layout
                )
            finally:
                # Also after an error: copies of some layers may be in flight.
                piece.event.record(self.stream)
