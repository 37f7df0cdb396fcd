"""Delta transfer over Mooncake.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.last_words import LastWords
from sglang.srt.disaggregation.decode_prefix import (
    CANCEL,
    DECODE_PREFIX_VERSION,
    DIGEST,
    GIVEN_UP,
    QUEUED,
    count_runs,
    wire_int,
)
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.awaited_rooms import AwaitedRooms, End
from sglang.srt.disaggregation.mooncake.queued_chunks import QueuedChunks
from sglang.srt.disaggregation.mooncake.staging import StagingKVManager
from sglang.srt.disaggregation.mooncake.transfer_info import TransferInfo
from sglang.srt.disaggregation.mooncake.watched_queue import WatchedQueue
from sglang.srt.disaggregation.mooncake.wire import GRANT, STAGE, STAGED, Inbox, Peer, head, listeners, say_failed
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

__all__ = [
    "MooncakeKVBootstrapServer",
    "MooncakeKVManager",
    "MooncakeKVReceiver",
    "MooncakeKVSender",
    "TransferInfo",
]


class MooncakeKVManager(StagingKVManager):
    """Mooncake manager that sends deltas, counts bytes and survives bad messages."""

    room_books = (*StagingKVManager.room_books, "cancels", "queued", "awaited_rooms")

    def __init__(self, *args, **kwargs):
        """Adds what tells whether a room is being written, and who has to hear that it is not any more."""
        # Before the engine's: it starts the threads.
        self.watched_queues: list[WatchedQueue] = []
        # The engine makes these after it has started the thread that uses them.
        self.session_lock = threading.Lock()
        self.session_failures: dict[str, int] = defaultdict(int)
        self.failed_sessions: set[str] = set()
        # Prefill: decode ranks that gave a room up and have not been answered.
        self.cancels: dict[int, set[Peer]] = {}
        # Prefill: and which of them have been.
        self.last_words: LastWords[Peer] = LastWords()
        # Prefill: chunks that are queued or being written. Decode: what prefill has been asked for.
        self.queued = QueuedChunks()
        self.awaited_rooms = AwaitedRooms()
        super().__init__(*args, **kwargs)

    # ---- prefill: messages of decode workers ----

    def start_prefill_thread(self) -> None:
        """Wraps the engine's thread: it gets only messages that it can read."""
        self.server_socket = Inbox(self.server_socket, self._check_on_prefill)
        super().start_prefill_thread()

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """Take requests for one room's KV; whether the engine may take this message (staging, a registration)."""
        kind = frames[0]
        if kind in (b"WATERMARK", b"STAGING_RSP"):
            return self._takes_engine_staging(frames)
        if kind == b"None":
            registration = engine.KVArgsRegisterInfo.from_zmq(frames)
            if not registration.mooncake_session_id.rpartition(":")[2].isdecimal():
                raise ValueError(f"session id {registration.mooncake_session_id!r} does not end in a port")
            return True
        room = wire_int(kind, "room")
        if frames[4:] == [CANCEL]:
            with self.rooms.lock:
                self._on_cancel(room, Peer.read(frames[1:3]))
            return False
        if frames[4:] == [QUEUED]:
            self.rooms.wait(room, frames[1].decode("ascii"), wire_int(frames[2], "port"))
            return False
        if frames[4:5] == [GRANT]:
            self._on_grant(room, frames)
            return False
        try:
            info = TransferInfo.from_zmq(frames)
            with self.rooms.lock:
                self._on_request(info)
        except (ValueError, IndexError) as e:
            self._refuse(room, frames, str(e))
        return False

    def _on_request(self, info: TransferInfo) -> None:
        """Take one decode rank's request for KV; the room may begin when all ranks have asked."""
        room, session = info.room, info.mooncake_session_id
        if info.names_prefix:
            self.rooms.hear(info.endpoint, info.dst_port)
        infos = self.transfer_infos.get(room, {})
        if session not in infos and not info.is_dummy:
            self.last_words.begin(room, Peer(info.endpoint, info.dst_port), info.names_prefix)
        if session not in self.decode_kv_args_table:
            raise ValueError(f"session {session!r} has not registered its memory")
        ended = self.rooms.failure(room)
        if ended is not None and info.names_prefix:
            # The request failed here before decode had asked for it.
            self._tell_when_quiet(room, listeners([info]), ended)
            return
        if room in self.queued and not infos and info.names_prefix:
            # They would be written to this request's pages, and end it.
            raise ValueError("chunks of an earlier request of this room are still queued")
        if session in infos:
            logger.error("Ignored a repeated request of decode session %s for room %s", session, room)
            return
        counts = {other.required_dst_info_num for other in (*infos.values(), info)}
        if len(counts) > 1 or min(counts) < 1:
            raise ValueError(f"it says that {sorted(counts)} decode ranks will ask")
        # A room that ended well may be used again, as in the engine.
        self.rooms.reopen(room)
        self.transfer_infos.setdefault(room, {})[session] = info
        if len(self.transfer_infos[room]) == info.required_dst_info_num:
            self.update_status(room, KVPoll.WaitingForInput)

    def _refuse(self, room: int, frames: list[bytes], reason: str) -> None:
        """Fail a room for a message that cannot be used. The room's request may come to this worker only later."""
        reason = self.refuse(room, reason)
        if len(frames) > 8:
            peer = Peer.read(frames[1:3])
            self.last_words.begin(room, peer, True)
            self._tell_when_quiet(room, {peer}, reason)

    def _on_cancel(self, room: int, peer: Peer) -> None:
        """Decode gave ``room`` up and keeps its pages until this rank has answered, or said that all is written.

        A request that is here answers when its writes are done; one that has not come yet is refused when it comes.
        """
        if self.rooms.has_ended(room):
            # Nothing, where it has been told of its success.
            self._tell_when_quiet(room, {peer}, self.rooms.failure(room) or GIVEN_UP)
        elif room in self.rooms.live:
            self.cancels.setdefault(room, set()).add(peer)
            self.rooms.give_up(room)
        else:
            self.end_room(room, self.refuse(room, GIVEN_UP))
            self.request_status.pop(room, None)
            self._tell_when_quiet(room, {peer}, GIVEN_UP)

    # ---- prefill: sending ----

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: npt.NDArray[np.int32],
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ) -> None:
        """Adds the byte counters. The last chunk of a full hit carries no KV and still brings the metadata."""
        failed = self.request_status.get(bootstrap_room, KVPoll.Failed) == KVPoll.Failed
        infos = [] if failed else list(self.transfer_infos.get(bootstrap_room, {}).values())
        writes = [info for info in infos if not info.is_dummy]
        claim = self.digest(bootstrap_room, writes, kv_indices, index_slice.start, is_last_chunk)
        pieces = self._pieces(infos, index_slice)
        for start, end in pieces:
            for info in infos:
                if self._piece_pages(info):
                    self._ask_for_staging(info, start, end - start)
        for start, end in pieces or [(index_slice.start, index_slice.stop)]:
            part = slice(start - index_slice.start, end - index_slice.start)
            is_last = is_last_chunk and end == index_slice.stop
            # The engine queues nothing of a room that has failed; another thread may be about to say so.
            with self.rooms.lock:
                if infos and self.request_status.get(bootstrap_room, KVPoll.Failed) != KVPoll.Failed:
                    self.queued.add(bootstrap_room, self.rooms.live[bootstrap_room], claim if is_last else None)
                super().add_transfer_request(
                    bootstrap_room, kv_indices[part], slice(start, end), is_last, aux_index, state_indices
                )
        for info in writes:
            saved = (info.decode_prefix_len or 0) // self.kv_args.page_size if is_last_chunk else 0
            runs = len(pieces) or count_runs(kv_indices, info.dst_kv_indices[index_slice])
            states = len(info.dst_state_indices) if is_last_chunk and state_indices is not None else 0
            self.count_transfer(info.mooncake_session_id, len(kv_indices), saved, runs, states)

    def sync_status_to_decode_endpoint(
        self, remote: str, dst_port: int, room: int, status: int, prefill_rank: int
    ) -> None:
        """Adds to the engine's message of a success the digest of what was sent, where decode asked for it.

        And that decode ranks with the flag are told once: of a success only if not of a failure, and of that by the
        sender alone, when nothing is written any more.
        """
        peer = Peer(remote, dst_port)
        if self.last_words.concerns(room, peer) and (
            status != KVPoll.Success or not self.last_words.take(room, {peer})
        ):
            return
        claim = self.queued.claims.get(room) if status == KVPoll.Success else None
        try:
            if claim is None:
                super().sync_status_to_decode_endpoint(remote, dst_port, room, status, prefill_rank)
            else:
                frames = [b"%d" % room, b"%d" % status, b"%d" % prefill_rank, claim.encode("ascii")]
                # The socket of the engine's message: what has gone over it before must come before.
                address = NetworkAddress(remote, dst_port)
                self._connect(address.to_tcp(), is_ipv6=address.is_ipv6).send_multipart(frames)
        except Exception:
            # The request fails for that, and decode is told so.
            self.last_words.unsaid(room, peer)
            raise

    def maybe_send_extra(self, req: TransferInfo, prefill_state_indices: list[int], *args, **kwargs):
        """Adds that a state that could not be written fails the room; the engine goes on to report a success.

        So it does where decode expects more pages of a window than there are, and sends fewer. Not for a decode worker
        without the flag, for which nothing changes.
        """
        ours, theirs = len(prefill_state_indices), len(req.dst_state_indices)
        if req.names_prefix and ours != theirs:
            raise RuntimeError(f"there are {ours} pages of its state or window, and decode expects {theirs}")
        failed = super().maybe_send_extra(req, prefill_state_indices, *args, **kwargs)
        if failed and req.names_prefix:
            raise RuntimeError(f"its state could not be written to {req.endpoint}:{req.dst_port}")
        return failed

    def send_aux(self, req: TransferInfo, *args, **kwargs) -> int:
        """Adds that of several pipeline stages only the last one writes the metadata, which it has sampled.

        Each does for a decode worker without the flag.
        """
        if req.names_prefix and not self.samples_tokens:
            return 0
        return super().send_aux(req, *args, **kwargs)

    def transfer_worker(self, queue, executor, staging_buffer=None) -> None:
        """Wraps the engine's thread, which an error of one chunk ends, and with it all transfers of its queue."""
        watched = WatchedQueue(queue, executor, lambda chunk: self._prepare(chunk, staging_buffer), self._on_chunk_done)
        self.watched_queues.append(watched)
        self.queued.writers.add(threading.get_ident())
        while True:
            try:
                super().transfer_worker(watched, watched, staging_buffer)
            except Exception as e:
                cause = e.__context__ or e
                logger.exception("Transfer of room %s failed", watched.room)
                if watched.room in self.request_status:
                    self.fail_room(watched.room, f"transfer over Mooncake failed: {type(cause).__name__}: {cause}")

    def _prepare(self, chunk, staging_buffer) -> bool | None:
        """See `WatchedQueue`. Not of a request that decode must have given up while this worker stood still."""
        sender = self.queued.sender(chunk.room)
        late = sender and sender._overdue()
        if late:
            # The scheduler has perhaps not seen it yet, and decode may have given its pages away.
            self.fail_room(chunk.room, late)
            return None
        return self._write_granted(chunk, staging_buffer)

    def _on_chunk_done(self, room: int) -> None:
        with self.rooms.lock:
            self.queued.done(room)

    def is_writing(self, room: int) -> bool:
        """Whether a chunk of ``room`` is being written to decode at this moment."""
        return any(watched.room == room for watched in self.watched_queues)

    # ---- prefill: failures ----

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Adds, on prefill, that the end of a write says nothing where its request has failed elsewhere meanwhile.

        Nobody would read it but the next request of the room, which would take it for its own.
        """
        with self.rooms.lock:
            if not self.queued.is_late(bootstrap_room, self.rooms.live.get(bootstrap_room)):
                super().update_status(bootstrap_room, status)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Adds, on prefill, that nobody is told why a write failed whose request has ended."""
        with self.rooms.lock:
            if not self.queued.is_late(bootstrap_room, self.rooms.live.get(bootstrap_room)):
                super().record_failure(bootstrap_room, failure_reason)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Adds that a transfer thread may ask about a request that ends just then, with nothing left to do for it."""
        if threading.get_ident() in self.queued.writers:
            return self.request_status.get(bootstrap_room, KVPoll.Success)
        return super().check_status(bootstrap_room)

    @property
    def _rank(self) -> int:
        """The number by which decode tells the prefill ranks of a request apart; the engine's."""
        return (self.attn_tp_rank * self.pp_size + self.pp_rank) * self.attn_cp_size + self.attn_cp_rank

    def end_room(self, room: int, reason: str | None = None) -> None:
        """Adds that chunks of it that wait for staging memory wait no more."""
        super().end_room(room, reason)
        for watched in self.watched_queues:
            watched.wake(room)

    def tell_failure(self, room: int, infos: Iterable[TransferInfo], reason: str) -> None:
        """End ``room`` here and tell decode, so that it need not wait for its time-out.

        Chunks of it that are still queued are not sent.
        """
        with self.rooms.lock:
            self.end_room(room, reason)
            cancels = self.cancels.pop(room, set())
        self._tell_when_quiet(room, listeners(infos) | cancels, reason)

    def _tell_when_quiet(self, room: int, peers: set[Peer], reason: str) -> None:
        """Tell decode that ``room`` failed when no write of this rank is under way; it frees the pages then.

        Not those who have been told of its end.
        """
        peers = self.last_words.take(room, peers)

        def tell() -> None:
            say_failed(self.last_words, room, self._rank, peers, reason)

        if not any(watched.defer(room, tell) for watched in self.watched_queues):
            tell()

    # ---- decode: prefill workers that are gone, and their messages ----

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Wraps the engine's, which iterates over what the scheduler changes."""
        if not self.has_radix:
            super()._handle_node_failure(failed_bootstrap_addr)
            return
        for room in self.lose_prefill(failed_bootstrap_addr):
            if self.request_status.get(room, KVPoll.Success) != KVPoll.Success:
                self.fail_room(
                    room, f"Losing connection with prefill instance (bootstrap_addr: {failed_bootstrap_addr})"
                )

    def start_decode_thread(self) -> None:
        """Wraps the engine's threads: they get only messages that they can read."""
        self.server_socket = Inbox(self.server_socket, self._check_on_decode)
        super().start_decode_thread()

    def _check_on_decode(self, frames: list[bytes]) -> bool:
        """Take metadata and the end of transfers; whether the engine may take this message (staging)."""
        kind = frames[0]
        if kind in (b"CHUNK_READY", b"STAGING_REQ"):
            return self._takes_engine_staging(frames)
        is_aux = kind == self.AUX_DATA_HEADER
        room = wire_int(frames[1] if is_aux else kind, "room")
        if room not in self.awaited_rooms:
            logger.debug("Message for room %s, which nobody waits for", room)
            return False
        if not is_aux and self.staging is not None and frames[1] in (STAGE, STAGED):
            try:
                self._on_piece(self.staging, room, frames)
            except Exception as e:
                logger.exception("Room %s: a piece of its KV is lost", room)
                self.fail_room(room, f"prefill's KV cannot be used: {e}")
            return False
        end = None if is_aux else End.read(room, frames)
        if end is not None and self.enable_staging and not self.has_radix:
            return end.said is None
        with self.rooms.lock:
            # The scheduler may just have closed its books.
            if room in self.awaited_rooms:
                self._handle_aux_data(frames) if end is None else self._on_end(room, end)
        return False

    def _on_end(self, room: int, end: End) -> None:
        """A prefill rank writes no more for ``room``: it has written everything, or it has failed."""
        self.awaited_rooms.hear(room, end)
        if not end.succeeded:
            reason = "its transfer failed, see its log" if end.said is None else end.said
            self.fail_room(room, f"prefill reported: {reason}")
            return
        responses = self.prefill_response_tracker[room]
        responses.add(end.rank)
        done = len(responses) == self.required_prefill_response_num_table.get(room)
        # What has failed here stays so; the engine takes the higher of both.
        if done and self.request_status.get(room) != KVPoll.Failed:
            self.update_status(room, KVPoll.Success)


