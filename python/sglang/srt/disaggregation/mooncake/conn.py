"""Delta transfer over Mooncake.

Upstream: sgl-project/sglang#24257 (merged), with deferred release (#35049, merged).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.common.delta_sender import Phase, names_prefix
from sglang.srt.disaggregation.common.prefill_inbox import PrefillInbox
from sglang.srt.disaggregation.common.wire import DeltaInfo, read_message, room_header
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_VERSION, count_runs
from sglang.srt.disaggregation.mooncake import awaited_rooms, wire
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.awaited_rooms import AwaitedRoom
from sglang.srt.disaggregation.mooncake.watched_queue import QueuedChunks, WatchedQueue
from sglang.srt.disaggregation.mooncake.wire import Peer
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
class TransferInfo(DeltaInfo, engine.TransferInfo):
    """Decode's request for KV, with the prefix it holds."""

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> TransferInfo:
        """Adds a check: in the engine missing frames mean a dummy, as a full hit has no pages."""
        info = super().from_zmq(msg)
        if info.dummy not in (None, info.is_dummy):
            raise ValueError("its dummy mark and its metadata index contradict each other")
        return info


# For a failure without a reason on this decode rank.
ELSEWHERE = "failed on another rank of decode"


class MooncakeKVManager(engine.MooncakeKVManager):
    """Mooncake manager that sends deltas, counts bytes and survives bad messages."""

    ends_rooms = True
    rank_word, dummies_answer = "session", False
    room_books = (*CommonKVManager.room_books, "cancels", "queued", "awaited_rooms")

    def __init__(self, *args, **kwargs):
        """Adds the queues that know which room is being written."""
        # Before the engine's `__init__`: it starts threads, and makes the session tables later.
        self.watched_queues: list[WatchedQueue] = []
        self.session_lock = threading.Lock()
        self.session_failures: dict[str, int] = defaultdict(int)
        self.failed_sessions: set[str] = set()
        self.queued = QueuedChunks()
        self.awaited_rooms: dict[int, AwaitedRoom] = {}
        super().__init__(*args, **kwargs)

    def start_prefill_thread(self) -> None:
        """Wraps the engine's thread: it gets only readable messages."""
        self.inbox = PrefillInbox(self)
        self.server_socket = wire.CheckedSocket(self.server_socket, self._check_on_prefill)
        super().start_prefill_thread()

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """Handle a message about one room; returns True for the engine's messages."""
        if frames[0] in wire.STAGING_TO_PREFILL:
            return self.takes_engine_staging(frames)
        message = read_message(frames, lambda frames: Peer.read(frames[1:3]), TransferInfo.from_zmq)
        if message is None:
            session = engine.KVArgsRegisterInfo.from_zmq(frames).mooncake_session_id
            if not session.rpartition(":")[2].isdecimal():
                raise ValueError(f"session id {session!r} does not end in a port")
            return True
        self.inbox.take(message)
        return False

    def takes_engine_staging(self, frames: list[bytes]) -> bool:
        """Whether the engine handles its messages about staging buffers."""
        return self.leaves_ends_to_the_engine

    @property
    def stages_deltas(self) -> bool:
        """Whether a staging buffer is made with a radix cache, too."""
        return False

    def _init_staging_allocator(self) -> None:
        """With a radix cache, none: the engine's grid of chunks has no prefix."""
        if not self.has_radix or self.stages_deltas:
            super()._init_staging_allocator()

    @property
    def _rank(self) -> int:
        """The engine's number of this prefill rank in messages to decode."""
        stage = self.attn_tp_rank * self.pp_size + self.pp_rank
        return stage * self.attn_cp_size + self.attn_cp_rank

    def can_tell(self, peer: Peer, names_prefix: bool) -> bool:
        """Whether the rank reads notices of four frames."""
        return names_prefix

    def in_the_way(self, room: int) -> str | None:
        """Chunks that would be written to the new request's pages, and end it."""
        queued = "chunks of an earlier request of this room are still queued"
        return queued if room in self.queued else None

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: npt.NDArray[np.int32],
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ) -> None:
        """Wraps the engine's: counts bytes. A full hit's last chunk has metadata and no KV."""
        failed = self.request_status.get(bootstrap_room, KVPoll.Failed) == KVPoll.Failed
        infos = [] if failed else list(self.transfer_infos.get(bootstrap_room, {}).values())
        writes = [info for info in infos if not info.is_dummy]
        answers = self.answers(bootstrap_room, writes, kv_indices, index_slice.start, is_last_chunk)
        # The engine queues nothing of a failed room; another thread may fail it now.
        with self.rooms.lock:
            if infos and self.request_status.get(bootstrap_room, KVPoll.Failed) != KVPoll.Failed:
                answer = next(iter(answers.values()), None)
                self.queued.add(bootstrap_room, self.rooms.live[bootstrap_room], answer)
            super().add_transfer_request(
                bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index, state_indices
            )
        for info in writes:
            saved = info.decode_prefix_len // self.kv_args.page_size if is_last_chunk else 0
            runs = count_runs(kv_indices, info.dst_kv_indices[index_slice])
            n = len(info.dst_state_indices) if is_last_chunk and state_indices is not None else 0
            self.count_transfer(info.mooncake_session_id, len(kv_indices), saved, runs, n)

    def sync_status_to_decode_endpoint(
        self, remote: str, dst_port: int, room: int, status: int, prefill_rank: int
    ) -> None:
        """Adds the answer to a notice of success. With the flag, the sender reports failures."""
        peer = Peer(remote, dst_port)
        if self.end_notices.concerns(room, peer) and (
            status != KVPoll.Success or not self.end_notices.take(room, {peer})
        ):
            return
        chunks = self.queued.get(room)
        answer = chunks.answer if chunks is not None and status == KVPoll.Success else None
        try:
            if answer is None:
                super().sync_status_to_decode_endpoint(remote, dst_port, room, status, prefill_rank)
            else:
                reply = wire.end_frames(room, status, prefill_rank, answer)
                # The engine's socket, which keeps the order of messages.
                address = NetworkAddress(remote, dst_port)
                self._connect(address.to_tcp(), is_ipv6=address.is_ipv6).send_multipart(reply)
        except Exception:
            self.end_notices.undelivered(room, peer)
            raise

    def maybe_send_extra(
        self, req: TransferInfo, prefill_state_indices: list[int], *args, **kwargs
    ):
        """Wraps the engine's, which reports success after a failed or shortened write of state."""
        ours, theirs = len(prefill_state_indices), len(req.dst_state_indices)
        if req.names_prefix and ours != theirs:
            raise RuntimeError(
                f"there are {ours} pages of its state or window, and decode expects {theirs}"
            )
        failed = super().maybe_send_extra(req, prefill_state_indices, *args, **kwargs)
        if failed and req.names_prefix:
            raise RuntimeError(f"its state could not be written to {req.endpoint}:{req.dst_port}")
        return failed

    def send_aux(self, req: TransferInfo, *args, **kwargs) -> int:
        """Wraps the engine's: with the flag, only the last pipeline stage writes metadata."""
        if req.names_prefix and not self.samples_tokens:
            return 0
        return super().send_aux(req, *args, **kwargs)

    def transfer_worker(self, queue, executor, staging_buffer=None) -> None:
        """Wraps the engine's thread, which ends at an error of one chunk."""
        watched = self.watch(queue, executor, staging_buffer)
        self.watched_queues.append(watched)
        self.queued.writers.add(threading.get_ident())
        while True:
            try:
                super().transfer_worker(watched, watched, staging_buffer)
            except Exception as e:
                room, err = watched.room, e.__context__ or e
                logger.exception("Transfer of room %s failed", room)
                why = f"transfer over Mooncake failed: {type(err).__name__}: {err}"
                if room in self.request_status:
                    self.fail_room(room, why)

    def watch(self, queue, executor, staging_buffer) -> WatchedQueue:
        """The queue that a transfer thread gets."""
        return WatchedQueue(queue, executor, self._prepare, self._on_chunk_done)

    def _prepare(self, chunk) -> bool:
        """Whether to send a chunk: not if decode must have cancelled during a stall here."""
        queued = self.queued.get(chunk.room)
        late = None if queued is None else queued.sender.overdue()
        if late is not None:
            # The scheduler may not know yet, and decode may have reused the pages.
            self.fail_room(chunk.room, late)
            return False
        # If an earlier chunk is missing, the last one must not report success.
        infos = self.transfer_infos.get(chunk.room, {}).values()
        return self.request_status.get(chunk.room) != KVPoll.Failed or not names_prefix(list(infos))

    def _on_chunk_done(self, room: int) -> None:
        with self.rooms.lock:
            self.queued.done(room)

    def is_writing(self, room: int) -> bool:
        """Whether a chunk of ``room`` is being written."""
        return any(watched.room == room for watched in self.watched_queues)

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Adds, on prefill, that a late write changes no status of the room's next request."""
        with self.rooms.lock:
            if not self.queued.is_late(bootstrap_room, self.rooms.live.get(bootstrap_room)):
                super().update_status(bootstrap_room, status)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Adds, on prefill, that a late write records no reason for an ended request."""
        with self.rooms.lock:
            if not self.queued.is_late(bootstrap_room, self.rooms.live.get(bootstrap_room)):
                super().record_failure(bootstrap_room, failure_reason)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Wraps ours: a transfer thread may ask about a request that has just ended."""
        if threading.get_ident() in self.queued.writers:
            return self.request_status.get(bootstrap_room, KVPoll.Success)
        return super().check_status(bootstrap_room)

    def tell_failure(self, room: int, peers: Iterable[Peer], reason: str) -> None:
        """Notify decode, once, that ``room`` failed, when no write is in flight."""
        due = self.end_notices.take(room, peers)
        frames = wire.end_frames(room, KVPoll.Failed, self._rank, reason)

        def tell() -> None:
            for peer in due:
                try:
                    self.connect_unwaiting(peer.endpoint, peer.port).send_multipart(frames)
                except Exception as e:
                    self.end_notices.undelivered(room, peer)
                    where = f"{peer.endpoint}:{peer.port}"
                    logger.warning(
                        "Could not tell decode at %s that room %s failed: %s", where, room, e
                    )

        # In the writing thread, or here at once.
        if not any(watched.defer(room, tell) for watched in self.watched_queues):
            tell()

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Wraps the engine's, which iterates over tables while the scheduler changes them."""
        if not self.has_radix:
            super()._handle_node_failure(failed_bootstrap_addr)
        else:
            self.lose_prefill(failed_bootstrap_addr)

    def start_decode_thread(self) -> None:
        """Wraps the engine's threads: they get only readable messages."""
        check = partial(awaited_rooms.take, self)
        self.server_socket = wire.CheckedSocket(self.server_socket, check)
        super().start_decode_thread()

    @property
    def leaves_ends_to_the_engine(self) -> bool:
        """Whether the engine needs ends of transfers for its staging buffer: without the flag."""
        return self.enable_staging and not self.has_radix

    def on_end(self, room: int, end: wire.End) -> None:
        """Record that a prefill rank writes no more for ``room``."""
        self.awaited_rooms[room].add_end(end)
        if not end.succeeded:
            reason = "its transfer failed, see its log" if end.said is None else end.said
            self.fail_room(room, f"prefill reported: {reason}")
            return
        responses = self.prefill_response_tracker[room]
        responses.add(end.rank)
        done = len(responses) == self.required_prefill_response_num_table.get(room)
        if done and self.request_status.get(room) != KVPoll.Failed:
            self.update_status(room, KVPoll.Success)


