"""What all transfer backends share: which peers understand a decode prefix, and how to find out.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), for Mooncake #24257
(merged).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import numpy.typing as npt
from aiohttp import web
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.bootstrap_routes import (
    BootstrapRequests,
    RegisteredRanks,
    capabilities,
)
from sglang.srt.disaggregation.common.delta_receiver import DeltaReceiver
from sglang.srt.disaggregation.common.delta_sender import NO_REASON, DeltaSender
from sglang.srt.disaggregation.common.outbound import UnwaitingSocket
from sglang.srt.disaggregation.common.prefill_peers import PrefillPeers, RankAnswers
from sglang.srt.disaggregation.common.rooms import ENGINE_BOOKS, OWN_ROOM, EndNotices, Rooms
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

# Used for the engine's queries to bootstrap servers and for the registration of a prefill's ranks.
requests = BootstrapRequests()

__all__ = [
    "CommonKVBootstrapServer",
    "CommonKVManager",
    "CommonKVReceiver",
    "CommonKVSender",
    "requests",
]


# Only on a decode worker with a radix cache, whose scheduler thread waits for no peer.
_rank_answers: RankAnswers | None = None


class CommonKVManager(engine.CommonKVManager):
    """Knows which prefills understand a decode prefix."""

    # Queries bootstrap servers.
    requests = requests

    def __init__(self, *args, **kwargs):
        """Adds what is known of peers, and the state that answers a late or refused request."""
        # These come before the engine's `__init__`, which starts threads that may use them.
        # Prefill: requests, decode ranks that cancelled a live room and wait for an answer, and
        # ranks notified of the end. The lock of `Rooms` covers transfer_infos too.
        self.rooms = Rooms()
        self.cancels: dict[int, set] = {}
        self.end_notices = EndNotices()
        # Seconds for which prefill may write and decode keeps pages. Read once: each poll uses it.
        self.transfer_timeout: float = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        # Decode: what is known of prefills, and queries for the addresses of their ranks.
        self.prefills = PrefillPeers(self)
        self.rank_queries: dict[str, Future] = {}
        super().__init__(*args, **kwargs)
        self.events = hooks.events_of(self.server_args)
        if self.has_radix:
            global _rank_answers
            _rank_answers = _rank_answers or RankAnswers()

    def met_prefill(self, addr: str) -> None:
        """Called after the handshake with a prefill that takes a prefix, in its thread."""

    def asked_prefill(self, addr: str, answered: bool) -> None:
        """Called after a query of a prefill's features, in its thread."""

    def met_decode(self, host: str, port: int) -> None:
        """Called for each message of a decode rank with the flag, in the reading thread."""
        self.rooms.has_met_flag = True

    def heard_until(self, info: Any) -> float:
        """The monotonic time until which messages of the decode rank of ``info`` have been read."""
        return time.monotonic()

    def are_gone(self, ranks: Sequence[tuple[str, int]]) -> bool:
        """Whether the processes at all these addresses have ended; the engine cannot tell."""
        return not ranks

    def connect_unwaiting(self, host: str, port: int):
        """A socket that raises `NotTaken` instead of blocking if the peer reads nothing."""
        addr = NetworkAddress(host, port)
        endpoint = addr.to_tcp()
        return UnwaitingSocket(endpoint, *engine.CommonKVReceiver._connect(endpoint, addr.is_ipv6))

    @property
    def has_radix(self) -> bool:
        """Whether this is a decode worker with a radix cache."""
        radix = getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)
        return radix and self.disaggregation_mode == DisaggregationMode.DECODE

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Wraps the engine's handshake with a new prefill: with a radix cache it runs in a thread.

        The engine's blocks the scheduler, and ends it on an incompatible answer. `why_unreached`
        reports the result.
        """
        if not self.has_radix or bootstrap_addr in self.prefill_info_table:
            return super().try_ensure_parallel_info(bootstrap_addr)
        self.prefills.query(bootstrap_addr)
        return bootstrap_addr in self.prefill_info_table

    def query_prefill(self, addr: str) -> bool:
        """The engine's queries of a new prefill, in a thread; whether they were answered."""
        return super().try_ensure_parallel_info(addr)

    @property
    def has_state(self) -> bool:
        """Whether the model keeps state besides KV."""
        return bool(self.kv_args.state_data_ptrs)

    def unfit(self, name: str) -> str | None:
        """Why this prefill rank cannot write to the named decode rank; None if it can."""
        why = "this prefill keeps more than KV, and runs without the extra for such models"
        return why if self.has_state else None

    def _resolve_rank_mapping(self, info) -> None:
        """Adds, with a radix cache, a check that KV can be sliced if prefill's TP size differs."""
        if self.has_radix:
            for name in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"):
                if getattr(info, name) < 1:
                    raise ValueError(f"it says that its {name} is {getattr(info, name)}")
            theirs, ours, what = info.attn_tp_size, self.attn_tp_size, self.not_cut()
            if theirs != ours and what is not None:
                raise ValueError(
                    f"it has TP size {theirs} and this decode worker {ours}; the {what} of this "
                    "model cannot be cut. Start both with the same --tp-size."
                )
        super()._resolve_rank_mapping(info)

    def in_the_way(self, room: int) -> str | None:
        """What of an earlier request of ``room`` blocks a new one; None if nothing does."""
        return None

    def not_cut(self) -> str | None:
        """Which buffers cannot be sliced by TP rank; None if all can."""
        # The engine slices all KV buffers like the first; a draft model's may have other heads.
        uneven = not self.is_mla_backend and len(set(self.kv_args.kv_item_lens)) > 1
        return "KV buffers of different sizes" if uneven else None

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Why a handshake that has been due since ``since`` must fail; None if it may go on."""
        return self.prefills.why_unreached(addr, since)

    def forget_connections(self, addr: str) -> None:
        """Have the next request reconnect to a prefill and register this worker's memory again."""
        with self.connection_lock:
            # Copied at once: the scheduler adds connections without the lock.
            for key in [key for key in list(self.connection_pool) if key.startswith(addr + "_")]:
                self.connection_pool.pop(key, None)

    def lose_prefill(self, addr: str) -> None:
        """Remove a lost prefill and fail its rooms, in any thread."""
        self.forget_connections(addr)
        self.prefill_info_table.pop(addr, None)
        # Copied at once: the scheduler may change the set.
        rooms = list(self.addr_to_rooms_tracker.pop(addr, ()))
        self.events.lost_peer()
        logger.error(
            "Lost connection with prefill instance (bootstrap_addr: %s), which has %d rooms",
            addr,
            len(rooms),
        )
        reason = f"Losing connection with prefill instance (bootstrap_addr: {addr})"
        for room in rooms:
            self.lose_room(room, reason)

    def lose_room(self, room: int, reason: str) -> None:
        """Fail a lost prefill's ``room`` unless all of it has arrived."""
        if self.request_status.get(room, KVPoll.Success) != KVPoll.Success:
            self.fail_room(room, reason)

    @property
    def samples_tokens(self) -> bool:
        """Whether this prefill rank is in the last pipeline stage, which sends the metadata."""
        return self.pp_rank == self.pp_size - 1

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """On decode, a failed request stays failed and an ended request stays removed.

        The engine keeps the higher status: a request that fails during its handshake would go on.
        Another thread may have read the status just before the scheduler removed the room.
        """
        if not self.has_radix:
            super().update_status(bootstrap_room, status)
            return
        with self.rooms.lock:
            before = self.request_status.get(bootstrap_room)
            if before != KVPoll.Failed and (before is not None or status == KVPoll.Bootstrapping):
                super().update_status(bootstrap_room, status)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Replaces the engine's KeyError, which ends the scheduler, for a room that has ended."""
        status = self.request_status.get(bootstrap_room)
        if status is not None:
            return status
        reason = f"another request of this bootstrap_room has ended; {OWN_ROOM}"
        super().record_failure(bootstrap_room, reason)
        return KVPoll.Failed

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Adds, with a radix cache, that an ended room gets no reason: nobody would read it."""
        if not self.has_radix:
            super().record_failure(bootstrap_room, failure_reason)
            return
        with self.rooms.lock:
            if bootstrap_room in self.request_status:
                super().record_failure(bootstrap_room, failure_reason)

    def fail_room(self, room: int, reason: str) -> None:
        """Fail one request for ``reason``; the scheduler sees it at its next poll."""
        self.record_failure(room, reason)
        self.update_status(room, KVPoll.Failed)

    def take_reason(self, room: int, default: str = NO_REASON) -> str:
        """Remove and return the recorded reason of a failure."""
        with self.failure_lock:
            return self.failure_records.pop(room, default)

    def forget(self, room: int) -> None:
        """Remove a failed request, and reasons recorded after the one that was read."""
        with self.rooms.lock:
            self.request_status.pop(room, None)
            self.failure_records.pop(room, None)
            self.rooms.refused.pop(room, None)

    def end_room(self, room: int, reason: str | None = None, posted: bool = False) -> None:
        """Remove decode's request for ``room`` and record the room's end, see `Rooms.end`."""
        with self.rooms.lock:
            self.transfer_infos.pop(room, None)
            self.cancels.pop(room, None)
            self.rooms.end(room, reason, posted)

    def end_failed_room(self, room: int, asked: Mapping[str, Any], reason: str) -> set:
        """End ``room``; returns the decode ranks to notify, by the backend's names.

        asked: the request's copy of decode's messages, by name. Only ranks with the flag are
        notified. A dummy rank notifies only those that cancelled: its notice would count as that of
        the writing rank.
        """
        with self.rooms.lock:
            infos = asked or self.transfer_infos.get(room, {})
            peers = {info.peer for info in infos.values() if info.dummy is False}
            peers |= self.cancels.get(room, set())
            self.end_room(room, reason)
        return peers

    # Whether this backend ends rooms; Mori does not. room_books: attributes with an entry for each
    # live room, or a set of rooms for each peer.
    ends_rooms = False
    room_books: tuple[str, ...] = ENGINE_BOOKS

    def rooms_held(self) -> dict[str, int]:
        """The number of rooms in each table; when idle, only rooms that decode alone asked for."""
        held = {name: len(getattr(self.rooms, name)) for name in ("live", "writing", "given_up")}
        held |= {name: len(getattr(self, name, ())) for name in self.room_books}
        of_peers = dict(getattr(self, "addr_to_rooms_tracker", {})).values()
        return held | {"addr_to_rooms_tracker": sum(map(len, of_peers))}

    def settle(self) -> None:
        """Fails queued requests that decode cancelled: nothing polls them. Called in every step."""
        self.rooms.settle()

    def count_transfer(
        self, peer: str, sent_pages: int, saved_pages: int, runs: int = 0, states: int = 0
    ) -> None:
        """Count a transfer that begins to the named decode rank; see `Events.sent`."""
        theirs = self.decode_kv_args_table[peer].dst_kv_item_len
        self.events.sent(self.kv_args, theirs, sent_pages, saved_pages, runs, states)

    def answers(
        self, room: int, infos: Sequence, kv_indices: npt.NDArray, first_page: int, is_last: bool
    ) -> dict[bytes, str]:
        """The answers to send with a chunk, by tag of the part, see `MessagePart`.

        infos: of decode ranks that this rank sends to. Raises ValueError.
        """
        tags = {tag for info in infos for tag in info.parts}
        found = {
            part.tag: part.answer(self.rooms.live[room], kv_indices, first_page, is_last)
            for part in hooks.PARTS
            if part.answer is not None and part.tag in tags
        }
        return {tag: answer for tag, answer in found.items() if answer is not None}


class CommonKVSender(DeltaSender, engine.CommonKVSender):
    """Sender that knows which prefix decode holds, and keeps all its state in one object."""


class CommonKVReceiver(DeltaReceiver, engine.CommonKVReceiver):
    """Receiver that knows whether its prefill understands a prefix and may still write."""

    @staticmethod
    def query_prefill_dp_ranks(bootstrap_addr: str, bootstrap_rooms: list[int]) -> dict[str, int]:
        """Wraps the engine's query, which blocks the scheduler and with it all DP ranks."""
        question = engine.CommonKVReceiver.query_prefill_dp_ranks
        if _rank_answers is None:
            return question(bootstrap_addr, bootstrap_rooms)
        return _rank_answers.query(bootstrap_addr, bootstrap_rooms, question)

    def _connect_to_bootstrap_server(self, bootstrap_info: dict):
        """With a radix cache the socket does not block."""
        if not self.kv_mgr.has_radix:
            return super()._connect_to_bootstrap_server(bootstrap_info)
        sock = self.kv_mgr.connect_unwaiting(bootstrap_info["rank_ip"], bootstrap_info["rank_port"])
        # The socket has its own lock.
        return sock, nullcontext()


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Bootstrap server that reports whether its prefill understands a decode prefix."""

    # 0: the backend understands none.
    decode_prefix_version = 0
    # Whether a prefill with several pipeline stages understands a prefix.
    takes_stages = False

    def _setup_routes(self) -> None:
        """Adds the route of the decode prefix."""
        super()._setup_routes()
        self.ranks = RegisteredRanks()

        async def decode_prefix(request: web.Request) -> web.Response:
            return web.json_response(await self._capabilities())

        self.app.router.add_get(DECODE_PREFIX_ROUTE, decode_prefix)

    async def _handle_route_put(self, request: web.Request) -> web.StreamResponse:
        """Adds that the rank's registration is recorded.

        A rank that does not match the earlier ones gets 409, and this prefill stays unready: at the
        first failed request patched ranks would wait for unpatched ones for ever.
        """
        rank = await request.json()
        refusal = self.ranks.refusal(rank)
        if refusal is not None:
            return web.Response(text=refusal, status=409)
        reply = await super()._handle_route_put(request)
        self.ranks.note(rank)
        return reply

    def _all_have_come(self) -> bool:
        """Whether all ranks have registered; the engine may count a rank twice."""
        if not self._is_ready():
            return False
        return (
            len(self.ranks) >= self.dp_size * self.attn_cp_size * self.attn_tp_size * self.pp_size
        )

    async def _capabilities(self) -> dict[str, Any]:
        if not self._all_have_come():
            # Decode caches the answer for good, and a rank that is still missing may be unpatched.
            why = self.ranks.complaint or "not all ranks of this prefill have registered yet"
            raise web.HTTPServiceUnavailable(text=why)
        takes = self.ranks.take_prefix and (self.pp_size == 1 or self.takes_stages)
        version = self.decode_prefix_version if takes else 0
        return capabilities(version, self.attn_cp_size, self._said_by_ranks())

    def _said_by_ranks(self) -> dict[str, Any]:
        """What the server reports on behalf of all ranks."""
        return self.ranks.timeouts()
