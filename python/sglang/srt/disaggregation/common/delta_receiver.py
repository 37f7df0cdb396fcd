"""A request's transfer on a decode rank: handshake, request for KV, cancellation, end.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with deferred release
(#35049, #35360, merged).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_sender import NO_REASON
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.prefill_peers import in_background
from sglang.srt.disaggregation.common.wire import CANCEL
from sglang.srt.disaggregation.decode_radix import hooks

logger = logging.getLogger(__name__)

# Seconds between two attempts to report a cancellation to a prefill that takes no messages.
TELL_AGAIN_S = 2.0


class NotConnected(Exception):
    """The addresses of a prefill's ranks are still being queried."""


@dataclasses.dataclass
class ReceiverState:
    """A decode rank's view of one transfer. The engine's `conclude_state` has its outcome.

    dp_rank: of prefill, until its handshake is over. query: for its ranks. asked: whether prefill
    may know where to write. writes_s: seconds for which prefill may write, 0 if unreported.
    given_up_at: monotonic time of the cancellation, 0 before. untold: prefill ranks not yet
    notified of it; told_at: the last attempt. over: whether no prefill rank writes any more.
    """

    dp_rank: int | None = None
    query: Future[tuple[Any, dict[str, list[dict]]]] | None = None
    asked: bool = False
    writes_s: float = 0.0
    given_up_at: float = 0.0
    untold: list[dict] = dataclasses.field(default_factory=list)
    told_at: float = 0.0
    over: bool = False


# Placeholder: `conn.py` puts the engine's class behind this one.
Base: Any = object


