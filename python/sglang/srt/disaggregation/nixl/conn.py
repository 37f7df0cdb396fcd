"""Delta transfer over NIXL.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with #35360 (deferred
release), #36612 (failures) and #32270 (senders told apart), all merged.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.common.delta_sender import Phase, names_prefix
from sglang.srt.disaggregation.common.prefill_inbox import PrefillInbox
from sglang.srt.disaggregation.common.wire import DeltaInfo, read_message, room_header
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_VERSION, count_runs
from sglang.srt.disaggregation.nixl import conn as engine
from sglang.srt.disaggregation.utils import DisaggregationMode

logger = logging.getLogger(__name__)

__all__ = [
    "NixlKVBootstrapServer",
    "NixlKVManager",
    "NixlKVReceiver",
    "NixlKVSender",
    "TransferInfo",
    "TransferStatus",
]


@dataclasses.dataclass
class TransferInfo(DeltaInfo, engine.TransferInfo):
    """Decode's request for KV, with the prefix it holds."""

    def is_dummy(self) -> bool:
        """Replaces the engine's test: a full hit has empty indices too."""
        return self.dst_kv_indices.size == 0 if self.dummy is None else self.dummy


@dataclasses.dataclass
class TransferStatus(engine.TransferStatus):
    """What has arrived of one request, by sending agent; the engine's mixes up TP ranks."""

    # Expected agents; by agent, chunks received and announced; agents of metadata and of state.
    num_expected: int = 1
    chunks: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    num_chunks: dict[str, int] = dataclasses.field(default_factory=dict)
    aux_from: set[str] = dataclasses.field(default_factory=set)
    state_from: set[str] = dataclasses.field(default_factory=set)
    # Agents that reported a failure; they do so when none of their writes is in flight.
    failed_from: set[str] = dataclasses.field(default_factory=set)
    # Tags of the request's parts that each agent answers; the answers so far, by tag and agent.
    asked: frozenset[bytes] = frozenset()
    answers: dict[bytes, dict[str, str]] = dataclasses.field(default_factory=dict)
    # Why nothing more comes, if prefill is lost.
    lost: str | None = None

    def is_done(self) -> bool:
        """Replaces the engine's test: all of every expected agent has arrived."""
        if self.is_failure:
            return True
        return len(self._complete()) >= self.num_expected

    def _complete(self) -> set[str]:
        # Copied at once: the thread that watches prefills calls this too.
        done = {name for name, n in list(self.num_chunks.items()) if len(self.chunks[name]) == n}
        done &= self.aux_from
        for tag in self.asked:
            done &= self.answers.get(tag, {}).keys()
        return done & self.state_from if self.expects_state else done

    def add_notification(self, agent: str, kind: str, text: str | None, num_expected: int) -> None:
        """Record a prefill agent's notification; docs/protocol.md has the texts.

        num_expected: number of agents. Raises ValueError if it is malformed.
        """
        if kind == "kv":
            chunk, last, _ = (int(part) for part in (text or "").split("_"))
            if chunk < 0 or last not in (0, 1):
                raise ValueError("no such chunk")
            self.chunks.setdefault(agent, set()).add(chunk)
            if last:
                self.num_chunks[agent] = chunk + 1
                self.num_expected = num_expected
        elif kind == "aux":
            self.aux_from.add(agent)
        elif kind == "state":
            self.state_from.add(agent)
        elif kind == "fail":
            self.is_failure = True
            self.failed_from.add(agent)
        elif text is not None and kind in {p.tag.decode() for p in hooks.PARTS if p.answer}:
            self.answers.setdefault(kind.encode(), {})[agent] = text
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def is_quiet(self) -> bool:
        """Whether every expected agent has written all it announced or reported its end."""
        return len(self._complete() | self.failed_from) >= self.num_expected


class LockedAgent:
    """Lets one thread at a time call the agent; NIXL locks only if it listens on a port."""

    def __init__(self, agent):
        self._agent, self._lock = agent, threading.Lock()

    def __getattr__(self, name: str):
        value = getattr(self._agent, name)
        if not callable(value):
            return value

        def locked(*args, **kwargs):
            with self._lock:
                return value(*args, **kwargs)

        setattr(self, name, locked)
        return locked


