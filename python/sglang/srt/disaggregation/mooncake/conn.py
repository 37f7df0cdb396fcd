"""Delta transfer over Mooncake.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_prefix import (
    CANCEL,
    DECODE_PREFIX_VERSION,
    DIGEST,
    GIVEN_UP,
    QUEUED,
    check_prefix_frames,
    count_runs,
    wire_int,
)
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.last_words import LastWords
from sglang.srt.disaggregation.mooncake.staging import PATIENCE_S, StagingKVManager
from sglang.srt.disaggregation.mooncake.watched_queue import WatchedQueue
from sglang.srt.disaggregation.mooncake.wire import (
    ENGINE_STAGING,
    GRANT,
    STAGE,
    STAGED,
    Inbox,
    Peer,
    check_engine_staging,
    head,
    listeners,
    post,
)
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

__all__ = [
    "MooncakeKVBootstrapServer",
    "MooncakeKVManager",
    "MooncakeKVReceiver",
    "MooncakeKVSender",
    "TransferInfo",
]


@dataclasses.dataclass
class TransferInfo(engine.TransferInfo):
    """Decode's request for KV, with the prefix it holds.

    decode_prefix_len: tokens, None when decode names none and so does not know the frames of this patch set. grants:
    where in decode's staging buffer pieces may be written, bytes by first page; written: pieces that have been.
    wants_digest: of the pages sent.
    """

    decode_prefix_len: int | None = None
    wants_digest: bool = False
    grants: dict[int, int] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)

    @property
    def names_prefix(self) -> bool:
        """Whether decode runs with the flag and this message says what it holds."""
        return self.decode_prefix_len is not None

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> TransferInfo:
        """Wraps the engine's parser: reads the frames that a decode worker with a radix cache appends.

        Raises ValueError for a message that cannot be right.
        """
        info = super().from_zmq(msg)
        if len(msg) > 8:
            check_prefix_frames(msg)
            info.wants_digest = len(msg) == 11
            info.decode_prefix_len = wire_int(msg[8], "decode_prefix_len")
            # The engine tells a dummy by what is missing; a full hit has no pages either, but it has metadata to come.
            if info.is_dummy != (msg[9] == b"1"):
                raise ValueError("its dummy mark and its metadata index contradict each other")
        return info


class MooncakeKVManager(StagingKVManager):
    """Mooncake manager that sends deltas, counts bytes and survives bad messages."""

    room_books = (
        *StagingKVManager.room_books,
        "cancels",
        "queued",
        "queued_for",
        "claims",
        "told_claims",
        "awaited_rooms",
        "quiet_ranks",
        "failed_ranks",
    )

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
        self.last_words = LastWords()
        # Prefill: chunks that are queued or being written, by room, whose they are, and the threads that write them.
        self.queued: dict[int, int] = defaultdict(int)
        self.queued_for: dict[int, MooncakeKVSender] = {}
        self.writers: set[int] = set()
        # Digests of pages. Prefill: of what has been queued, by room; decode: as told, by room and prefill rank.
        self.claims: dict[int, str] = {}
        self.told_claims: dict[int, dict[int, str]] = {}
        # Decode: whether it has been said that a prefill uses staging buffers and this worker does not.
        self.staging_told = False
        # Decode: rooms for which prefill has been asked, and may say something.
        self.awaited_rooms: set[int] = set()
        # Prefill ranks that write no more, by room; and those that said no more than that they failed.
        self.quiet_ranks: dict[int, set[int]] = {}
        self.failed_ranks: dict[int, set[int]] = {}
        super().__init__(*args, **kwargs)

    # ---- prefill: messages of decode workers ----

    def start_prefill_thread(self) -> None:
        """Wraps the engine's thread: it gets only messages that it can read."""
        self.server_socket = Inbox(self.server_socket, self._check_on_prefill)
        super().start_prefill_thread()

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """Take requests for one room's KV; whether the engine may take this message (staging, a registration)."""
        kind = frames[0]
        if kind in ENGINE_STAGING:
            self._check_staging(kind)
            check_engine_staging(frames)
            return True
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

    def _check_staging(self, kind: bytes) -> None:
        if not self.enable_staging or self.has_radix:
            raise ValueError(f"{kind!r} is of staging buffers, which this worker does not use")

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
                    self.queued[bootstrap_room] += 1
                    self.queued_for[bootstrap_room] = self.rooms.live[bootstrap_room]
                    if claim is not None and is_last:
                        self.claims[bootstrap_room] = claim
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
        claim = self.claims.get(room) if status == KVPoll.Success else None
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
        self.writers.add(threading.get_ident())
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
        sender = self.queued_for.get(chunk.room)
        late = sender and sender._overdue()
        if late:
            # The scheduler has perhaps not seen it yet, and decode may have given its pages away.
            self.fail_room(chunk.room, late)
            return None
        return self._write_granted(chunk, staging_buffer)

    def _on_chunk_done(self, room: int) -> None:
        with self.rooms.lock:
            self.queued[room] -= 1
            if self.queued[room] <= 0:
                del self.queued[room]
                self.queued_for.pop(room, None)
                self.claims.pop(room, None)

    def is_writing(self, room: int) -> bool:
        """Whether a chunk of ``room`` is being written to decode at this moment."""
        return any(watched.room == room for watched in self.watched_queues)

    # ---- prefill: failures ----

    def _is_late(self, room: int) -> bool:
        """Whether this thread writes for a request that has ended; another one of its room may be here."""
        if threading.get_ident() not in self.writers:
            return False
        sender = self.queued_for.get(room)
        return sender is None or self.rooms.live.get(room) is not sender

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Adds, on prefill, that the end of a write says nothing where its request has failed elsewhere meanwhile.

        Nobody would read it but the next request of the room, which would take it for its own.
        """
        with self.rooms.lock:
            if not self._is_late(bootstrap_room):
                super().update_status(bootstrap_room, status)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Adds, on prefill, that nobody is told why a write failed whose request has ended."""
        with self.rooms.lock:
            if not self._is_late(bootstrap_room):
                super().record_failure(bootstrap_room, failure_reason)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Adds that a transfer thread may ask about a request that ends just then, with nothing left to do for it."""
        if threading.get_ident() in self.writers:
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
            self._tell(room, peers, reason)

        if not any(watched.defer(room, tell) for watched in self.watched_queues):
            tell()

    def _tell(self, room: int, peers: Iterable[Peer], reason: str) -> None:
        """Send decode ranks the engine's failure message and, as a fourth frame, the reason."""
        frames = [b"%d" % room, b"%d" % KVPoll.Failed, b"%d" % self._rank, reason.encode("ascii", "replace")]
        for peer in peers:
            try:
                post(peer, frames)
            except Exception as e:
                self.last_words.unsaid(room, peer)
                logger.warning(
                    "Could not tell decode at %s:%s that room %s failed: %s", peer.endpoint, peer.port, room, e
                )

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
        if kind == b"STAGING_REQ" and (self.has_radix or not self.enable_staging):
            # One per chunk of every request; such a prefill then sends without.
            if not self.staging_told:
                logger.warning(
                    "A prefill uses staging buffers (SGLANG_DISAGG_STAGING_BUFFER) and this worker does not, or not "
                    "with prefills without sglang-pd-radix: its KV comes without them."
                )
            self.staging_told = True
            return False
        if kind in (b"CHUNK_READY", b"STAGING_REQ"):
            self._check_staging(kind)
            return True
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
        if not is_aux and len(frames) not in (3, 4):
            raise ValueError(f"the end of a transfer has 3 or 4 frames, this one of room {room} has {len(frames)}")
        if not is_aux and self.enable_staging and not self.has_radix:
            return len(frames) == 3
        with self.rooms.lock:
            # The scheduler may just have closed its books.
            if room in self.awaited_rooms:
                self._handle_aux_data(frames) if is_aux else self._on_end(room, frames)
        return False

    def _on_end(self, room: int, frames: list[bytes]) -> None:
        """A prefill rank writes no more for ``room``: it has written everything, or it has failed."""
        status, rank = wire_int(frames[1], "status"), wire_int(frames[2], "prefill rank")
        if status not in (KVPoll.Success, KVPoll.Failed):
            raise ValueError(f"room {room} cannot end with status {status}")
        if status == KVPoll.Success or len(frames) == 4:
            self.quiet_ranks.setdefault(room, set()).add(rank)
        else:
            self.failed_ranks.setdefault(room, set()).add(rank)
        if status == KVPoll.Failed:
            reason = frames[3].decode("ascii", "replace") if len(frames) == 4 else "its transfer failed, see its log"
            self.fail_room(room, f"prefill reported: {reason}")
            return
        if len(frames) == 4:
            self.told_claims.setdefault(room, {})[rank] = frames[3].decode("ascii", "replace")
        responses = self.prefill_response_tracker[room]
        responses.add(rank)
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
                self._check_staging()
        if self._failed():
            # Once it has been reported, a chunk that is taken from the queue only to be dropped does not take it back.
            if not self._closed and self.kv_mgr.is_writing(self.bootstrap_room):
                return KVPoll.WaitingForInput
            self._close_failed("no reason was recorded")
            return KVPoll.Failed
        return status

    def _check_staging(self) -> None:
        """Fail a request that will get no staging memory of decode any more."""
        room, now = self.bootstrap_room, time.monotonic()
        since = [at for watched in self.kv_mgr.watched_queues if (at := watched.since.get(room)) is not None]
        if not since or now - min(since) < PATIENCE_S:
            return
        if now - min(since) > self.kv_mgr.bootstrap_timeout:
            self.fail(f"decode has granted no staging memory for {now - min(since):.0f} s")
        elif any(
            self.kv_mgr.liveness.are_gone([(info.endpoint, info.dst_port)], self.made_at)
            for info in self._infos.values()
        ):
            self.fail("decode, which was to grant staging memory, is gone")

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
        return self.kv_mgr.told_claims.get(self.bootstrap_room, {}).values()

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
        manager.awaited_rooms.discard(room)
        manager.quiet_ranks.pop(room, None)
        manager.failed_ranks.pop(room, None)
        manager.told_claims.pop(room, None)
        if manager.staging is not None:
            manager.staging.drop(room)

    def _word(self, word: bytes) -> list[bytes]:
        return [*head(self.kv_mgr, self.bootstrap_room, self.session_id), word]

    def writers_done(self) -> bool:
        """Adds that nothing is on its way from the staging buffer to the pages either."""
        staging = self.kv_mgr.staging
        return (staging is None or staging.close(self.bootstrap_room)) and super().writers_done()

    def _is_quiet(self) -> bool:
        quiet = self.kv_mgr.quiet_ranks.get(self.bootstrap_room, set())
        if not self.peer_takes_prefix:
            # More than this it will not say.
            quiet = quiet | self.kv_mgr.failed_ranks.get(self.bootstrap_room, set())
        return len(quiet) >= self.required_prefill_response_num


class MooncakeKVBootstrapServer(engine.MooncakeKVBootstrapServer):
    """Says that prefills over Mooncake understand a decode prefix."""

    decode_prefix_version = DECODE_PREFIX_VERSION
    asks_for_pieces = sends_digests = hears_of_waiting = True