class DeltaReceiver(Base):
    """Receiver that knows whether its prefill understands a prefix.

    A backend with a prefix has ``header``: the first frames of each message to prefill, and
    ``request_frames(is_dummy, pages, states, aux_index)``: the engine's frames behind it of a
    request for KV; a dummy rank gets neither pages nor states.
    """

    # Whether the backend's send_metadata takes decode_prefix_len.
    carries_prefix = False
    # The engine's attribute: when prefill was asked.
    init_time: float | None = None
    # The room in the request's metadata buffer, 0 until something is written after admission.
    metadata_room: Callable[[], int] | None = None
    # Whether the queue keeps a failed request's pages until `writers_done`; not in the engine.
    fenced = False
    # The engine sets these in the handshake. Until then nobody writes.
    bootstrap_infos: list[dict] | None = None
    required_prefill_response_num = 0
    # The frames by which prefill compares the request's prompt with its own, if it does.
    prompt: tuple[bytes, ...] = ()

    def __init__(self, mgr, bootstrap_addr: str, bootstrap_room: int | None = None):
        """Notes its creation time, and removes what an earlier request left in the room."""
        self.made_at, self.state = time.monotonic(), ReceiverState()
        if mgr.has_radix:
            mgr.request_status.pop(bootstrap_room, None)
            mgr.failure_records.pop(bootstrap_room, None)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def init(self, prefill_dp_rank: int) -> None:
        """Begins the handshake, which `shake_hands` continues; an error fails this request only."""
        if not self.kv_mgr.has_radix:
            super().init(prefill_dp_rank)
            return
        self.state.dp_rank = prefill_dp_rank
        self.shake_hands()

    def shake_hands(self) -> None:
        """Continue the handshake of `init` if that does not block; backends' polls call it."""
        manager, state = self.kv_mgr, self.state
        rank = state.dp_rank
        if rank is None or (state.query is not None and not state.query.done()):
            return
        state.dp_rank = None
        status = manager.request_status.get(self.bootstrap_room, KVPoll.Failed)
        if state.query is not None and KVPoll.Failed in (self.conclude_state, status):
            # The request has failed meanwhile.
            return
        try:
            super().init(rank)
        except NotConnected:
            state.dp_rank = rank
            return
        except Exception as e:
            if not isinstance(e, ConnectionError):
                logger.exception(
                    "Handshake of room %s with prefill %s", self.bootstrap_room, self.bootstrap_addr
                )
            manager.forget_connections(self.bootstrap_addr)
            self.fail(
                f"the handshake with prefill {self.bootstrap_addr} failed: {type(e).__name__}: {e}"
            )
        if self.bootstrap_addr not in manager.prefill_info_table:
            # Prefill was lost during the handshake.
            manager.forget_connections(self.bootstrap_addr)
            if self.conclude_state == KVPoll.Failed:
                self.fail(f"prefill {self.bootstrap_addr} is gone: it was lost in the meantime")

    def _setup_bootstrap_infos(self) -> None:
        """Wraps the engine's queries, which a thread makes. Raises NotConnected meanwhile."""
        manager, addr, rank = self.kv_mgr, self.bootstrap_addr, self.prefill_dp_rank
        if not manager.has_radix:
            super()._setup_bootstrap_infos()
            return
        keys = [f"{addr}_{rank}_{cp}_{self.target_tp_rank}" for cp in self.target_cp_ranks]
        known = [manager.connection_pool.get(key) for key in keys]
        if None in known:
            known = _register(self)
        self.bootstrap_infos = [info for infos in known for info in infos or ()]

    def failure(self) -> Exception:
        """The error of a failed request. Changes nothing."""
        return RuntimeError(self.kv_mgr.failure_records.get(self.bootstrap_room, NO_REASON))

    def failure_exception(self) -> None:
        """Replaces the engine's, which does not report the cause."""
        raise RuntimeError(self.kv_mgr.take_reason(self.bootstrap_room))

    @property
    def peer_takes_prefix(self) -> bool:
        """Whether the request may name a prefix to its prefill."""
        return self.carries_prefix and self.kv_mgr.prefills.of(self.bootstrap_addr).takes_prefix

    def send_requests(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None,
        state_indices: list[int] | None,
        decode_prefix_len: int,
    ) -> frozenset[bytes]:
        """Ask every prefill rank for KV; returns the tags of parts that they answer.

        Arguments as of `send_metadata`. Raises NotTaken.
        """
        parts = [(p, own) for p in hooks.PARTS if (own := p.write(self, kv_indices)) is not None]
        pages = kv_indices.astype(np.int32).tobytes()
        states = np.array(() if state_indices is None else state_indices, dtype=np.int32).tobytes()
        for peer in self.bootstrap_infos or []:
            is_dummy = peer["is_dummy"]
            own = self.request_frames(is_dummy, pages, states, aux_index)
            mine = chain(*([p.tag, *said] for p, said in parts if p.dummies or not is_dummy))
            prefix = [b"%d" % decode_prefix_len, b"%d" % is_dummy]
            self._send_to(peer, [*self.header, *own, *prefix, *mine, *self.prompt])
            self.state.asked = True
            self.state.writes_s = self.kv_mgr.prefills.of(self.bootstrap_addr).waiting_timeout
        return frozenset(p.tag for p, _ in parts if p.answer is not None)

    def _send_to(self, peer: dict, frames: list[bytes]) -> None:
        """Send a prefill rank a message. Raises NotTaken."""
        socket, lock = self._connect_to_bootstrap_server(peer)
        with lock:
            socket.send_multipart(frames)

    def answers(self, tag: bytes) -> Iterable[str]:
        """The answers to a part of the request, see `MessagePart`. Backends override it."""
        return ()

    def once_metadata_landed(self, state: KVPoll) -> KVPoll:
        """``state``; success only once the request's own metadata is in its buffer.

        A rank may see the notification before the data, and ranks would commit in different steps.
        If another request's late write is in the buffer, the request must fail on all ranks.
        """
        room = self.bootstrap_room
        if state != KVPoll.Success or self.metadata_room is None:
            return state
        in_buffer = self.metadata_room()
        if in_buffer == room:
            return state
        if in_buffer == 0 and not self._is_overdue():
            return KVPoll.Transferring
        other = f"its metadata buffer holds that of room {in_buffer}"
        self.kv_mgr.record_failure(room, other if in_buffer else "its metadata has not come")
        return KVPoll.Failed

    def _is_overdue(self) -> bool:
        begun = self.init_time
        return begun is not None and time.time() - begun >= self.kv_mgr.waiting_timeout

    def fail(self, reason: str) -> None:
        """Fail this request for ``reason``; the queues see it at its next poll."""
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed

    def cancel(self) -> None:
        """End this request, whose reason has been reported, and have prefill stop writing."""
        if self.conclude_state is None:
            # The request failed on another rank.
            self.conclude_state = KVPoll.Failed
        self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        self.state.given_up_at = time.monotonic()
        if not self.fenced:
            # Prefill was never asked: there are no writers.
            self.end()
        if self.peer_takes_prefix:
            ranks = self.bootstrap_infos or []
            self.state.untold = [rank for rank in ranks if not rank["is_dummy"]]
            self._tell()

    def _tell(self) -> None:
        """Cancel at the remaining prefill ranks; a rank that takes no message stays in the list."""
        state, room, again = self.state, self.bootstrap_room, self.state.told_at > 0
        untold, state.untold, state.told_at = state.untold, [], time.monotonic()
        for peer in untold:
            try:
                self._send_to(peer, [*self.header, CANCEL])
            except Exception as e:
                # The next attempt replaces a socket that was being closed.
                level = logging.DEBUG if again or isinstance(e, NotTaken) else logging.WARNING
                logger.log(level, "Prefill cannot be told that room %s is given up: %s", room, e)
                state.untold.append(peer)

    def writers_done(self) -> bool:
        """Whether every prefill rank has finished, cancelled, is lost or exceeded its timeout.

        It stays True: the TP ranks find out in different steps and act when all have.
        """
        state, room = self.state, self.bootstrap_room
        if state.over:
            return True
        # Also if the request could not be cancelled.
        state.given_up_at = state.given_up_at or time.monotonic()
        try:
            if state.untold and time.monotonic() - state.told_at >= TELL_AGAIN_S:
                self._tell()
            state.over = self._nobody_writes()
        except Exception:
            # Wait for the timeout.
            logger.exception("Room %s: whether prefill still writes for it", room)
        if not state.over and time.monotonic() - state.given_up_at > self.quarantine_s:
            logger.warning(
                "Room %s failed over %.0f s ago and prefill %s never said that it writes no more: "
                "pages are reused.",
                room,
                self.quarantine_s,
                self.bootstrap_addr,
            )
            state.over = True
        if state.over:
            self.end()
        return state.over

    @property
    def quarantine_s(self) -> float:
        """Seconds after which prefill begins no write for a cancelled request, even unanswered.

        At least this worker's own timeout, and that of prefill when asked: another prefill may have
        its address by now.
        """
        manager = self.kv_mgr
        # Only another rank has asked prefill: use what prefill reports now.
        wait_s = self.state.writes_s or manager.prefills.of(self.bootstrap_addr).waiting_timeout
        return max(manager.waiting_timeout, wait_s)

    def _nobody_writes(self) -> bool:
        # If the request failed only on another rank, all data may have arrived here.
        if self.conclude_state == KVPoll.Success or not self.state.asked or self._is_quiet():
            return True
        # Otherwise the processes must have ended. An unresponsive process may still write.
        ranks = [(peer["rank_ip"], peer["rank_port"]) for peer in self.bootstrap_infos or []]
        return self.kv_mgr.are_gone(ranks)

    def end(self) -> None:
        """Remove the room, and reasons recorded after the first, which nobody reads."""
        with self.kv_mgr.rooms.lock:
            self._forget_room()
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def _is_quiet(self) -> bool:
        """Whether no prefill rank writes any more; a backend that cannot tell returns True."""
        return True

    def _forget_room(self) -> None:
        """Remove an ended request; backends that keep state of a failed one override it."""