class NixlKVManager(engine.NixlKVManager):
    """NIXL manager that sends deltas, counts bytes and survives bad messages."""

    ends_rooms = True
    rank_word, dummies_answer = "agent", True
    room_books = (*CommonKVManager.room_books, "transfer_statuses", "cancels")

    def __init__(self, *args, **kwargs):
        """Adds what writes need, before the engine starts the thread that reads messages."""
        # Handles posted by the current `send`, even if it fails later.
        self.posted: list = []
        # Whether this rank writes the metadata, or only reports that it has none.
        self.writes_metadata = True
        super().__init__(*args, **kwargs)

    def register_buffer_to_engine(self) -> None:
        """Adds a lock to prefill's agent, which the thread that reads messages uses too."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.agent = LockedAgent(self.agent)
        super().register_buffer_to_engine()

    def _start_bootstrap_thread(self) -> None:
        """Replaces the engine's thread, which ends at the first unreadable message."""
        self.inbox = PrefillInbox(self)

        def receive() -> None:
            while True:
                frames = self.server_socket.recv_multipart()
                try:
                    self._on_message(frames)
                except Exception as e:
                    logger.error("Ignored a message from a decode worker: %s", e)

        threading.Thread(target=receive, daemon=True, name="nixl-bootstrap").start()

    def _on_message(self, frames: list[bytes]) -> None:
        if frames[0] != engine.GUARD:
            raise ValueError(
                f"it does not start with {engine.GUARD!r}; is something else using this port?"
            )
        message = read_message(
            frames[1:], lambda rest: rest[3].decode("ascii"), TransferInfo.from_zmq
        )
        if message is None:
            self._add_remote_peer(engine.KVArgsRegisterInfo.from_zmq(frames[1:]))
        else:
            self.inbox.take(message)

    def _add_remote_peer(self, decode_kv_args) -> None:
        """Wraps the engine's, which keeps a registration that NIXL refused."""
        try:
            super()._add_remote_peer(decode_kv_args)
        except Exception:
            self.decode_kv_args_table.pop(decode_kv_args.agent_name, None)
            raise

    def can_tell(self, agent: str, names_prefix: bool) -> bool:
        """Whether the agent can be sent notifications; one without the flag ignores ours."""
        return agent in self.decode_kv_args_table

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: npt.NDArray[np.int32],
        index_slice: slice,
        is_last: bool,
        chunk_id: int,
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
    ):
        """Wraps the engine's: counts bytes. A full hit's last chunk has metadata and no KV."""
        infos = [i for i in self.transfer_infos[bootstrap_room].values() if not i.is_dummy()]
        # Without the flag every stage writes it, as in the engine.
        self.writes_metadata = self.samples_tokens or not any(info.names_prefix for info in infos)
        assert is_last or len(kv_indices)
        for info in infos:
            size = len(info.dst_kv_indices[index_slice])
            if size != len(kv_indices):
                raise ValueError(f"decode allocated {size} of {len(kv_indices)} pages of a chunk")
        answers = (
            self.answers(bootstrap_room, infos, kv_indices, index_slice.start, is_last)
            if len(kv_indices)
            else {}
        )
        for tag, answer in answers.items():
            for info in [i for i in infos if tag in i.parts]:
                self.agent.send_notif(
                    info.agent_name, f"{bootstrap_room}_{tag.decode()}_{answer}".encode("ascii")
                )
        handles = super().add_transfer_request(
            bootstrap_room, kv_indices, index_slice, is_last, chunk_id, aux_index, state_indices
        )
        if is_last:
            self.end_room(bootstrap_room, posted=True)
        for info in infos:
            saved = info.decode_prefix_len // self.kv_args.page_size if is_last else 0
            runs = count_runs(kv_indices, info.dst_kv_indices[index_slice])
            states = len(info.dst_state_indices) if is_last and state_indices is not None else 0
            self.count_transfer(info.agent_name, len(kv_indices), saved, runs, states)
        return [handle for handle in handles if handle is not None]

    def send_kvcache(self, *args, **kwargs):
        """Wraps the engine's: records the posted handle; see `_send_kv`."""
        return self._send_kv(super().send_kvcache, *args, **kwargs)

    def send_kvcache_slice(self, *args, **kwargs):
        """Wraps the engine's: records the posted handle; see `_send_kv`."""
        return self._send_kv(super().send_kvcache_slice, *args, **kwargs)

    def _send_kv(self, send: Callable, peer_name: str, pages: npt.NDArray, *args, **kwargs):
        """Without pages, as after a full hit, sends the notification only."""
        if len(pages):
            return self._post(send(peer_name, pages, *args, **kwargs))
        *_, notif = args
        self.agent.send_notif(peer_name, notif.encode("ascii"))
        return None

    def send_aux(
        self,
        peer_name: str,
        prefill_aux_index: int,
        dst_aux_ptrs: list[int],
        dst_aux_index: int,
        notif: str,
    ):
        """Wraps the engine's: only the last pipeline stage writes; the others just notify."""
        if self.writes_metadata:
            return self._post(
                super().send_aux(peer_name, prefill_aux_index, dst_aux_ptrs, dst_aux_index, notif)
            )
        self.agent.send_notif(peer_name, notif.encode("ascii"))
        return None

    def maybe_send_extra(self, *args, **kwargs):
        """Wraps the engine's: records the posted handle of a state."""
        handle = super().maybe_send_extra(*args, **kwargs)
        return handle if handle is None else self._post(handle)

    def _post(self, handle):
        self.posted.append(handle)
        return handle

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Wraps the engine's, which iterates over tables while the scheduler changes them."""
        if not self.has_radix:
            return super()._handle_node_failure(failed_bootstrap_addr)
        self.lose_prefill(failed_bootstrap_addr)

    def lose_room(self, room: int, reason: str) -> None:
        """All of it may have arrived: its next poll reads the notifications first."""
        status = self.transfer_statuses.get(room)
        if status is not None:
            status.lost = reason
        else:
            super().lose_room(room, reason)

    def tell_failure(self, room: int, agent_names: Iterable[str], reason: str) -> None:
        """Notify decode agents, once each, that ``room`` failed."""
        for name in self.end_notices.take(room, agent_names):
            try:
                self.agent.send_notif(name, f"{room}_fail_{reason}".encode("ascii", "replace"))
            except Exception as e:
                logger.warning(
                    "Could not tell decode agent %s that room %s failed: %s", name, room, e
                )
                # It is notified when it cancels the request.
                self.end_notices.undelivered(room, name)

    def update_transfer_status(self) -> None:
        """Replaces the engine's: a bad or late notification harms no request."""
        for agent, messages in self.agent.get_new_notifs().items():
            for data in messages:
                try:
                    self._on_notification(agent, data.decode("ascii"))
                except ValueError as e:
                    logger.error(
                        "Ignored a notification of prefill agent %s: %r (%s)", agent, data[:64], e
                    )

    def _on_notification(self, agent_name: str, text: str) -> None:
        number, kind, *rest = text.split("_", 2)
        room, said = int(number), rest[0] if rest else None
        status = self.transfer_statuses.get(room)
        if status is None:
            logger.debug("Notification for room %s, which nobody waits for: %s", room, text)
            return
        if kind == "fail":
            self.record_failure(room, f"prefill reported: {said or 'no reason'}")
        num_expected = self.required_prefill_response_num_table.get(room, 1)
        status.add_notification(agent_name, kind, said, num_expected)


