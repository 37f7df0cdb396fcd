"""What every transfer backend shares: who understands a decode prefix, and how it is learnt.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from aiohttp import web
from sglang.srt import server_args
from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.authentication import (
    NotTrusted,
    SignedRequests,
    SigningSocket,
    VerifyingSocket,
    middleware,
    secret,
)
from sglang.srt.disaggregation.common.drafts import describe_draft
from sglang.srt.disaggregation.common.handshakes import Connection, Connections, RankAnswers
from sglang.srt.disaggregation.common.outbound import NotTaken, UnwaitingSocket
from sglang.srt.disaggregation.common.peer_liveness import Endpoint, PeerLiveness, nothing_listens
from sglang.srt.disaggregation.common.peer_watch import DecodeWatch, PrefillWatch, SocketSweep, host_and_port
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.decode_prefix import (
    CANCEL,
    DECODE_PREFIX_ROUTE,
    DECODE_PREFIX_VERSION,
    QUEUED,
    KvTransferCounters,
    check_decode_prefix,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers import samples
from sglang.srt.utils.network import NetworkAddress

if TYPE_CHECKING:
    import torch
    from sglang.srt.disaggregation.page_digest import PageDigests

logger = logging.getLogger(__name__)

__all__ = [
    "CommonKVBootstrapServer",
    "CommonKVManager",
    "CommonKVReceiver",
    "CommonKVSender",
    "nothing_listens",
    "requests",
]

# The engine's questions to bootstrap servers, signed where there is a secret.
requests = SignedRequests()

# Seconds over which a port must have refused connections before nobody is taken to come back to it at once.
REFUSING_S = 0.3
# Seconds for which a prefill that gives no usable answer is asked; as long as the engine does. And from one question to
# the next.
UNANSWERED_S, ASK_AGAIN_S = 15, 0.4
# Seconds between two attempts to tell a prefill, which takes no messages, that a request is given up.
TELL_AGAIN_S = 2.0


def _is_dummy(info) -> bool:
    """Whether a TransferInfo asks for nothing; a method in one backend, a field in the other."""
    return info.is_dummy() if callable(info.is_dummy) else info.is_dummy


class _NotConnected(Exception):
    """Where the ranks of a prefill listen is being asked."""


def _signing(socket, endpoint: str):
    key = secret()
    return socket if key is None else SigningSocket(socket, endpoint, key)


# Of a decode worker with a radix cache: nothing on its scheduler's thread waits for a peer.
_rank_answers: RankAnswers | None = None


class CommonKVManager(engine.CommonKVManager):
    """Knows which prefill peers understand a decode prefix."""

    def __init__(self, *args, **kwargs):
        """Adds the table of peers, the byte counters, and the books that tell a late or refused request."""
        # Before the engine's: its last step starts threads that may use them.
        self.prefix_peers: dict[str, bool] = {}
        # Those of them that ask for each piece of staging memory; that want to hear what waits here; that send digests
        # of pages. And this worker's own digests, set by the queue that makes this manager.
        self.piece_peers: set[str] = set()
        self.listening_peers: set[str] = set()
        self.digest_peers: set[str] = set()
        self.page_digests: PageDigests | None = None
        # Prefill: layers of the whole model with KV, set by the same queue; None where that is not known.
        self.num_layers: int | None = None
        # Prefill: its requests, and what decode has said of them. Its lock goes for transfer_infos too.
        self.rooms = Rooms()
        # Decode: questions to prefills that are under way, and when each was last asked; when each prefill has refused
        # connections, first and last; and when and why one turned out to be of no use.
        self.asking: set[str] = set()
        self.asked_at: dict[str, float] = {}
        self.refusing: dict[str, tuple[float, float]] = {}
        self.unusable: dict[str, tuple[float, str]] = {}
        # What leads to them; and whether they are gone, for the scheduler.
        self.connections = Connections()
        self.liveness = PeerLiveness()
        super().__init__(*args, **kwargs)
        key = secret()
        if key is not None:
            own = NetworkAddress(self.local_ip, self.rank_port).to_tcp()
            self.server_socket = VerifyingSocket(self.server_socket, own, key)
        several = self.server_args.dp_size > 1
        self.counters = KvTransferCounters.get(self.server_args, self.system_dp_rank if several else None)
        # Looks for sockets of dead peers; and what looks after this worker's peers, with it.
        self.sweep = SocketSweep(lambda: list(CommonKVReceiver._socket_cache), CommonKVReceiver.close_socket)
        if self.has_radix:
            global _rank_answers
            _rank_answers = _rank_answers or RankAnswers()
            tracker = self.addr_to_rooms_tracker
            self.prefill_watch = PrefillWatch(
                self._prefill_ports, lambda addr: bool(tracker.get(addr)), self._handle_node_failure, self.sweep
            )
            self.prefill_watch.start()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.decode_watch = DecodeWatch(self.rooms, self._askers, self.sweep)
            self.decode_watch.start()

    def _connect(self, endpoint: str, is_ipv6: bool = False):
        """Adds that messages are signed where there is a secret."""
        return _signing(super()._connect(endpoint, is_ipv6), endpoint)

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
        now = time.monotonic()
        if bootstrap_addr not in self.asking and now - self.asked_at.get(bootstrap_addr, -math.inf) >= ASK_AGAIN_S:
            self.asked_at[bootstrap_addr] = now
            self.asking.add(bootstrap_addr)
            threading.Thread(target=self._ask_prefill, args=(bootstrap_addr,), daemon=True, name="ask-prefill").start()
        return bootstrap_addr in self.prefill_info_table

    def _ask_prefill(self, addr: str) -> None:
        """Put the engine's questions and one more to a prefill, and note why it is of no use if it is not."""
        now = time.monotonic()
        try:
            # First, since with the engine's answer requests go on.
            version = self._ask_for_prefix(addr)
            if version is not None and super().try_ensure_parallel_info(addr):
                self.refusing.pop(addr, None)
                if version != DECODE_PREFIX_VERSION:
                    logger.warning(
                        "Prefill %s does not understand a decode prefix (version %s, this worker has %s): "
                        "it will send whole prompts. Install sglang-pd-radix there to send only what is missing.",
                        addr,
                        version or "none",
                        DECODE_PREFIX_VERSION,
                    )
                elif self.page_digests is not None and addr not in self.digest_peers:
                    logger.warning("Prefill %s sends no digests of pages: its KV is used without being verified.", addr)
                return
            if nothing_listens(*host_and_port(addr)):
                first, last = self.refusing.get(addr, (now, now))
                # One long ago was of an earlier life.
                self.refusing[addr] = (first if now - last < 10 * REFUSING_S else now, now)
            else:
                self.refusing.pop(addr, None)
        except Exception as e:
            logger.exception("Prefill %s cannot be used", addr)
            self.unusable[addr] = (now, f"{type(e).__name__}: {e}")
        finally:
            self.asking.discard(addr)

    def _ask_for_prefix(self, addr: str) -> int | None:
        """Which version of a decode prefix a prefill understands, 0 for none; None if it gives no answer.

        It is a route of its own, so that no message of the engine's protocol changes: a prefill without the patch
        answers 404 and is then sent no prefix. Raises NotTrusted where this worker and that prefill have not the same
        secret, and ValueError where they do not speculate alike, which asking again does not mend.
        """
        try:
            reply = requests.get(f"http://{addr}{DECODE_PREFIX_ROUTE}", timeout=5)
            if reply.status_code == 401:
                raise NotTrusted(reply.text)
            if reply.status_code not in (200, 404):
                raise ValueError(f"status {reply.status_code}")
            answer = reply.json() if reply.status_code == 200 else {"version": 0}
            version, drafts = int(answer["version"]), str(answer.get("drafts") or "")
            draft_model = str(answer.get("draft_model") or "")
            if self.has_state and not answer.get("state"):
                # On a full hit it would not send the state, and this worker would wait for it.
                version = 0
        except NotTrusted:
            raise
        except Exception as e:
            logger.error("Could not ask prefill %s whether it understands a decode prefix: %s", addr, e)
            return None
        own = getattr(self.server_args, "speculative_algorithm", None) or ""
        if version and drafts != own:
            # Its pages would have no KV of this worker's draft model, and the tree would keep that.
            raise ValueError(
                f"it speculates with {drafts or 'nothing'} and this decode worker with {own or 'nothing'}. "
                "Give both the same --speculative-algorithm and draft model"
            )
        own = describe_draft(self.server_args)
        if version and draft_model and own and draft_model != own:
            raise ValueError(
                f"its draft model ({draft_model}) is not this decode worker's ({own}). Give both the same "
                "--speculative-draft-model-path"
            )
        takes = self.prefix_peers[addr] = version == DECODE_PREFIX_VERSION
        abilities = {
            ("pieces",): self.piece_peers,
            ("digests", "stage_digests"): self.digest_peers,
            ("queued",): self.listening_peers,
        }
        for names, peers in abilities.items():
            (peers.add if takes and any(answer.get(name) for name in names) else peers.discard)(addr)
        return version

    @property
    def has_state(self) -> bool:
        """Whether this worker's model has states beside its KV."""
        return bool(self.kv_args.state_data_ptrs)

    def _resolve_rank_mapping(self, info) -> None:
        """Adds, with a radix cache, that states are never cut: a prefill of another TP size cannot be used.

        NIXL has no message for a part of one. Mooncake cuts them in one dimension, which for GDN is wrong: a rank's
        convolution has its queries, keys and values one after the other, each cut by TP.
        """
        uneven = not self.is_mla_backend and len(set(self.kv_args.kv_item_lens)) > 1
        if self.has_radix and info.attn_tp_size != self.attn_tp_size and (self.has_state or uneven):
            # The engine cuts all buffers as it cuts the first: a draft model's may have other heads.
            what = "states" if self.has_state else "KV buffers of different sizes"
            raise ValueError(
                f"it has TP size {info.attn_tp_size} and this decode worker {self.attn_tp_size}; the {what} of this "
                "model cannot be cut. Start both with the same --tp-size."
            )
        super()._resolve_rank_mapping(info)

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Why a request that has waited for its handshake with a prefill ``since`` then need not wait any longer."""
        now = time.monotonic()
        first, last = self.refusing.get(addr, (now, 0.0))
        if last > since and last - first >= REFUSING_S:
            return f"prefill {addr} is gone: it refuses connections"
        at, reason = self.unusable.get(addr, (0.0, ""))
        if at > since:
            return f"prefill {addr} cannot be used: {reason}"
        if addr not in self.prefill_info_table and now - since > UNANSWERED_S:
            return f"prefill {addr} has not answered for {UNANSWERED_S} s"
        if now - since > self.handshake_timeout:
            return f"timed out after {now - since:.0f} s, in which prefill {addr} has not known of it"
        return None

    @property
    def transfer_timeout(self) -> float:
        """Seconds for which decode waits for KV that it has asked for; the same on both sides."""
        return envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()

    @property
    def handshake_timeout(self) -> float:
        """Seconds that a request may wait for its prefill to know of it; the same on prefill."""
        return envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()

    def forget_connections(self, addr: str) -> None:
        """Have the next request make the connection to a prefill anew, and register this worker's memory with it."""
        with self.connection_lock:
            # A copy in one go: not all who make connections take the lock.
            for key in [key for key in list(self.connection_pool) if key.startswith(addr + "_")]:
                self.connection_pool.pop(key, None)

    def _prefill_ports(self) -> dict[str, set[Endpoint]]:
        """Of each prefill that this worker knows, where its schedulers listen, or else its bootstrap server."""
        found: dict[str, set[Endpoint]] = {addr: set() for addr in list(self.prefill_info_table)}
        # A copy in one go: the scheduler makes connections.
        for key, infos in list(self.connection_pool.items()):
            # It ends with three ranks.
            addr = key.rsplit("_", 3)[0]
            if addr in found:
                found[addr].update((info["rank_ip"], info["rank_port"]) for info in infos)
        return {addr: ports or {host_and_port(addr)} for addr, ports in found.items()}

    def _askers(self, room: int) -> set[Endpoint]:
        """The decode ranks with the flag that have asked for the KV of a room."""
        infos = self.transfer_infos.get(room, {}).values()
        return {(info.endpoint, info.dst_port) for info in infos if getattr(info, "names_prefix", False)}

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        raise NotImplementedError

    def lose_prefill(self, addr: str) -> list[int]:
        """Forget a prefill that is gone, and which rooms are its. The scheduler may open and close rooms meanwhile."""
        self.forget_connections(addr)
        self.prefill_info_table.pop(addr, None)
        # A copy in one go: the scheduler may have the set in hand.
        rooms = list(self.addr_to_rooms_tracker.pop(addr, ()))
        logger.error("Lost connection with prefill instance (bootstrap_addr: %s), which has %d rooms", addr, len(rooms))
        return rooms

    def get_mha_kv_ptrs_with_pp(self, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]):
        """Mends the engine's for a pipeline stage whose number of layers does not divide that of the model.

        It takes the rest for a draft model's, and writes V of every layer to the place of another's K or V.
        """
        total = len(dst_kv_ptrs) // 2
        if self.pp_size == 1 or total != self.num_layers:
            return super().get_mha_kv_ptrs_with_pp(src_kv_ptrs, dst_kv_ptrs)
        here = len(src_kv_ptrs) // 2
        first = self.kv_args.prefill_start_layer
        k, v = (dst_kv_ptrs[start + first : start + first + here] for start in (0, total))
        return src_kv_ptrs[:here], src_kv_ptrs[here:], k, v, here

    @property
    def samples_tokens(self) -> bool:
        """Whether this prefill rank is of the last pipeline stage, whose metadata decode is sent."""
        return self.pp_rank == self.pp_size - 1

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Adds that a request that has failed stays so, on decode, and that one that has ended stays forgotten.

        The engine takes the higher of both: one that was lost in the middle of its handshake would go on, and wait for
        a prefill that is gone. And threads that read messages, or watch prefills, may have looked at a room just before
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
        super().record_failure(
            bootstrap_room,
            "another request of this bootstrap_room has ended; each request needs a room of its own",
        )
        return KVPoll.Failed

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Adds, with a radix cache, that nothing is recorded of a room that has ended; nobody would read it."""
        if not self.has_radix:
            super().record_failure(bootstrap_room, failure_reason)
            return
        with self.rooms.lock:
            if bootstrap_room in self.request_status:
                super().record_failure(bootstrap_room, failure_reason)

    def forget(self, room: int) -> None:
        """Take a request that has failed out of the books, once its reason has been told.

        Threads that write for it, or read messages, may have recorded another meanwhile, which nobody would read.
        """
        with self.rooms.lock:
            self.request_status.pop(room, None)
            self.failure_records.pop(room, None)

    def fail_room(self, room: int, reason: str) -> None:
        """Fail one request for ``reason``; the scheduler sees it at its next poll."""
        self.record_failure(room, reason)
        self.update_status(room, KVPoll.Failed)

    def refuse(self, room: int, reason: str) -> str:
        """Note that decode's request for ``room`` cannot be used, for a sender that may come only later.

        Returns the reason in full.
        """
        reason = f"refused decode's request for KV: {reason}"
        logger.error("Room %s: %s", room, reason)
        self.rooms.refuse(room, reason)
        return reason

    def end_room(self, room: int, reason: str | None = None) -> None:
        """Forget what decode asked for ``room`` and remember that it has ended, and why if it failed."""
        with self.rooms.lock:
            self.transfer_infos.pop(room, None)
            self.rooms.end(room, reason)

    # Attributes with an entry for each live room, or with a set of rooms for each peer.
    room_books: tuple[str, ...] = (
        "request_status",
        "failure_records",
        "transfer_infos",
        "required_prefill_response_num_table",
        "prefill_response_tracker",
        "addr_to_rooms_tracker",
    )

    def rooms_held(self) -> dict[str, int]:
        """How many rooms each book of this worker mentions; none when it is idle. The engine's books and ours."""
        held = {"live": len(self.rooms.live), "given_up": len(self.rooms.given_up)}
        for name in self.room_books:
            book = getattr(self, name, ())
            held[name] = sum(map(len, book.values())) if name == "addr_to_rooms_tracker" and book else len(book)
        return held

    def settle(self) -> None:
        """Called in every step of a prefill scheduler, for what cannot wait for a request's next poll.

        A request that waits for its turn is not polled: here it fails, and decode is told, when decode gives it up.
        """
        self.rooms.settle()

    def count_transfer(self, peer: str, sent_pages: int, saved_pages: int, runs: int = 0, states: int = 0) -> None:
        """Add one transfer to the counters: of each page a peer gets its own share of the heads, or all of them.

        runs: of pages that are contiguous on both sides, in which they are sent. states: sent with it, by slot or page.
        """
        if states:
            self.counters.sent_states(states * sum(self.kv_args.state_item_lens))
        theirs = self.decode_kv_args_table[peer].dst_kv_item_len
        page_bytes = sum(min(item, theirs) for item in self.kv_args.kv_item_lens)
        self.counters.sent(sent_pages * page_bytes, saved_pages * page_bytes, runs)

    def digest(
        self, room: int, infos: Iterable, kv_indices: npt.NDArray[np.int32], first_page: int, is_last: bool
    ) -> str | None:
        """Add a chunk to the digest of what ``room`` sends; with the last one, what to tell those who asked for it.

        infos: decode ranks that this rank sends to. first_page: place of the chunk in the delta. For the scheduler,
        before it sends the chunk. Raises ValueError where this worker's pool has no digests.
        """
        if not any(info.wants_digest for info in infos):
            return None
        if self.page_digests is None:
            raise ValueError("decode asks for digests of pages, which this prefill's KV pool does not have")
        sender = self.rooms.live[room]
        part = self.page_digests.of(kv_indices, first_page)
        sender.digests = part if sender.digests is None else sender.digests + part
        return self.page_digests.claim(sender.digests) if is_last else None

    def failure_reason(self, room: int, default: str = "no reason was recorded") -> str:
        """Why a request failed, as recorded, or that nobody said. It leaves the book with that."""
        with self.failure_lock:
            return self.failure_records.pop(room, default)