def _register(receiver: DeltaReceiver) -> list[list[dict]]:
    """Register this worker's memory with the ranks of a new prefill, which it returns.

    Raises NotConnected during their query, and ConnectionError.
    """
    manager, addr, state = receiver.kv_mgr, receiver.bootstrap_addr, receiver.state
    queries, name = manager.rank_queries, f"{addr}, DP rank {receiver.prefill_dp_rank}"
    if state.query is None:
        # Requests that arrive during a query share it.
        state.query = queries.get(name)
        if state.query is None or state.query.done():
            state.query = in_background(_ranks_fetcher(receiver), f"ask {name} for its ranks")
            queries[name] = state.query
    if not state.query.done():
        raise NotConnected
    queries.pop(name, None)
    if (error := state.query.exception()) is not None:
        raise ConnectionError(f"{type(error).__name__}: {error}")
    prefill, found = state.query.result()
    if manager.prefill_info_table.get(addr) is not prefill:
        raise ConnectionError("it was lost in the meantime")
    for infos in found.values():
        receiver.bootstrap_infos = infos
        receiver._register_kv_args()
    manager.connection_pool.update(found)
    return [*found.values()]


def _ranks_fetcher(receiver: DeltaReceiver) -> Callable[[], tuple[Any, dict[str, list[dict]]]]:
    """The query of a prefill's ranks: its info, and their addresses as in `connection_pool`."""
    # Copies: nothing is recorded of this request, and the scheduler registers the memory later.
    scout, manager = copy.copy(receiver), copy.copy(receiver.kv_mgr)
    scout.kv_mgr, scout.bootstrap_room, scout._register_kv_args = manager, None, lambda: None
    manager.connection_pool = {}

    def fetch() -> tuple[Any, dict[str, list[dict]]]:
        super(DeltaReceiver, scout)._setup_bootstrap_infos()
        if scout.conclude_state == KVPoll.Failed:
            raise ConnectionError(
                "its bootstrap server does not say where its ranks listen, see the log"
            )
        return scout.prefill_info, manager.connection_pool

    return fetch