class NixlKVSender(engine.NixlKVSender):
    """NIXL sender that starts at decode's prefix; a failure concerns one request only."""

    xfer_handles: list[Any]

    def _release(self) -> None:
        """Release finished handles, with the lock: garbage collection would take none."""
        self.kv_mgr.rooms.written(self.bootstrap_room, self)
        handles, self.xfer_handles = self.xfer_handles, []
        for handle in handles:
            try:
                self.kv_mgr.agent.release_xfer_handle(handle)
            except Exception as e:
                # NIXL may keep the handle of a failed write.
                logger.debug("Room %s: %r", self.bootstrap_room, e)

    def _close(self) -> None:
        """Notify decode and remove the request. No write may be in flight: decode reuses pages."""
        self._release()
        if not self.state.reach(Phase.CLOSED):
            return
        manager, room, reason = self.kv_mgr, self.bootstrap_room, self.state.reason
        with manager.rooms.lock:
            # First: once notified, decode may use the room again.
            peers = self.end_failed_room(reason)
            manager.forget(room)
        manager.tell_failure(room, peers, reason)
        manager.failure_records.pop(room, None)  # Recorded meanwhile.

    def send(
        self, kv_indices: npt.NDArray[np.int32], state_indices: list[int] | None = None
    ) -> None:
        """Wraps the engine's: a failed request sends nothing; an error fails this request only."""
        self.fail_if_refused()
        if self.has_failed():
            return
        self.kv_mgr.posted = []
        try:
            super().send(kv_indices, state_indices)
        except Exception as e:
            # The engine loses the handles that it posted before the error.
            self.xfer_handles.extend(self.kv_mgr.posted)
            self.fail(f"transfer over NIXL failed: {e!r}")

    def abort(self) -> None:
        """Wraps the engine's: has no effect once all is posted or the request has failed."""
        if not (self.has_sent or self.has_failed()):
            super().abort()

    def _states(self) -> list[str]:
        """The states of all posted writes. NIXL raises for a lost peer."""
        states = []
        for handle in self.xfer_handles:
            try:
                states.append(self.kv_mgr.agent.check_xfer_state(handle))
            except Exception as e:
                logger.debug("Room %s: %r", self.bootstrap_room, e)
                states.append("ERR")
        return states

    def is_writing(self) -> bool:
        """Whether writes to a decode worker with a radix cache are in flight."""
        return names_prefix(self.state.asked.values()) and "PROC" in self._states()

    def poll(self) -> KVPoll:
        """Replaces the engine's, which raises and ignores aborts. Failed: no write is in flight."""
        if self.waits_unasked():
            return KVPoll.Bootstrapping
        manager, room = self.kv_mgr, self.bootstrap_room
        states = self._states()
        if "ERR" in states and not self.has_failed():
            self.fail("NIXL reports an error of the transfer")
        if not self.has_sent:
            self.fail_if_refused()
        if not self.has_failed():
            if self.has_sent:
                if any(state != "DONE" for state in states):
                    return KVPoll.WaitingForInput
                self._release()
                return KVPoll.Success
            status = manager.check_status(room)
            if status == KVPoll.Success:
                # With context parallelism, a rank without data; the engine would never remove it.
                manager.end_room(room)
                manager.request_status.pop(room)
                self.has_sent = True
            if status != KVPoll.WaitingForInput:
                return status
            if self.accept_decode_prefix():
                return self.poll_asked()
        if "PROC" in states:
            return KVPoll.WaitingForInput
        self._close()
        return KVPoll.Failed

    def failure_exception(self) -> None:
        """Replaces the engine's: answers decode too, because no rank is polled again."""
        reason = self.take_reason()
        if self.poll() != KVPoll.Failed:
            self.kv_mgr.rooms.given_up.append(self)
        raise RuntimeError(reason)


