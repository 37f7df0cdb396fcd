"""Mooncake managers that send deltas through staging buffers, for different TP sizes of prefill and decode.

docs/protocol.md has the messages.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_staging import PIECES, DeltaStaging, piece_bytes
from sglang.srt.disaggregation.common.staging_buffer import resolve_total_kv_heads
from sglang.srt.disaggregation.common.wire import room_header, wire_int
from sglang.srt.disaggregation.mooncake.staged_queue import StagedQueue, waited_s, wake
from sglang.srt.disaggregation.mooncake.staging_wire import (
    GRANT,
    STAGE,
    STAGED,
    EngineStaging,
    Grant,
    Wanted,
    Written,
    is_piece,
    read_piece,
)
from sglang.srt.disaggregation.mooncake.watched_queue import WatchedQueue
from sglang.srt.disaggregation.mooncake.wire import CheckedSocket
from sglang.srt.utils.network import NetworkAddress

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, TransferInfo

logger = logging.getLogger(__name__)

# Seconds that a piece waits before decode's liveness is checked.
PATIENCE_S = 2
# Decode sessions with a known piece size: each restart of a decode worker adds new ones.
REMEMBERED = 1024


# The engine's class follows in the MRO.
Base: Any = object


class SendsPieces(Base):
    """Staging in prefill's manager. `conn.py` puts it before the core's."""

    def __init__(self, *args, **kwargs):
        """Adds the tables of pieces; before the engine's __init__, which starts the threads."""
        # By decode session: its registration and the result of `_find_piece_pages`.
        self.piece_sizes: OrderedDict[str, tuple[KVArgsRegisterInfo, int]] = OrderedDict()
        # Status of this thread's last transfer.
        self.returned = threading.local()
        # Whether the scheduler is sending a piece now.
        self.sends_piece = False
        super().__init__(*args, **kwargs)

    def _piece_pages(self, info: TransferInfo) -> int:
        """Pages of one piece, at most, for a decode rank whose KV is staged; 0 for others."""
        if info.is_dummy or not info.names_prefix or not self.enable_staging or self.kv_buffer_tensors is None:
            return 0
        session = info.mooncake_session_id
        theirs = self.decode_kv_args_table[session]
        known, most = self.piece_sizes.get(session, (None, 0))
        if known is not theirs:
            most = self._find_piece_pages(theirs)
            self.piece_sizes[session] = theirs, most
            if len(self.piece_sizes) > REMEMBERED:
                # A removed entry is computed again when needed.
                self.piece_sizes.popitem(last=False)
            if most:
                logger.info("KV for %s goes through staging buffers, in pieces of at most %d pages.", session, most)
        return most

    def _find_piece_pages(self, theirs: KVArgsRegisterInfo) -> int:
        if theirs.staging is None or self.is_mla_backend or theirs.dst_attn_tp_size == self.attn_tp_size:
            return 0
        layers, page_size = self.kv_buffer_tensors["k_buffers"], self.kv_args.page_size
        if len(self.kv_args.kv_data_ptrs) != 2 * len(layers):
            # The rest is a draft model's KV, which staging does not support.
            return 0
        heads = resolve_total_kv_heads(self.kv_args, self.attn_tp_size)
        head_bytes = layers[0].shape[-1] * layers[0].element_size()
        shares = self.kv_args.kv_item_lens[0] * self.attn_tp_size, theirs.dst_kv_item_len * theirs.dst_attn_tp_size
        if set(shares) != {heads * head_bytes * page_size}:
            # Ranks that share a head: parts of a piece are only defined for heads of one rank each.
            return 0
        page = page_size * piece_bytes(self.attn_tp_size, theirs.dst_attn_tp_size, heads, head_bytes, len(layers))
        mine = page // max(1, self.attn_tp_size // theirs.dst_attn_tp_size)
        # Small beside the gaps that a hung prefill leaves. At least a page, if two fit.
        theirs_in_all = theirs.staging.total_size // page
        most = max(theirs_in_all // PIECES, min(theirs_in_all // 2, 1))
        most = min(most, self._staging_ctx.buffers[0].get_size() // mine)
        if most == 0:
            logger.warning(
                "Staging buffers are too small for a page of %d bytes, so KV is sent unstaged. Increase "
                "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB on prefill or SGLANG_DISAGG_STAGING_POOL_SIZE_MB on decode.",
                page,
            )
        return most

    def _pieces(self, infos: Iterable[TransferInfo], index_slice: slice) -> list[tuple[int, int]]:
        """First and end page of each piece of a chunk that is staged."""
        most = min((n for info in infos if (n := self._piece_pages(info))), default=0)
        start, end = index_slice.start, index_slice.stop
        return [(at, min(at + most, end)) for at in range(start, end, most)] if most else []

    def add_transfer_request(
        self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=None, state_indices=None
    ) -> None:
        """Sends a staged chunk piece by piece."""
        add = super().add_transfer_request
        failed = self.request_status.get(bootstrap_room, KVPoll.Failed) == KVPoll.Failed
        infos = [] if failed else list(self.transfer_infos.get(bootstrap_room, {}).values())
        pieces = self._pieces(infos, index_slice)
        for start, end in pieces:
            for info in infos:
                if self._piece_pages(info):
                    self._ask_for_staging(info, start, end - start)
        if not pieces:
            add(bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index, state_indices)
            return
        self.sends_piece = True
        try:
            for start, end in pieces:
                part = kv_indices[start - index_slice.start : end - index_slice.start]
                is_last = is_last_chunk and end == index_slice.stop
                add(bootstrap_room, part, slice(start, end), is_last, aux_index, state_indices)
        finally:
            self.sends_piece = False

    def count_transfer(self, peer: str, sent_pages: int, saved_pages: int, runs: int = 0, states: int = 0) -> None:
        """Counts a piece as one run."""
        super().count_transfer(peer, sent_pages, saved_pages, 1 if self.sends_piece else runs, states)

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """Handles decode's grants."""
        grant = Grant.read(frames)
        if grant is None:
            return super()._check_on_prefill(frames)
        self._on_grant(grant)
        return False

    def _ask_for_staging(self, info: TransferInfo, start: int, num_pages: int) -> None:
        mine = [self.local_ip.encode("ascii"), b"%d" % self.rank_port]
        frames = [b"%d" % info.room, STAGE, b"%d" % self._rank, b"%d" % start, b"%d" % num_pages, *mine]
        try:
            self.connect_unwaiting(info.endpoint, info.dst_port).send_multipart(frames)
        except Exception as e:
            self.fail_room(info.room, f"could not ask decode at {info.endpoint} for staging memory: {e}")

    def _on_grant(self, grant: Grant) -> None:
        with self.rooms.lock:
            info = self.transfer_infos.get(grant.room, {}).get(grant.session)
        if info is not None:
            info.grants[grant.start] = grant.offset
            wake(self.watched_queues, grant.room)

    def watch(self, queue, executor, staging_buffer) -> WatchedQueue:
        """Returns a queue in which chunks wait for staging memory, if staging is on."""
        if not self.enable_staging:
            return super().watch(queue, executor, staging_buffer)
        prepare = partial(self._write_granted, staging_buffer=staging_buffer)
        return StagedQueue(queue, executor, prepare, self._on_chunk_done)

    def end_room(self, room: int, *args, **kwargs) -> None:
        """Wakes chunks of the room that wait for staging memory."""
        super().end_room(room, *args, **kwargs)
        wake(self.watched_queues, room)

    def _write_granted(self, chunk, staging_buffer) -> bool | None:
        """Write the granted pieces of a chunk; see `StagedQueue`."""
        if not self._prepare(chunk):
            return None
        infos = list(self.transfer_infos.get(chunk.room, {}).values())
        start, num_pages = chunk.index_slice.start, len(chunk.prefill_kv_indices)
        complete = True
        for info in infos if num_pages else []:
            if start in info.written or not self._piece_pages(info):
                continue
            if start not in info.grants:
                complete = False
                continue
            if why := self._write_piece(chunk, info, info.grants.pop(start), staging_buffer):
                self.fail_room(chunk.room, why)
                return None
            info.written.add(start)
        return complete

    def _write_piece(self, chunk, info: TransferInfo, offset: int, staging_buffer) -> str | None:
        """Write a piece and notify decode; returns the reason if it could not be written."""
        session, address = info.mooncake_session_id, NetworkAddress(info.endpoint, info.dst_port)
        # As the engine without staging: each failure may take the transport's time-out, which blocks this thread for
        # all requests.
        with self.session_lock:
            if session in self.failed_sessions:
                return f"no piece is written to decode at {address.to_host_port_str()}, since writes to it have failed"
        theirs, self.returned.status = self.decode_kv_args_table[session], 0
        try:
            failed = self.send_kvcache_staged(
                session,
                chunk.prefill_kv_indices,
                theirs.staging.base_ptr + offset,
                theirs.staging.total_size - offset,
                theirs.dst_tp_rank,
                theirs.dst_attn_tp_size,
                theirs.dst_kv_item_len,
                staging_buffer,
            )
        except RuntimeError as e:
            if not self.returned.status:
                # A local error: another piece may work.
                raise
            logger.error("A piece could not be written to decode at %s: %s", address.to_host_port_str(), e)
            with self.session_lock:
                self.failed_sessions.add(session)
            return f"a piece could not be written to decode at {address.to_host_port_str()}"
        if failed:
            raise RuntimeError("a piece does not fit a staging buffer")
        # The same socket as the end of the transfer, so that decode receives this first.
        socket = self._connect(address.to_tcp(), is_ipv6=address.is_ipv6)
        socket.send_multipart([b"%d" % chunk.room, STAGED, b"%d" % self._rank, b"%d" % chunk.index_slice.start])
        return None

    def _transfer_data(self, mooncake_session_id: str, transfer_blocks: list[tuple[int, int, int]]) -> int:
        """Records the status: the engine raises the same error for a failed write as for others."""
        self.returned.status = super()._transfer_data(mooncake_session_id, transfer_blocks)
        return self.returned.status

    def _do_staging_transfer(
        self, staging_strategy, kv_chunk, req, target_info, chunked_dst_kv_indice, executor, queue, prefill_unique_rank
    ):
        """Replaces the engine's for decode workers with a radix cache: staged pieces were written before.

        Returns 0 on success, and whether to try again later (never).
        """
        if not req.names_prefix:
            return super()._do_staging_transfer(
                staging_strategy,
                kv_chunk,
                req,
                target_info,
                chunked_dst_kv_indice,
                executor,
                queue,
                prefill_unique_rank,
            )
        if self._piece_pages(req):
            return 0, False
        sent = self.send_kvcache_slice(
            req.mooncake_session_id,
            kv_chunk.prefill_kv_indices,
            target_info.dst_kv_ptrs,
            chunked_dst_kv_indice,
            target_info.dst_tp_rank,
            target_info.dst_attn_tp_size,
            target_info.dst_kv_item_len,
            executor,
        )
        return sent, False

    def why_ungranted(self, room: int, infos: Iterable[TransferInfo]) -> str | None:
        """Why ``room`` will get no more staging memory from decode; None if it may."""
        waited = waited_s(self.watched_queues, room)
        if waited < PATIENCE_S:
            return None
        if waited > self.bootstrap_timeout:
            return f"decode has granted no staging memory for {waited:.0f} s"
        is_gone = any(self.are_gone([(info.endpoint, info.dst_port)]) for info in infos)
        return "decode, which was to grant staging memory, is gone" if is_gone else None

    def _prefetch_staging_reqs(self, room: int) -> None:
        """Skips decode workers with a radix cache, which are asked piece by piece."""
        if not any(info.names_prefix for info in self.transfer_infos.get(room, {}).values()):
            super()._prefetch_staging_reqs(room)


class TakesPieces(Base):
    """Staging in decode's manager. `conn.py` puts it before the core's."""

    def __init__(self, *args, **kwargs):
        """Adds the buffer; before the engine's __init__, which starts the threads."""
        # With the flag: the staging buffer, and the allocator by which the engine offers it to prefill.
        self.staging: DeltaStaging | None = None
        self.staging_offer: Any = None
        self.engine_staging = EngineStaging()
        super().__init__(*args, **kwargs)

    def takes_engine_staging(self, frames: list[bytes]) -> bool:
        """Adds a check of messages that would end the engine's thread. Raises ValueError for them."""
        return self.engine_staging.takes(frames, super().takes_engine_staging(frames))

    def start_decode_thread(self) -> None:
        """Handles messages about pieces."""
        if self.has_radix:
            self.server_socket = CheckedSocket(self.server_socket, self._check_on_decode)
        super().start_decode_thread()

    def _check_on_decode(self, frames: list[bytes]) -> bool:
        """Handle a message about a piece; returns True for other messages."""
        if self.staging is None or not is_piece(frames):
            return True
        room = wire_int(frames[0], "room")
        if room not in self.awaited_rooms:
            logger.debug("Message for room %s, which nobody waits for", room)
            return False
        try:
            self.on_piece(room, read_piece(frames))
        except Exception as e:
            logger.exception("Room %s: a piece of its KV is lost", room)
            self.fail_room(room, f"prefill's KV cannot be used: {e}")
        return False

    def set_kv_buffer_tensors(self, k_buffers: list, v_buffers: list, page_size: int) -> None:
        """Adds decode's `DeltaStaging`, which needs the KV pool."""
        super().set_kv_buffer_tensors(k_buffers, v_buffers, page_size)
        if self.staging_offer is not None:
            rank = self.kv_args.engine_rank % self.attn_tp_size
            buffer = self.staging_offer.buffer.buffer
            self.staging = DeltaStaging(buffer, k_buffers, v_buffers, page_size, self.attn_tp_size, rank)

    def on_piece(self, room: int, piece: Wanted | Written) -> None:
        """Prefill requests memory for a piece, or has written one. Raises ValueError for an invalid message."""
        assert self.staging is not None
        if isinstance(piece, Written):
            self.staging.written(room, piece.start, piece.rank)
            return
        peer = piece.peer

        def grant(offset: int) -> None:
            begin = room_header(room, self.local_ip, self.rank_port, self.get_session_id())
            try:
                frames = [*begin, GRANT, b"%d" % piece.start, b"%d" % offset]
                self.connect_unwaiting(peer.endpoint, peer.port).send_multipart(frames)
            except Exception as e:
                self.fail_room(room, f"could not grant staging memory to prefill at {peer.endpoint}: {e}")

        self.staging.request(room, piece.start, piece.num_pages, piece.rank, grant)
