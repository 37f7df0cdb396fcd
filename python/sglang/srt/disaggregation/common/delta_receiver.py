"""A request's transfer on a decode rank: shaking hands, asked for, given up, over.

`DeltaReceiver` is what the backends' receivers have in common. `conn.py` puts it before the engine's.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with deferred release (#35049, #35360,
merged).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_sender import NO_REASON
from sglang.srt.disaggregation.common.handshakes import Handshake, NotConnected, known_ranks
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.wire import CANCEL
from sglang.srt.disaggregation.decode_radix import hooks

logger = logging.getLogger(__name__)

# Seconds between two attempts to tell a prefill, which takes no messages, that a request is given up.
TELL_AGAIN_S = 2.0


@dataclasses.dataclass
class ReceiverState:
    """What a decode rank knows of one transfer beside the engine's `conclude_state`, which says how it ended.

    handshake: with prefill. asked: whether prefill may know where to write. writes_s: seconds for which it may then, 0
    where it has not told that. given_up_at: by the monotonic clock, 0 before. untold: prefill ranks that have still to
    be told so, and told_at, when that was last tried. over: whether nobody writes for it any more. complained: whether
    the log has why one could not be told.
    """

    handshake: Handshake = dataclasses.field(default_factory=Handshake)
    asked: bool = False
    writes_s: float = 0.0
    given_up_at: float = 0.0
    untold: list[dict] = dataclasses.field(default_factory=list)
    told_at: float = 0.0
    over: bool = False
    complained: bool = False

    def tell(self, room: int, send: Callable[[dict], None]) -> None:
        """Tell the prefill ranks that have not been told, as far as they take messages."""
        untold, self.untold, self.told_at = self.untold, [], time.monotonic()
        for peer in untold:
            try:
                send(peer)
            except Exception as e:
                # What could not be sent on a socket that was being closed is sent on a new one the next time.
                quiet = self.complained or isinstance(e, NotTaken)
                self.complained |= not quiet
                level = logging.DEBUG if quiet else logging.WARNING
                logger.log(level, "Prefill cannot be told that room %s is given up: %s", room, e)
                self.untold.append(peer)

    def await_writers(
        self, room: int, addr: str, timeout_s: float, send: Callable[[dict], None], nobody_writes: Callable[[], bool]
    ) -> bool:
        """Whether no prefill rank writes for it any more, or had as long as a transfer may take.

        send: tells one that the request is given up. nobody_writes: whether all that might have said so, or are gone.
        """
        # Even if it could not be cancelled.
        self.given_up_at = self.given_up_at or time.monotonic()
        try:
            if self.untold and time.monotonic() - self.told_at >= TELL_AGAIN_S:
                self.tell(room, send)
            done = nobody_writes()
        except Exception:
            # Then time says.
            logger.exception("Room %s: whether prefill still writes for it", room)
            done = False
        if not done and time.monotonic() - self.given_up_at > timeout_s:
            logger.warning(
                "Room %s failed over %.0f s ago and prefill %s never said that it writes no more: pages are reused.",
                room,
                timeout_s,
                addr,
            )
            done = True
        return done


def what_landed(in_buffer: int, room: int, is_overdue: Callable[[], bool]) -> str | None:
    """What is wrong with a metadata buffer that should hold that of ``room``; empty while it may yet come.

    None where all is well.
    """
    if in_buffer == room:
        return None
    if in_buffer == 0 and not is_overdue():
        return ""
    return f"its metadata buffer holds that of room {in_buffer}" if in_buffer else "its metadata has not come"


def _quarantine_s(receiver: DeltaReceiver) -> float:
    """Seconds after which prefill begins no write for a request that has been given up, whatever it has heard.

    Its own time-out, which began before that, where it had told that when it was asked: another may have its address
    since. And never less than this worker's.
    """
    manager = receiver.kv_mgr
    # Asked by another rank only, it goes by what is told now.
    told_s = receiver.state.writes_s or manager.prefills.of(receiver.bootstrap_addr).waiting_timeout
    return max(manager.waiting_timeout, told_s)


# The engine's class comes behind.
Base: Any = object


class DeltaReceiver(Base):
    """Receiver that knows whether its prefill understands a prefix."""

    # Whether this backend's send_metadata takes decode_prefix_len.
    carries_prefix = False
    # When prefill was asked: the engine's.
    init_time: float | None = None
    # The room in the request's metadata buffer, 0 while nothing has been written since its admission.
    metadata_room: Callable[[], int] | None = None
    # Whether the queue keeps a failed request's pages until `writers_done`. The engine's own queue does not ask.
    fenced = False
    quarantine_s = property(_quarantine_s)
    # What the engine knows only after the handshake. A request may be lost before, and nobody writes for it then.
    bootstrap_infos: list[dict] | None = None
    required_prefill_response_num = 0
    # The frames by which prefill compares the request's prompt with its own, where it does.
    prompt: tuple[bytes, ...] = ()

    def __init__(self, mgr, bootstrap_addr: str, bootstrap_room: int | None = None):
        """Notes when it was made, and forgets what an earlier request has left of its room."""
        self.made_at = time.monotonic()
        if mgr.has_radix:
            mgr.request_status.pop(bootstrap_room, None)
            mgr.failure_records.pop(bootstrap_room, None)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    @cached_property
    def state(self) -> ReceiverState:
        """Where the transfer is; how it ended is in the engine's `conclude_state`."""
        return ReceiverState()

    def init(self, prefill_dp_rank: int) -> None:
        """Begins the handshake; the scheduler does not wait for it: `shake_hands` goes on with it.

        An error fails this request only, and a prefill that is lost is not shaken hands with.

        Half a handshake must not be taken for a whole one by the next request.
        """
        if not self.kv_mgr.has_radix:
            super().init(prefill_dp_rank)
            return
        self.state.handshake.dp_rank = prefill_dp_rank
        self.shake_hands()

    def shake_hands(self) -> None:
        """Make the handshake that `init` began, once that takes no waiting. Backends call it at each poll."""
        manager, handshake = self.kv_mgr, self.state.handshake
        rank = handshake.due()
        if rank is None:
            return
        handshake.dp_rank = None
        status = manager.request_status.get(self.bootstrap_room, KVPoll.Failed)
        if handshake.connection is not None and KVPoll.Failed in (self.conclude_state, status):
            # It has failed meanwhile.
            return
        try:
            super().init(rank)
        except NotConnected:
            handshake.dp_rank = rank
            return
        except Exception as e:
            if not isinstance(e, ConnectionError):
                logger.exception("Handshake of room %s with prefill %s", self.bootstrap_room, self.bootstrap_addr)
            manager.forget_connections(self.bootstrap_addr)
            self.fail(f"the handshake with prefill {self.bootstrap_addr} failed: {type(e).__name__}: {e}")
        if self.bootstrap_addr not in manager.prefill_info_table:
            # Lost in the meantime.
            manager.forget_connections(self.bootstrap_addr)
            if self.conclude_state == KVPoll.Failed:
                self.fail(f"prefill {self.bootstrap_addr} is gone: it was lost in the meantime")

    def _setup_bootstrap_infos(self) -> None:
        """Wraps the engine's questions to the bootstrap server, which a thread puts with a radix cache.

        Requests that come meanwhile wait for the same answers. Raises NotConnected while there are none.
        """
        manager, addr, rank = self.kv_mgr, self.bootstrap_addr, self.prefill_dp_rank
        if not manager.has_radix:
            super()._setup_bootstrap_infos()
            return
        key = f"{addr}_{rank}_{{}}_{self.target_tp_rank}"
        keys = [key.format(cp) for cp in self.target_cp_ranks]
        known, new = self.state.handshake.reach(
            manager.connections,
            addr,
            rank,
            lambda: known_ranks(manager.connection_pool, keys),
            lambda: _ranks_fetcher(self),
        )
        for infos in known if new else []:
            self.bootstrap_infos = infos
            self._register_kv_args()
        self.bootstrap_infos = [info for infos in known for info in infos]

    def failure(self) -> Exception:
        """Why this request failed, as the error to raise. To ask changes nothing."""
        return RuntimeError(self.kv_mgr.failure_records.get(self.bootstrap_room, NO_REASON))

    def failure_exception(self) -> None:
        """Replaces the engine's, which does not say what failed."""
        raise RuntimeError(self.kv_mgr.take_reason(self.bootstrap_room))

    @property
    def peer_takes_prefix(self) -> bool:
        """Whether a prefix may be named to this request's prefill."""
        return self.carries_prefix and self.kv_mgr.prefills.of(self.bootstrap_addr).takes_prefix

    def send_requests(
        self, kv_indices: npt.NDArray[np.int32], frames: Callable[[bool], list[bytes]]
    ) -> frozenset[bytes]:
        """Send every prefill rank the request for KV; returns the tags of what it answers. Raises NotTaken.

        kv_indices: pages to be written, int32. frames: for a dummy rank or not, without parts of extras.
        """
        written = [(part, more) for part in hooks.parts() if (more := part.write(self, kv_indices)) is not None]
        for peer in self.bootstrap_infos or []:
            mine = [[part.tag, *more] for part, more in written if part.dummies or not peer["is_dummy"]]
            self._send_to(peer, [*frames(peer["is_dummy"]), *chain(*mine), *self.prompt])
            self.state.asked, self.state.writes_s = True, self.kv_mgr.prefills.of(self.bootstrap_addr).waiting_timeout
        return frozenset(part.tag for part, _ in written if part.answer is not None)

    def _writers(self) -> list[dict]:
        return [peer for peer in self.bootstrap_infos or [] if not peer["is_dummy"]]

    def _notice(self, kind: bytes) -> list[bytes]:
        """The frames of a notice of this kind. Backends that have notices override it."""
        raise NotImplementedError

    def _send_to(self, peer: dict, frames: list[bytes]) -> None:
        """Send a prefill rank a message, or raise NotTaken."""
        socket, lock = self._connect_to_bootstrap_server(peer)
        with lock:
            socket.send_multipart(frames)

    def answers(self, tag: bytes) -> Iterable[str]:
        """What prefill ranks have answered to a part of the request, see `MessagePart`. Backends override it."""
        return ()

    def once_metadata_landed(self, state: KVPoll) -> KVPoll:
        """``state``, but success only when its own metadata is in its buffer.

        Ranks that see the notification before the data would otherwise commit in different steps; and what another
        request's late writer left in the buffer must fail the request on all ranks, not only where it landed.
        """
        if state != KVPoll.Success:
            return state
        manager, room = self.kv_mgr, self.bootstrap_room
        in_buffer = room if self.metadata_room is None else self.metadata_room()
        wrong = what_landed(in_buffer, room, self._is_overdue)
        if wrong == "":
            return KVPoll.Transferring
        if wrong is not None:
            manager.record_failure(room, wrong)
            return KVPoll.Failed
        return KVPoll.Success

    def _is_overdue(self) -> bool:
        return self.init_time is not None and time.time() - self.init_time >= self.kv_mgr.waiting_timeout

    def fail(self, reason: str) -> None:
        """Fail this request for ``reason``; the queues see it at its next poll."""
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed

    def cancel(self) -> None:
        """End this request and tell prefill, where it understands that, to write no more for it.

        Why it ended has been told by now.
        """
        if self.conclude_state is None:
            # Failed on another rank.
            self.conclude_state = KVPoll.Failed
        self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        self.state.given_up_at = time.monotonic()
        if not self.fenced:
            # Prefill was never asked for anything: there are no writers to wait for.
            self.end()
        if self.peer_takes_prefix:
            self.state.untold, self.state.told_at = self._writers(), time.monotonic()
            self.state.tell(self.bootstrap_room, self._cancel_at)

    def _cancel_at(self, peer: dict) -> None:
        self._send_to(peer, self._notice(CANCEL))

    def writers_done(self) -> bool:
        """Whether every prefill rank has finished, has given up, is gone, or had as long as a transfer may take.

        Once True it stays so: the ranks of a TP group find out in different steps, and act when all have.
        """
        state = self.state
        if not state.over and state.await_writers(
            self.bootstrap_room, self.bootstrap_addr, self.quarantine_s, self._cancel_at, self._nobody_writes
        ):
            state.over = True
            self.end()
        return state.over

    def _nobody_writes(self) -> bool:
        # Failed on another rank only, this rank's part may well have arrived in full.
        if self.conclude_state == KVPoll.Success or not self.state.asked or self._is_quiet():
            return True
        # Or nothing listens any more where their schedulers did. Silence does not say so: the writers may go on.
        ranks = [(peer["rank_ip"], peer["rank_port"]) for peer in self.bootstrap_infos or []]
        return self.kv_mgr.are_gone(ranks)

    def end(self) -> None:
        """Forget the room, and the reasons that came after the first one, which nobody reads."""
        with self.kv_mgr.rooms.lock:
            self._forget_room()
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def _is_quiet(self) -> bool:
        """Whether no prefill rank writes for this request any more; a backend that cannot tell says yes."""
        return True

    def _forget_room(self) -> None:
        """Forget a request that has ended. Backends that keep state of a failed one override it."""


def _ranks_fetcher(receiver: DeltaReceiver) -> Callable[[], None]:
    """What a thread does to learn the ranks of a receiver's prefill. Raises ConnectionError."""
    manager, addr = receiver.kv_mgr, receiver.bootstrap_addr
    # Nothing is noted of this request, which may end meanwhile; and the scheduler registers its memory.
    scout = copy.copy(receiver)
    scout.bootstrap_room, scout._register_kv_args = None, lambda: None
    prefill = manager.prefill_info_table.get(addr)

    def fetch() -> None:
        super(DeltaReceiver, scout)._setup_bootstrap_infos()
        if scout.conclude_state == KVPoll.Failed:
            raise ConnectionError("its bootstrap server does not say where its ranks listen, see the log")
        if manager.prefill_info_table.get(addr) is not prefill:
            manager.forget_connections(addr)
            raise ConnectionError("it was lost in the meantime")

    return fetch
