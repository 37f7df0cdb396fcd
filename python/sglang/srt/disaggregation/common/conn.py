"""What every transfer backend shares: who understands a decode prefix, and how it is learnt.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), for Mooncake #24257 (merged).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
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
from sglang.srt.disaggregation.common.end_notices import EndNotices
from sglang.srt.disaggregation.common.handshakes import Connections, RankAnswers, check_sizes
from sglang.srt.disaggregation.common.outbound import UnwaitingSocket
from sglang.srt.disaggregation.common.prefill_peers import PrefillPeers, check_tp_sizes
from sglang.srt.disaggregation.common.rooms import ENGINE_BOOKS, OWN_ROOM, Rooms, rooms_held
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

# The engine's questions to bootstrap servers, and the registration of a prefill's ranks.
requests = BootstrapRequests()

__all__ = [
    "CommonKVBootstrapServer",
    "CommonKVManager",
    "CommonKVReceiver",
    "CommonKVSender",
    "requests",
]


# Of a decode worker with a radix cache: nothing on its scheduler's thread waits for a peer.
_rank_answers: RankAnswers | None = None


class CommonKVManager(engine.CommonKVManager):
    """Knows which prefill peers understand a decode prefix."""

    # By which bootstrap servers are asked.
    requests = requests

    def __init__(self, *args, **kwargs):
        """Adds what is known of peers, and the state by which a late or refused request is told."""
        # Before the engine's: its last step starts threads that may use them.
        # On prefill the layers of the whole model with KV, None where that is not known: the queue that makes this
        # manager sets it.
        self.num_layers: int | None = None
        # Prefill: its requests, and what decode has said of them; the lock goes for transfer_infos too. Decode ranks
        # that gave a live room up and have not been answered, and which of those that asked have been told of the end.
        self.rooms = Rooms(self.met_decode)
        self.cancels: dict[int, set] = {}
        self.end_notices: EndNotices = EndNotices()
        # Seconds for which prefill may write KV that it has been asked for. It tells decode, which keeps pages so. Read
        # once: it is asked for of each request in each step.
        self.transfer_timeout: float = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()
        # Decode: what it knows of prefills, and what leads to them.
        self.prefills = PrefillPeers(
            lambda: self.server_args,
            self.met_prefill,
            lambda addr: engine.CommonKVManager.try_ensure_parallel_info(self, addr),
            self.requests.get,
            self.asked_prefill,
        )
        self.connections = Connections()
        super().__init__(*args, **kwargs)
        self.events = hooks.events_of(self.server_args)
        if self.has_radix:
            global _rank_answers
            _rank_answers = _rank_answers or RankAnswers()

    def met_prefill(self, addr: str) -> None:
        """Hands have been shaken with a prefill that takes a prefix: `prefills` knows what it can do. In a thread."""

    def asked_prefill(self, addr: str, answered: bool) -> None:
        """A prefill has been asked what it can do, and whether it has answered. In a thread."""

    def met_decode(self, host: str, port: int) -> None:
        """The decode rank with the flag that listens there has sent a message. In the thread that reads these."""

    def heard_until(self, info: Any) -> float:
        """What decode had said to this prefill before then, by the monotonic clock, has been read. In that thread.

        info: what it asks for.
        """
        return time.monotonic()

    def are_gone(self, ranks: Sequence[tuple[str, int]]) -> bool:
        """Whether it is known that the processes that listen at all these places have ended: the engine cannot tell."""
        return not ranks

    def connect_unwaiting(self, host: str, port: int):
        """The socket to a peer with a radix cache, or of a worker with one. Who sends does not wait: see `NotTaken`."""
        address = NetworkAddress(host, port)
        endpoint = address.to_tcp()
        return UnwaitingSocket(endpoint, *engine.CommonKVReceiver._connect(endpoint, address.is_ipv6))

    @property
    def has_radix(self) -> bool:
        """Whether this is a decode worker that keeps a radix cache."""
        radix = getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)
        return radix and self.disaggregation_mode == DisaggregationMode.DECODE

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Wraps the engine's handshake with a new prefill, when this decode worker keeps a radix cache.

        In a thread of its own: the engine's scheduler stands still for as long as a prefill does not answer, and ends
        when an answer does not fit this worker. `why_unreached` says what has become of it.
        """
        if not self.has_radix or bootstrap_addr in self.prefill_info_table:
            return super().try_ensure_parallel_info(bootstrap_addr)
        self.prefills.query(bootstrap_addr)
        return bootstrap_addr in self.prefill_info_table

    @property
    def has_state(self) -> bool:
        """Whether this worker's model has states beside its KV."""
        return bool(self.kv_args.state_data_ptrs)

    def unfit(self, name: str) -> str | None:
        """Why this prefill rank cannot write to the decode rank of this name, which has a radix cache; None if it can.

        Where decode holds the whole prompt an extra knows what to write beside KV.
        """
        return "this prefill keeps more than KV, and runs without the extra hybrid" if self.has_state else None

    def _resolve_rank_mapping(self, info) -> None:
        """Adds, with a radix cache, that a prefill of another TP size cannot be used where what is sent is not cut."""
        if self.has_radix:
            check_sizes(info)
            if info.attn_tp_size != self.attn_tp_size:
                check_tp_sizes(info.attn_tp_size, self.attn_tp_size, self.not_cut())
        super()._resolve_rank_mapping(info)

    def not_cut(self) -> str | None:
        """What cannot be cut of what this worker's model keeps.

        KV buffers that differ in size: the engine cuts all as it cuts the first, and a draft model's may have other
        heads.
        """
        uneven = not self.is_mla_backend and len(set(self.kv_args.kv_item_lens)) > 1
        return "KV buffers of different sizes" if uneven else None

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Why a request that has waited for its handshake with a prefill ``since`` then need not wait any longer."""
        return self.prefills.why_unreached(addr, since, addr in self.prefill_info_table, self.handshake_timeout)

    @property
    def handshake_timeout(self) -> float:
        """Seconds that a request may wait for its prefill to know of it."""
        return envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()

    def forget_connections(self, addr: str) -> None:
        """Have the next request make the connection to a prefill anew, and register this worker's memory with it."""
        with self.connection_lock:
            # A copy in one go: not all who make connections take the lock.
            for key in [key for key in list(self.connection_pool) if key.startswith(addr + "_")]:
                self.connection_pool.pop(key, None)

    def lose_prefill(self, addr: str) -> list[int]:
        """Forget a prefill that is gone, and which rooms are its. The scheduler may open and close rooms meanwhile."""
        self.forget_connections(addr)
        self.prefill_info_table.pop(addr, None)
        # A copy in one go: the scheduler may have the set in hand.
        rooms = list(self.addr_to_rooms_tracker.pop(addr, ()))
        self.events.lost_peer()
        logger.error("Lost connection with prefill instance (bootstrap_addr: %s), which has %d rooms", addr, len(rooms))
        return rooms

    @property
    def samples_tokens(self) -> bool:
        """Whether this prefill rank is of the last pipeline stage, whose metadata decode is sent."""
        return self.pp_rank == self.pp_size - 1

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """On decode, a request that has failed stays failed, and one that has ended stays forgotten.

        The engine takes the higher of both: one that was lost in the middle of its handshake would go on, and wait for
        a prefill that is gone. Threads that read messages, or watch prefills, may have looked at a room just before
        the scheduler closed its books.
        """
        if not self.has_radix:
            super().update_status(bootstrap_room, status)
            return
        with self.rooms.lock:
            before = self.request_status.get(bootstrap_room)
            if before != KVPoll.Failed and (before is not None or status == KVPoll.Bootstrapping):
                super().update_status(bootstrap_room, status)

    def check_status(self, bootstrap_room: int) -> KVPoll:
        """Replaces the engine's KeyError, which ends the scheduler: its room was ended by another request."""
        status = self.request_status.get(bootstrap_room)
        if status is not None:
            return status
        super().record_failure(bootstrap_room, f"another request of this bootstrap_room has ended; {OWN_ROOM}")
        return KVPoll.Failed

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Adds, with a radix cache, that nothing is recorded of a room that has ended; nobody would read it."""
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
        """Why a request failed, as recorded, or that nobody said. It leaves the book with that."""
        with self.failure_lock:
            return self.failure_records.pop(room, default)

    def forget(self, room: int) -> None:
        """Take a request that has failed out of the books, once its reason has been read.

        Threads that write for it, or read messages, may have recorded another meanwhile, which nobody would read.
        """
        with self.rooms.lock:
            self.request_status.pop(room, None)
            self.failure_records.pop(room, None)
            self.rooms.take_refusal(room)

    def end_room(self, room: int, reason: str | None = None, posted: bool = False) -> None:
        """Forget what decode asked for ``room`` and remember that it has ended, as `Rooms.end`."""
        with self.rooms.lock:
            self.transfer_infos.pop(room, None)
            self.cancels.pop(room, None)
            self.rooms.end(room, reason, posted)

    def end_failed_room(self, room: int, asked: Mapping[str, Any], reason: str) -> set:
        """End ``room``; returns the decode ranks that are to be told why, by the backend's names for them.

        asked: by name, as its request has kept it. Decode workers without the flag are not told. Nor does a dummy rank
        tell anybody but who gave the room up: its word would count for that of the rank that writes.
        """
        with self.rooms.lock:
            peers = self.cancels.get(room, set()) | self.listeners(asked or self.transfer_infos.get(room, {}))
            self.end_room(room, reason)
        return peers

    # Whether rooms are ended here, which Mori does not. Attributes with an entry for each live room, or a set by peer.
    ends_rooms = False
    room_books: tuple[str, ...] = ENGINE_BOOKS

    def rooms_held(self) -> dict[str, int]:
        """How many rooms each book of this worker mentions; when idle, those that only decode has asked for."""
        return rooms_held(self.rooms, {name: getattr(self, name, ()) for name in self.room_books})

    def settle(self) -> None:
        """Called in every step of a prefill scheduler, for what cannot wait for a request's next poll.

        A request that waits for its turn is not polled: here it fails, and decode is told, when decode gives it up.
        """
        self.rooms.settle()

    def count_transfer(self, peer: str, sent_pages: int, saved_pages: int, runs: int = 0, states: int = 0) -> None:
        """One transfer has begun. peer: the decode rank, by its name; the rest as in `Events.sent`."""
        theirs = self.decode_kv_args_table[peer].dst_kv_item_len
        self.events.sent(self.kv_args, theirs, sent_pages, saved_pages, runs, states)

    def answers(
        self, room: int, infos: Sequence, kv_indices: npt.NDArray[np.int32], first_page: int, is_last: bool
    ) -> dict[bytes, str]:
        """What those who ``room`` is sent to are told with a chunk, by the part of their requests that it answers.

        infos: of decode ranks that this rank sends to. The rest as in `MessagePart`. Raises ValueError.
        """
        said: dict[bytes, str] = {}
        for part in hooks.parts():
            if part.answer is not None and any(part.tag in info.parts for info in infos):
                answer = part.answer(self.rooms.live[room], kv_indices, first_page, is_last)
                said |= {} if answer is None else {part.tag: answer}
        return said


class CommonKVSender(DeltaSender, engine.CommonKVSender):
    """Sender that knows the prefix decode asked to be left out, and has one state."""


class CommonKVReceiver(DeltaReceiver, engine.CommonKVReceiver):
    """Receiver that knows whether its prefill understands a prefix, and whether anybody still writes for it."""

    @staticmethod
    def query_prefill_dp_ranks(bootstrap_addr: str, bootstrap_rooms: list[int]) -> dict[str, int]:
        """Wraps the engine's question, which holds up the scheduler, and with it all DP ranks, until it is answered."""
        question = engine.CommonKVReceiver.query_prefill_dp_ranks
        if _rank_answers is None:
            return question(bootstrap_addr, bootstrap_rooms)
        return _rank_answers.query(bootstrap_addr, bootstrap_rooms, question)

    def _connect_to_bootstrap_server(self, bootstrap_info: dict):
        """With a radix cache no sender waits."""
        if not self.kv_mgr.has_radix:
            return super()._connect_to_bootstrap_server(bootstrap_info)
        socket = self.kv_mgr.connect_unwaiting(bootstrap_info["rank_ip"], bootstrap_info["rank_port"])
        # It has a lock of its own.
        return socket, nullcontext()


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Bootstrap server that says whether its prefill understands a decode prefix."""

    # 0: the backend does not.
    decode_prefix_version = 0
    # Whether a prefill of several pipeline stages understands one, too.
    takes_stages = False

    def __init_subclass__(cls, **options) -> None:
        """Each class says for itself what its backend does: Ascend's server is a Mooncake server, and has no deltas.

        But for one that is laid over another of its name.
        """
        super().__init_subclass__(**options)
        if "decode_prefix_version" not in vars(cls) and cls.__name__ != cls.__mro__[1].__name__:
            cls.decode_prefix_version = CommonKVBootstrapServer.decode_prefix_version

    def _setup_routes(self) -> None:
        """Adds the route of the decode prefix to the engine's."""
        super()._setup_routes()
        self.ranks = RegisteredRanks()

        async def decode_prefix(request: web.Request) -> web.Response:
            return web.json_response(await self._capabilities())

        self.app.router.add_get(DECODE_PREFIX_ROUTE, decode_prefix)

    async def _handle_route_put(self, request: web.Request) -> web.StreamResponse:
        """Adds that it is noted what the rank that registers says of itself.

        One that is unlike those before it is answered 409, and this prefill stays unready: its first failed request
        would have patched ranks wait for the bare ones for ever.
        """
        rank = await request.json()
        refusal = self.ranks.refusal(rank)
        if refusal is not None:
            return web.Response(text=refusal, status=409)
        reply = await super()._handle_route_put(request)
        self.ranks.note(rank)
        return reply

    def _all_have_come(self) -> bool:
        """Whether all ranks have registered. The engine counts registrations, and one may come twice."""
        if not self._is_ready():
            return False
        return len(self.ranks) >= self.dp_size * self.attn_cp_size * self.attn_tp_size * self.pp_size

    async def _capabilities(self) -> dict[str, Any]:
        complete = self._all_have_come()
        if self.ranks.complaint is not None and not complete:
            raise web.HTTPServiceUnavailable(text=self.ranks.complaint)
        takes = self.ranks.take_prefix and (self.pp_size == 1 or self.takes_stages)
        version = self.decode_prefix_version if takes else 0
        cp_size = self.attn_cp_size if complete else None
        return await capabilities(version, cp_size, self._said_by_ranks())

    def _said_by_ranks(self) -> dict[str, Any]:
        """What is said in the name of all ranks."""
        return self.ranks.timeouts()