class MooncakeKVSender(engine.MooncakeKVSender):
    """Mooncake sender that starts at decode's prefix, and whose failure is its own request's only."""

    _told = _closed = False

    def tell_failure(self, reason: str) -> None:
        """Tell every decode rank that asked this one for KV, once."""
        if self._told:
            return
        self._told = True
        with self.kv_mgr.rooms.lock:
            infos = self._infos or dict(self.kv_mgr.transfer_infos.get(self.bootstrap_room, {}))
        self.kv_mgr.tell_failure(self.bootstrap_room, infos.values(), reason)

    def abort(self) -> None:
        """Adds to the engine's abort that decode is told, and that what has failed is not aborted."""
        if self._failed():
            return
        super().abort()
        self.tell_failure("aborted on prefill")

    def send(self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None) -> None:
        """Adds to the engine's send that a failed request sends nothing, and that an error fails this request only."""
        self._heed_refusal()
        if self._failed():
            return
        try:
            super().send(kv_indices, state_indices)
        except Exception as e:
            self.fail(f"transfer over Mooncake failed: {e}")

    def poll(self) -> KVPoll:
        """Adds to the engine's poll decode's prefix, and that a failure is reported only when nothing is being sent.

        The request's pages are freed after that. And that the engine's time-out counts from when decode last said that
        the request waits there.
        """
        if self.agreed:
            return KVPoll.WaitingForInput
        rooms = self.kv_mgr.rooms
        if self.conclude_state is None and self.init_time is not None and self.bootstrap_room in rooms.waiting:
            unheard = rooms.unheard_s(self.bootstrap_room, self.made_at)
            self.init_time = max(self.init_time, time.time() - unheard)
        status = super().poll()
        if status not in (KVPoll.Success, KVPoll.Failed):
            self._heed_refusal()
            if status == KVPoll.WaitingForInput and not self._failed():
                self.accept_decode_prefix()
            if self.kv_mgr.enable_staging and not self._failed():
                reason = self.kv_mgr.why_ungranted(self.bootstrap_room, self._infos.values(), self.made_at)
                if reason is not None:
                    self.fail(reason)
        if self._failed():
            # Once it has been reported, a chunk that is taken from the queue only to be dropped does not take it back.
            if not self._closed and self.kv_mgr.is_writing(self.bootstrap_room):
                return KVPoll.WaitingForInput
            self._close_failed("no reason was recorded")
            return KVPoll.Failed
        return status

    def _close_failed(self, default: str) -> None:
        """Tell decode, and close the books but for the reason."""
        if not self._closed:
            self._closed = True
            self.tell_failure(self.why(default))
            self.clear()

    def clear(self) -> None:
        """Adds that the room is remembered as ended, and that nothing is left of one that failed."""
        super().clear()
        manager, room = self.kv_mgr, self.bootstrap_room
        if self._failed():
            manager.forget(room)
        else:
            manager.end_room(room)
        manager.cancels.pop(room, None)
        manager.rooms.take_refusal(room)

    def failure_exception(self) -> None:
        """Replaces the engine's: decode is told also by the ranks on which nothing went wrong."""
        self.conclude_state = KVPoll.Failed
        self._close_failed("failed on another rank of prefill")
        raise engine.KVTransferError(self.bootstrap_room, self.why())