class CommonKVSender(engine.CommonKVSender):
    """Sender that knows the prefix decode asked to be left out."""

    # Tokens of the prompt, and how many of them decode says that it holds (0 when it named none).
    prompt_len: int | None = None
    decode_prefix_len: int = 0
    conclude_state: KVPoll | None = None
    _accepted: bool = False
    # What each decode rank asked for, by its name; kept here since the manager forgets it when all is sent.
    _infos: dict = {}
    _why: str | None = None
    # By the clock that began when decode's request was found here. Decode's began a little earlier.
    _due_at: float = math.inf
    # Of the chunks sent so far, when decode asked for it.
    digests: torch.Tensor | None = None
    # Whether the pipeline stages have agreed to begin this request, and are about to. `poll` says so then, and not what
    # has become of it here meanwhile: they must run the same batches.
    agreed: bool = False

    def __init__(self, mgr, bootstrap_addr: str, bootstrap_room: int, *args, **kwargs):
        """Adds the request to the rooms that are alive here; one of its number that had ended has begun anew."""
        self.made_at = time.monotonic()
        mgr.rooms.begin(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)

    def read_decode_prefix(self) -> tuple[int, int | None]:
        """The prefix (tokens) and delta size (pages; None if this rank sends no KV) that decode asked of this rank.

        Raises ValueError when decode's ranks contradict each other.
        """
        with self.kv_mgr.rooms.lock:
            self._infos = dict(self.kv_mgr.transfer_infos.get(self.bootstrap_room, {}))
        infos = self._infos.values()
        prefixes = {getattr(info, "decode_prefix_len", None) or 0 for info in infos}
        sizes = {len(info.dst_kv_indices) for info in infos if not _is_dummy(info)}
        if len(prefixes) > 1 or len(sizes) > 1:
            raise ValueError(f"decode ranks disagree: prefixes {sorted(prefixes)}, delta pages {sorted(sizes)}")
        return (prefixes.pop() if prefixes else 0), (sizes.pop() if sizes else None)

    def tell_failure(self, reason: str) -> None:
        """Tell decode that this request failed. Backends with a message for it override it."""

    def accept_decode_prefix(self) -> bool:
        """Take over decode's prefix once its message is there; False, and the request fails, if it cannot be right."""
        if self._accepted:
            return True
        page_size = self.kv_mgr.kv_args.page_size
        try:
            prefix_len, num_pages = self.read_decode_prefix()
            # A decode worker without the flag names no prefix, and its message is left to the engine.
            if prefix_len or any(getattr(info, "names_prefix", False) for info in self._infos.values()):
                if self.prompt_len is None:
                    raise ValueError("this prefill does not know the length of the prompt")
                check_decode_prefix(prefix_len, num_pages, self.prompt_len, page_size)
                if self.kv_mgr.pp_size > 1 and self.kv_mgr.kv_args.state_type == "swa":
                    # The engine numbers the layers of both pools from 0 on each stage, and writes them over each other.
                    raise ValueError("pipeline stages with sliding windows are not supported; start prefill without")
                self._due_at = time.monotonic() + self.kv_mgr.transfer_timeout
        except ValueError as e:
            self.fail(f"refused decode's request for KV: {e}")
            return False
        self.decode_prefix_len = prefix_len
        self._accepted = True
        return True

    def fail(self, reason: str) -> None:
        """Fail this request, on this worker and on decode, and nothing else."""
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed
        self.tell_failure(reason)

    def _failed(self) -> bool:
        return self.conclude_state == KVPoll.Failed

    def has_failed(self) -> bool:
        """Whether nothing more will be sent for this request."""
        return self._failed()

    def lost(self) -> str | None:
        """Why this request has failed, or fails with its next poll; None if it goes on. It costs next to nothing."""
        if self._failed():
            return self.why()
        return self.kv_mgr.rooms.refused.get(self.bootstrap_room) or self._overdue()

    def lose(self, reason: str) -> None:
        """Fail because the request has failed on another rank for ``reason``, if it has not failed here already."""
        self._heed_refusal()
        if not self._failed():
            self.fail(reason)
        # Decode is told when nothing is being written.
        self.poll()

    def has_failed_late(self) -> bool:
        """Whether this request, whose prompt has been computed, has failed. It does so now if it is overdue."""
        reason = None if self._failed() else self._overdue()
        # The poll may fail it itself, for the same reason, and close its books.
        if reason is not None and self.poll() != KVPoll.Success and not self._failed():
            self.fail(reason)
        return self._failed()

    def _overdue(self) -> str | None:
        """Why decode, if it is alive, has given this request up: it had its KV for longer to come than it waits.

        No write over NIXL to a worker that stands still ends by itself. None for a decode worker without the flag, for
        which nothing changes.
        """
        if time.monotonic() < self._due_at:
            return None
        return f"decode has not got all of its KV in the {self.kv_mgr.transfer_timeout:g} s for which it waits"

    def why(self, default: str = "no reason was recorded") -> str:
        """Why this request failed; it leaves the manager's book when first asked for."""
        if self._why is None:
            self._why = self.kv_mgr.failure_reason(self.bootstrap_room, default)
        return self._why

    def _heed_refusal(self) -> None:
        """Fail if decode's request for this room could not be used, or decode has given it up, or must have.

        This worker may have stood still for so long: nothing is written then to what decode may have given away.
        """
        if self._failed():
            return
        reason = self.kv_mgr.rooms.take_refusal(self.bootstrap_room) or self._overdue()
        if reason is not None:
            self.fail(reason)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Wraps the engine's init: the pages to send are those beyond the prefix."""
        super().init(num_kv_indices - self.decode_prefix_len // self.kv_mgr.kv_args.page_size, aux_index)

    def failure_exception(self) -> None:
        """Replaces the engine's, which does not say what failed."""
        raise RuntimeError(self.why())


class CommonKVReceiver(engine.CommonKVReceiver):
    """Receiver that knows whether its prefill understands a prefix."""

    # Whether this backend's send_metadata takes decode_prefix_len.
    carries_prefix = False
    # The room in the request's metadata buffer, 0 while nothing has been written since its admission.
    metadata_room: Callable[[], int] | None = None
    # Whether the queue keeps a failed request's pages until `writers_done`. The engine's own queue does not ask.
    fenced = False
    cancelled_at = 0.0
    # Whether prefill may know where to write.
    asked = False
    # What the engine knows only after the handshake. A request may be lost before, and nobody writes for it then.
    bootstrap_infos: list[dict] | None = None
    required_prefill_response_num = 0
    # The delta, from when prefill is asked for a digest of it until that has been found right.
    digest_pages: npt.NDArray[np.int32] | None = None
    _done = False
    # The DP rank with which a handshake is still to be made, and the attempt to reach it that is waited for.
    _dp_rank: int | None = None
    _connection: Connection | None = None
    # Prefill ranks that have still to be told that this request is given up, and when that was last tried.
    _untold: list[dict] = []
    _told_at = 0.0

    def __init__(self, mgr, bootstrap_addr: str, bootstrap_room: int | None = None):
        """Adds when it was made, and that what an earlier request has left of its room does not count for it."""
        self.made_at = time.monotonic()
        if mgr.has_radix:
            mgr.request_status.pop(bootstrap_room, None)
            mgr.failure_records.pop(bootstrap_room, None)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    @staticmethod
    def query_prefill_dp_ranks(bootstrap_addr: str, bootstrap_rooms: list[int]) -> dict[str, int]:
        """Wraps the engine's question, which holds up the scheduler, and with it all DP ranks, until it is answered."""
        question = engine.CommonKVReceiver.query_prefill_dp_ranks
        if _rank_answers is None:
            return question(bootstrap_addr, bootstrap_rooms)
        return _rank_answers.ask(bootstrap_addr, bootstrap_rooms, question)

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """Adds that messages are signed where there is a secret, and that with a radix cache no sender waits."""
        socket, lock = super()._connect(endpoint, is_ipv6)
        if _rank_answers is not None:
            socket = UnwaitingSocket(socket, endpoint)
        return _signing(socket, endpoint), lock

    @classmethod
    def close_socket(cls, endpoint: str) -> None:
        """Close the socket to a peer that is gone; what is not sent is dropped. The next message makes a new one."""
        with cls._global_lock:
            socket, lock = cls._socket_cache.pop(endpoint, None), cls._socket_locks.pop(endpoint, None)
        if socket is not None:
            # Nobody may be writing to it. Who comes later with it in hand gets an error, and fails what is lost anyway.
            with lock:
                socket.close(linger=0)

    def init(self, prefill_dp_rank: int) -> None:
        """Adds that an error of the handshake fails this request only, that none is made with one that is lost, and
        that the scheduler does not wait for it: `shake_hands` goes on with it.

        Half a handshake must not be taken for a whole one by the next request.
        """
        if not self.kv_mgr.has_radix:
            super().init(prefill_dp_rank)
            return
        self._dp_rank = prefill_dp_rank
        self.shake_hands()

    def shake_hands(self) -> None:
        """Make the handshake that `init` began, once that takes no waiting. Backends call it at each poll."""
        manager, rank, connection = self.kv_mgr, self._dp_rank, self._connection
        if rank is None or (connection is not None and not connection.over):
            return
        self._dp_rank = None
        if connection is not None and KVPoll.Failed in (
            self.conclude_state,
            manager.request_status.get(self.bootstrap_room, KVPoll.Failed),
        ):
            # Meanwhile.
            return
        try:
            super().init(rank)
        except _NotConnected:
            self._dp_rank = rank
            return
        except Exception as e:
            if not isinstance(e, ConnectionError):
                logger.exception("Handshake of room %s with prefill %s", self.bootstrap_room, self.bootstrap_addr)
            manager.forget_connections(self.bootstrap_addr)
            self.fail(f"the handshake with prefill {self.bootstrap_addr} failed: {type(e).__name__}: {e}")
        if self.bootstrap_addr not in manager.prefill_info_table:
            # Lost in the meantime.
            manager.forget_connections(self.bootstrap_addr)

    def _setup_bootstrap_infos(self) -> None:
        """Wraps the engine's questions to the bootstrap server, which a thread puts with a radix cache.

        Requests that come meanwhile wait for the same answers. Raises _NotConnected while there are none.
        """
        manager, addr, rank = self.kv_mgr, self.bootstrap_addr, self.prefill_dp_rank
        if not manager.has_radix:
            super()._setup_bootstrap_infos()
            return
        if self._connection is not None and self._connection.reason is not None:
            manager.connections.done(addr, rank, self._connection)
            raise ConnectionError(self._connection.reason)
        known, connection = self._known_ranks(), manager.connections.get(addr, rank)
        if connection is not None and connection.over and (connection.reason is not None or known is None):
            # It is of no use any more.
            manager.connections.done(addr, rank, connection)
            connection = None
        if connection is None and known is None:
            connection = manager.connections.start(addr, rank, self._ranks_fetcher())
        if connection is not None:
            self._connection = connection
            if not connection.over:
                raise _NotConnected
            manager.connections.done(addr, rank, connection)
            known = self._known_ranks()
            if connection.reason is not None or known is None:
                raise ConnectionError(connection.reason or "it was lost in the meantime")
            for self.bootstrap_infos in known:
                self._register_kv_args()
        self.bootstrap_infos = [info for infos in known or () for info in infos]

    def _known_ranks(self) -> list[list[dict]] | None:
        """Where the ranks of this request's prefill listen, as the engine keeps it; None while that is not known."""
        pool = self.kv_mgr.connection_pool
        keys = [
            f"{self.bootstrap_addr}_{self.prefill_dp_rank}_{cp}_{self.target_tp_rank}" for cp in self.target_cp_ranks
        ]
        known = [pool.get(key) for key in keys]
        return None if None in known else known

    def _ranks_fetcher(self) -> Callable[[], None]:
        """What a thread does to learn them. Raises ConnectionError."""
        manager, addr = self.kv_mgr, self.bootstrap_addr
        # Nothing is noted of this request, which may end meanwhile; and the scheduler registers its memory.
        scout = copy.copy(self)
        scout.bootstrap_room, scout._register_kv_args = None, lambda: None
        prefill = manager.prefill_info_table.get(addr)

        def fetch() -> None:
            super(CommonKVReceiver, scout)._setup_bootstrap_infos()
            if scout.conclude_state == KVPoll.Failed:
                raise ConnectionError("its bootstrap server does not say where its ranks listen, see the log")
            if manager.prefill_info_table.get(addr) is not prefill:
                manager.forget_connections(addr)
                raise ConnectionError("it was lost in the meantime")

        return fetch

    def fail(self, reason: str) -> None:
        """Fail this request for ``reason``; the queues see it at its next poll."""
        self.kv_mgr.fail_room(self.bootstrap_room, reason)
        self.conclude_state = KVPoll.Failed

    @property
    def peer_takes_prefix(self) -> bool:
        """Whether a prefix may be named to this request's prefill."""
        return self.carries_prefix and self.kv_mgr.prefix_peers.get(self.bootstrap_addr, False)

    def ask_for_digest(self, kv_indices: npt.NDArray[np.int32]) -> bool:
        """Whether to ask prefill for a digest of the delta, which is then compared when it has arrived."""
        manager = self.kv_mgr
        if manager.page_digests is None or self.bootstrap_addr not in manager.digest_peers or len(kv_indices) == 0:
            return False
        self.digest_pages = kv_indices
        return True

    def claims(self) -> Iterable[str]:
        """What prefill ranks have told of the digests of this request's KV heads. Backends override it."""
        return ()

    def _once_verified(self) -> KVPoll:
        """Success, but failure if the pages do not hold what prefill sent."""
        if self.digest_pages is not None:
            difference = self.kv_mgr.page_digests.difference(self.digest_pages, self.claims())
            if difference is not None:
                self.kv_mgr.counters.mismatched()
                self.kv_mgr.record_failure(self.bootstrap_room, difference)
                return KVPoll.Failed
            self.digest_pages = None
        return KVPoll.Success

    def once_metadata_landed(self, state: KVPoll) -> KVPoll:
        """``state``, but success only when the request's own metadata is in its buffer.

        Ranks that see the notification before the data would otherwise commit in different steps; and what another
        request's late writer left in the buffer must fail the request on all ranks, not only where it landed.
        """
        if state != KVPoll.Success:
            return state
        room = self.bootstrap_room if self.metadata_room is None else self.metadata_room()
        if room == self.bootstrap_room:
            return self._once_verified()
        if room == 0 and not self._is_overdue():
            return KVPoll.Transferring
        what = f"its metadata buffer holds that of room {room}" if room else "its metadata has not come"
        self.kv_mgr.record_failure(self.bootstrap_room, what)
        return KVPoll.Failed

    def _is_overdue(self) -> bool:
        return time.time() - self.init_time >= self.kv_mgr.waiting_timeout

    def cancel(self) -> None:
        """End this request and tell prefill, where it understands that, to write no more for it.

        Why it ended has been told by now.
        """
        if self.conclude_state is None:
            # Failed on another rank.
            self.conclude_state = KVPoll.Failed
        self.cancelled_at = time.monotonic()
        if not self.fenced:
            # Prefill was never asked for anything: there are no writers to wait for.
            self._end()
        if self.peer_takes_prefix:
            self._untold = [peer for peer in self.bootstrap_infos or [] if not peer["is_dummy"]]
            self._tell_cancel()

    def _tell_cancel(self) -> None:
        """Tell the prefill ranks that have not been told, as far as they take messages."""
        untold, self._untold, self._told_at = self._untold, [], time.monotonic()
        for peer in untold:
            try:
                self._send_to(peer, self._word(CANCEL))
            except NotTaken as e:
                logger.debug("Prefill cannot be told that room %s is given up: %s", self.bootstrap_room, e)
                self._untold.append(peer)

    def announce(self) -> None:
        """Tell prefill, where it listens, that this request waits here and will be asked for.

        It then knows whose end is also that of the request.
        """
        if self.bootstrap_addr in self.kv_mgr.listening_peers:
            # What is not taken is said again, if it waits for long.
            with contextlib.suppress(NotTaken):
                self._say(QUEUED)

    def _say(self, word: bytes) -> None:
        """Send one word about this request to every prefill rank that is to write for it, or raise NotTaken."""
        for peer in self.bootstrap_infos or []:
            if not peer["is_dummy"]:
                self._send_to(peer, self._word(word))

    def _word(self, word: bytes) -> list[bytes]:
        """The message that says it, of backends that have one."""
        raise NotImplementedError

    def _send_to(self, peer: dict, frames: list[bytes]) -> None:
        """Send a prefill rank a message, or raise NotTaken."""
        socket, lock = self._connect_to_bootstrap_server(peer)
        with lock:
            socket.send_multipart(frames)

    def writers_done(self) -> bool:
        """Whether every prefill rank has finished, has given up, is gone, or had as long as a transfer may take.

        Once True it stays so: the ranks of a TP group find out in different steps, and act when all have.
        """
        if self._done:
            return True
        manager = self.kv_mgr
        # Even if it could not be cancelled.
        self.cancelled_at = self.cancelled_at or time.monotonic()
        # Failed on another rank only, this rank's part may well have arrived in full.
        arrived = self.conclude_state == KVPoll.Success
        try:
            if self._untold and time.monotonic() - self._told_at >= TELL_AGAIN_S:
                self._tell_cancel()
            done = arrived or not self.asked or self._is_quiet() or self._are_gone()
        except Exception:
            # Then time says.
            logger.exception("Room %s: whether prefill still writes for it", self.bootstrap_room)
            done = False
        if not done and time.monotonic() - self.cancelled_at > manager.waiting_timeout:
            logger.warning(
                "Room %s failed over %.0f s ago and prefill %s never said that it writes no more: pages are reused.",
                self.bootstrap_room,
                manager.waiting_timeout,
                self.bootstrap_addr,
            )
            done = True
        if done:
            self._done = True
            self._end()
        return done

    def _end(self) -> None:
        """Close the books, also of the reasons that came after the first one, which nobody reads."""
        with self.kv_mgr.rooms.lock:
            self._close_books()
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def _are_gone(self) -> bool:
        """Whether the processes that would write are gone: nothing listens where their schedulers did.

        A failed health check does not say so: it asks another process, which may be slow while the writers go on.
        """
        ranks = [(peer["rank_ip"], peer["rank_port"]) for peer in self.bootstrap_infos or []]
        return self.kv_mgr.liveness.are_gone(ranks, self.cancelled_at)

    def _is_quiet(self) -> bool:
        """Whether no prefill rank writes for this request any more; a backend that cannot tell says yes."""
        return True

    def _close_books(self) -> None:
        """Forget a request that has ended. Backends that keep books of a failed one override it."""

    def failure_exception(self) -> None:
        """Replaces the engine's, which does not say what failed."""
        raise RuntimeError(self.kv_mgr.failure_reason(self.bootstrap_room))


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Bootstrap server that says whether its prefill understands a decode prefix."""

    # 0: the backend does not. Whether it asks decode for staging memory piece by piece, sends digests of pages, and
    # hears from decode what waits there.
    decode_prefix_version = 0
    asks_for_pieces = sends_digests = hears_of_waiting = False

    def _setup_routes(self) -> None:
        """Adds the routes of the decode prefix and of refused requests to the engine's, and the secret, if any."""
        super()._setup_routes()
        key = secret()
        if key is not None:
            self.app.middlewares.append(middleware(key))
        self.app.router.add_get(DECODE_PREFIX_ROUTE, self._handle_decode_prefix)
        self.app.router.add_post(refusal.REFUSED_ROUTE, self._handle_refused_room)
        self.app.router.add_post(samples.SAMPLE_ROUTE, self._handle_sample_rooms)

    async def _handle_decode_prefix(self, request: web.Request) -> web.Response:
        # Of context-parallel ranks, which all have all KV, the first sends. Where all do, the engine shares a chunk out
        # among them by the numbers of its pages, as if these were one run, and what is not in that run nobody sends.
        shared_out = self.attn_cp_size != 1 and envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
        known = self.attn_cp_size is not None
        version = self.decode_prefix_version if known and not shared_out else 0
        whole = self.pp_size == 1
        can = {
            # The layout of a staging buffer knows of no stages.
            "pieces": self.asks_for_pieces and whole,
            "digests" if whole else "stage_digests": self.sends_digests,
            "queued": self.hears_of_waiting,
        }
        answer: dict[str, int | str] = {"version": version, **{name: int(yes) for name, yes in can.items()}, "state": 1}
        # Of the process that the server is part of.
        drafts = getattr(server_args._global_server_args, "speculative_algorithm", None)
        draft_model = await asyncio.to_thread(describe_draft, server_args._global_server_args) if drafts else ""
        answer |= {name: said for name, said in (("drafts", drafts), ("draft_model", draft_model)) if said}
        return web.json_response(answer)

    async def _handle_refused_room(self, request: web.Request) -> web.Response:
        return await self._hear(request, refusal.heard)

    async def _handle_sample_rooms(self, request: web.Request) -> web.Response:
        return await self._hear(request, samples.heard)

    async def _hear(self, request: web.Request, heard: Callable[[Any], None]) -> web.Response:
        try:
            heard(await request.json())
        except ValueError as e:
            return web.Response(text=str(e), status=400)
        return web.Response(text="OK")