class MooncakeKVSender(engine.MooncakeKVSender):
    """Mooncake sender that starts at decode's prefix; a failure concerns one request only."""

    def on_failure(self) -> None:
        """Notifies decode as soon as no write is in flight."""
        self._tell(self.failure_reason())

    def _tell(self, reason: str) -> None:
        """End the room, drop its queued chunks, and notify every decode rank that asked, once."""
        if self.state.reach(Phase.TOLD):
            self.kv_mgr.tell_failure(self.bootstrap_room, self.end_failed_room(reason), reason)

    def abort(self) -> None:
        """Wraps the engine's: notifies decode; has no effect on a failed request."""
        if self.has_failed():
            return
        super().abort()
        self._tell("aborted on prefill")

    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        """Wraps the engine's: a failed request sends nothing; an error fails this request only."""
        self.fail_if_refused()
        if self.has_failed():
            return
        try:
            super().send(kv_indices, state_indices)
        except Exception as e:
            self.fail(f"transfer over Mooncake failed: {e}")

    def poll(self) -> KVPoll:
        """Wraps the engine's: reads decode's prefix. Failed is returned after the last write."""
        status = super().poll()
        if status not in (KVPoll.Success, KVPoll.Failed):
            self.fail_if_refused()
            if status == KVPoll.WaitingForInput and not self.has_failed():
                self.accept_decode_prefix()
        if not self.has_failed():
            return status
        # After the report, taking a chunk from the queue to discard it must not revoke the failure.
        if self.state.phase < Phase.CLOSED and self.kv_mgr.is_writing(self.bootstrap_room):
            return KVPoll.WaitingForInput
        self._close()
        return KVPoll.Failed

    def _close(self) -> None:
        """Notify decode, and remove the request from all tables but the reason's."""
        self._tell(self.failure_reason())
        if self.state.reach(Phase.CLOSED):
            self.clear()

    def clear(self) -> None:
        """Wraps the engine's: records the end of the room, or removes a failed request."""
        super().clear()
        manager, room = self.kv_mgr, self.bootstrap_room
        if self.has_failed():
            manager.forget(room)
        else:
            manager.end_room(room)
        manager.cancels.pop(room, None)
        manager.rooms.refused.pop(room, None)

    def failure_exception(self) -> None:
        """Replaces the engine's: ranks that have not failed themselves notify decode too."""
        reason = self.take_reason("failed on another rank of prefill")
        self._close()
        raise engine.KVTransferError(self.bootstrap_room, reason)


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
        """Wraps the engine's message: with a decode_prefix_len, sends that of docs/protocol.md."""
        awaited = self.kv_mgr.awaited_rooms.setdefault(self.bootstrap_room, AwaitedRoom())
        awaited.buffers.add(aux_index)
        if decode_prefix_len is None or self.bootstrap_infos is None:
            self.state.asked = True
            super().send_metadata(kv_indices, aux_index, state_indices)
            return

        self.send_requests(kv_indices, aux_index, state_indices, decode_prefix_len)
        self.init_time = time.time()

    def poll(self) -> KVPoll:
        """Wraps the engine's: success waits for the metadata."""
        self.shake_hands()
        return self.once_metadata_landed(super().poll())

    def failure_exception(self) -> None:
        """Replaces the engine's, which may remove the reason before reading it."""
        error = engine.KVTransferError(
            self.bootstrap_room, self.kv_mgr.take_reason(self.bootstrap_room, ELSEWHERE)
        )
        if self.conclude_state is None:
            self.conclude_state = KVPoll.Failed
        self.clear()
        raise error

    def failure(self) -> Exception:
        """Replaces the base class's: the engine's error class."""
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, ELSEWHERE)
        return engine.KVTransferError(self.bootstrap_room, reason)

    def answers(self, tag: bytes) -> Iterable[str]:
        """Replaces the base class's: answers arrive with the notices of success."""
        awaited = self.kv_mgr.awaited_rooms.get(self.bootstrap_room, AwaitedRoom())
        return awaited.answers.values()

    def clear(self) -> None:
        """Wraps the engine's: postponed while prefill may still write to the pages."""
        if not self.fenced or self.conclude_state != KVPoll.Failed:
            self.end()

    def _forget_room(self) -> None:
        super().clear()
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.addr_to_rooms_tracker.get(self.bootstrap_addr, set()).discard(room)
        manager.awaited_rooms.pop(room, None)

    def request_frames(
        self, is_dummy: bool, pages: bytes, states: bytes, aux_index: int | None
    ) -> list[bytes]:
        """Pages, metadata buffer, state, number of decode ranks; see docs/protocol.md."""
        own = [b""] * 3 if is_dummy else [pages, str(aux_index).encode("ascii"), states]
        return [*own, b"%d" % self.required_dst_info_num]

    @property
    def header(self) -> list[bytes]:
        room, mgr = self.bootstrap_room, self.kv_mgr
        return room_header(room, mgr.local_ip, mgr.rank_port, self.session_id)

    def _is_quiet(self) -> bool:
        # Without a prefix prefill is the engine, which reports nothing after a failure.
        awaited = self.kv_mgr.awaited_rooms.get(self.bootstrap_room, AwaitedRoom())
        return awaited.num_quiet(self.peer_takes_prefix) >= self.required_prefill_response_num


class MooncakeKVBootstrapServer(engine.MooncakeKVBootstrapServer):
    """Reports that prefills over Mooncake understand a decode prefix."""

    decode_prefix_version = DECODE_PREFIX_VERSION