class NixlKVReceiver(engine.NixlKVReceiver):
    """NIXL receiver that asks for the delta and cleans up after every outcome."""

    carries_prefix = True
    _status: TransferStatus | None = None

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        """Wraps the engine's message: with a decode_prefix_len, sends that of docs/protocol.md."""
        # Discard notifications of an earlier request of this room.
        self.kv_mgr.update_transfer_status()
        status = self.kv_mgr.transfer_statuses[self.bootstrap_room]
        status.num_expected = self.required_prefill_response_num
        if decode_prefix_len is None or self.bootstrap_infos is None:
            self.state.asked = True
            super().send_metadata(kv_indices, aux_index, state_indices)
            return

        self._status, status.expects_state = status, state_indices is not None
        asked = self.send_requests(kv_indices, aux_index, state_indices, decode_prefix_len)
        status.asked = asked
        self.started_transfer = True
        self.init_time = time.time()

    def poll(self) -> KVPoll:
        """Wraps the engine's: removes an ended request."""
        self.shake_hands()
        status = self.kv_mgr.transfer_statuses.get(self.bootstrap_room)
        if status is not None and status.lost is not None and self.conclude_state is None:
            self._fail_if_lost(status, status.lost)
        # Before the room is removed, after which no reason is recorded.
        state = self.once_metadata_landed(super().poll())
        if self.fenced and state == KVPoll.Failed:
            if status is not None:
                # The engine's poll has removed it; `writers_done` still needs it.
                self.kv_mgr.transfer_statuses[self.bootstrap_room] = status
        elif self.conclude_state is not None and state != KVPoll.Transferring:
            with self.kv_mgr.rooms.lock:
                self._forget_room()
        return state

    def _fail_if_lost(self, status: TransferStatus, reason: str) -> None:
        self.kv_mgr.update_transfer_status()
        if not status.is_done():
            status.is_failure = True
            self.kv_mgr.fail_room(self.bootstrap_room, reason)

    def answers(self, tag: bytes) -> Iterable[str]:
        """Replaces the base class's: answers arrive as notifications."""
        return self._status.answers.get(tag, {}).values() if self._status is not None else ()

    def clear(self) -> None:
        """Replaces the engine's, at commit: removes the request from all tables."""
        self.end()

    def _forget_room(self) -> None:
        manager, room = self.kv_mgr, self.bootstrap_room
        manager.transfer_statuses.pop(room, None)
        manager.required_prefill_response_num_table.pop(room, None)
        manager.request_status.pop(room, None)
        manager.addr_to_rooms_tracker.get(self.bootstrap_addr, set()).discard(room)

    def request_frames(
        self, is_dummy: bool, pages: bytes, states: bytes, aux_index: int | None
    ) -> list[bytes]:
        """Pages, metadata buffer, number of decode ranks, state; see docs/protocol.md."""
        numbers = [str(aux_index).encode("ascii"), b"%d" % self.required_dst_info_num]
        return [b"", *numbers, b""] if is_dummy else [pages, *numbers, states]

    @property
    def header(self) -> list[bytes]:
        room, mgr = self.bootstrap_room, self.kv_mgr
        return [engine.GUARD, *room_header(room, mgr.local_ip, mgr.rank_port, mgr.agent.name)]

    def _is_quiet(self) -> bool:
        self.kv_mgr.update_transfer_status()
        status = self.kv_mgr.transfer_statuses.get(self.bootstrap_room)
        # Removed when all has arrived; a request may then still fail because of its metadata.
        return status is None or status.is_quiet()

    failure_exception = CommonKVReceiver.failure_exception


class NixlKVBootstrapServer(engine.NixlKVBootstrapServer):
    """Reports that prefills over NIXL understand a decode prefix."""

    decode_prefix_version = DECODE_PREFIX_VERSION