class MooncakeKVReceiver(engine.MooncakeKVReceiver):
    """Mooncake receiver that asks for the delta."""

    carries_prefix = True

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        """Wraps the engine's message; with a prefix to name, sends the longer one of docs/protocol.md itself.

        kv_indices: pages to be written, int32. decode_prefix_len: tokens decode holds, None to send the engine's
        message byte for byte.
        """
        self.kv_mgr.awaited_rooms.add(self.bootstrap_room)
        if decode_prefix_len is None or self.bootstrap_infos is None:
            self.asked = True
            super().send_metadata(kv_indices, aux_index, state_indices)
            return
        if self._offers_staging and self.require_staging:
            self.kv_mgr.staging.open(self.bootstrap_room, kv_indices, self.prefill_info.attn_tp_size)
        verify = self.ask_for_digest(kv_indices)
        states = b"" if state_indices is None else np.array(state_indices, dtype=np.int32).tobytes()
        for peer in self.bootstrap_infos:
            dummy = peer["is_dummy"]
            frames = [
                *head(self.kv_mgr, self.bootstrap_room, self.session_id),
                b"" if dummy else kv_indices.astype(np.int32).tobytes(),
                b"" if dummy else str(aux_index).encode("ascii"),
                b"" if dummy else states,
                b"%d" % self.required_dst_info_num,
                b"%d" % decode_prefix_len,
                b"%d" % dummy,
                *([DIGEST] if verify else []),
            ]
            self._send_to(peer, frames)
            self.asked = True
        self.init_time = time.time()

    def poll(self) -> KVPoll:
        """Adds to the engine's poll that success waits for the metadata, and for what comes by way of staging."""
        self.shake_hands()
        state, room, staging = super().poll(), self.bootstrap_room, self.kv_mgr.staging
        # At any state: it is this that makes room in the buffer.
        if staging is not None and not staging.landed(room) and state == KVPoll.Success:
            if not staging.lacks(room):
                return KVPoll.Transferring
            self.kv_mgr.record_failure(room, "prefill has reported a success before it had written all pieces")
            self.conclude_state = state = KVPoll.Failed
        return self.once_metadata_landed(state)

    def failure_exception(self) -> None:
        """Replaces the engine's, which closes the books, and with them the reason where all has arrived, before."""
        reason = self.kv_mgr.failure_reason(self.bootstrap_room, "failed on another rank of decode")
        if self.conclude_state is None:
            self.conclude_state = KVPoll.Failed
        self.clear()
        raise engine.KVTransferError(self.bootstrap_room, reason)

    def claims(self) -> Iterable[str]:
        """Replaces the base class's: they came with the messages of success."""
        return self.kv_mgr.awaited_rooms.claims(self.bootstrap_room)

    @property
    def _offers_staging(self) -> bool:
        """Whether this worker has a staging buffer and this request's prefill asks for pieces of it."""
        return self.kv_mgr.staging is not None and self.bootstrap_addr in self.kv_mgr.piece_peers

    def _register_kv_args(self) -> None:
        """Adds that with a radix cache the staging buffer is offered only to prefills that ask for pieces of it.

        Others fill it by the engine's grid; offered none, they send without.
        """
        if not self._offers_staging:
            super()._register_kv_args()
            return
        manager = self.kv_mgr
        manager._staging_ctx.allocator = manager.staging_offer
        try:
            super()._register_kv_args()
        finally:
            manager._staging_ctx.allocator = None

    def clear(self) -> None:
        """Puts off the engine's while prefill, or a copy from the staging buffer, may still write to its pages."""
        staging = self.kv_mgr.staging
        landed = staging is None or staging.landed(self.bootstrap_room)
        if not self.fenced or (landed and self.conclude_state != KVPoll.Failed):
            self._end()

    def _close_books(self) -> None:
        super().clear()
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.addr_to_rooms_tracker[self.bootstrap_addr].discard(room)
        manager.awaited_rooms.forget(room)
        if manager.staging is not None:
            manager.staging.drop(room)

    def _word(self, word: bytes) -> list[bytes]:
        return [*head(self.kv_mgr, self.bootstrap_room, self.session_id), word]

    def writers_done(self) -> bool:
        """Adds that nothing is on its way from the staging buffer to the pages either."""
        staging = self.kv_mgr.staging
        return (staging is None or staging.close(self.bootstrap_room)) and super().writers_done()

    def _is_quiet(self) -> bool:
        # Of a failure the engine says no more.
        quiet = self.kv_mgr.awaited_rooms.num_quiet(self.bootstrap_room, says_so=self.peer_takes_prefix)
        return quiet >= self.required_prefill_response_num


class MooncakeKVBootstrapServer(engine.MooncakeKVBootstrapServer):
    """Says that prefills over Mooncake understand a decode prefix."""

    decode_prefix_version = DECODE_PREFIX_VERSION
    asks_for_pieces = sends_digests = hears_of_waiting = True
