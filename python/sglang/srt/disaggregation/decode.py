"""Decode worker with a radix cache: admission locks the cached prefix and allocates the delta only.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746), with #24230 and, for Mooncake,
#24257; all merged.
"""

from __future__ import annotations

import logging
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.decode_radix import overlap_guard
from sglang.srt.disaggregation.decode_radix.admission import Admission
from sglang.srt.disaggregation.decode_radix.budget import Accounts, Budget, LiveReqs, live_reqs
from sglang.srt.disaggregation.decode_radix.commit import (
    abort,
    note_transfer,
    report_end,
)
from sglang.srt.disaggregation.decode_radix.delta_request import PrefillDeltas
from sglang.srt.disaggregation.decode_radix.handshake import (
    LiveRooms,
    fail_unreached,
    poll_handshake,
    take_polls,
)
from sglang.srt.disaggregation.decode_radix.hooks import (
    NO_HOOKS,
    DecodeHooks,
    DeltaSource,
    Hooks,
    events_of,
)
from sglang.srt.disaggregation.decode_radix.overlap_guard import KeptRows, OverlapGuard
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy
from sglang.srt.disaggregation.decode_radix.prefix import LENGTH_SIZE
from sglang.srt.disaggregation.decode_radix.quarantine import (
    let_go,
    poll_transfers,
    release,
)
from sglang.srt.disaggregation.decode_radix.retraction import Resumption
from sglang.srt.disaggregation.decode_radix.schedule import Agreed, Schedule
from sglang.srt.disaggregation.decode_radix.tp_agreement import Ranks, are_alike
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, is_warmup

from sglang_pd_radix.patching import loader

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

__all__ = [
    "DecodePreallocQueue",
    "DecodeReqToTokenPool",
    "DecodeRequest",
    "DecodeTransferQueue",
    "SchedulerDisaggregationDecodeMixin",
]

LOCAL = Phase.LOCAL


@dataclass
class DecodeRequest(engine.DecodeRequest):
    """An error in a request fails this request only, and on all TP ranks in the same step.

    error: what failed on this rank. The request then polls as failed, so the next reduction fails
    it on all ranks. Until then it stays in the same queue on all ranks.
    """

    error: str | None = None
    failed_at: float = 0.0
    phase: Phase = field(default=Phase.HANDSHAKE, init=False)
    # The policy's `QueueEntry`, from its arrival on.
    entry: Any = None
    # What prefill is to write to: pages, and state if the model has any, see `StateKind`.
    page_indices: np.ndarray | None = None
    state_indices: list[int] | None = None
    # The load locked in a tier (`Tier.lock`), until commit or release.
    load: Any = None
    # A second request of this room was refused; its half may reach prefill after the room's end.
    is_doubled: bool = field(default=False, init=False)

    @property
    def waiting_for_input(self) -> bool:
        """The engine's flag for a request that may be admitted, derived from the phase."""
        return self.phase is Phase.READY

    @waiting_for_input.setter
    def waiting_for_input(self, ready: bool) -> None:
        self.phase = Phase.READY if ready else Phase.HANDSHAKE

    @property
    def priority(self) -> int | None:
        """The engine counts the requests of a queue by priority."""
        return self.req.priority

    @property
    def is_aborted(self) -> bool:
        return isinstance(self.req.finished_reason, FINISH_ABORT)

    # ---- changes of state ----

    def advance(self, phase: Phase) -> None:
        self.phase = phase

    def said_prompt(self) -> bytes:
        """The prompt length on the wire, which prefill compares with its own."""
        return len(self.req.origin_input_ids).to_bytes(LENGTH_SIZE, "little")

    def abort(self, what: str) -> None:
        """Abort the request, whose ``what`` failed on this or another rank."""
        req = self.req
        room = f"(bootstrap_room={req.bootstrap_room})"
        abort(req, f"Decode {what} failed for request {req.rid} {room}{self.failure_reason()}")

    def fail(self) -> None:
        """Have prefill stop writing for this request, unless it is a warm-up or computed here."""
        self.failed_at = time.monotonic()
        if not is_warmup(self.req) and self.phase is not LOCAL:
            # Even if this rank had not asked yet: all ranks must quarantine the same requests.
            self.kv_receiver.fenced = True
            self.cancel()

    def mark_failed(self, error: Exception | str) -> None:
        """Mark the request failed on this rank; the next reduction fails it on all ranks."""
        if isinstance(error, Exception):
            logger.error("Request %s", self.req.rid, exc_info=error)
            error = f"{type(error).__name__}: {error}"
        self.error = error if self.error is None else self.error

    def poll(self) -> int:
        """The receiver's or local poll; at most Transferring while the load is copied."""
        copied = self.load is None or self.load.done()
        return self._poll() if copied else min(self._poll(), int(KVPoll.Transferring))

    def _poll(self) -> int:
        if self.phase is LOCAL:
            lost = self.error is not None or self.kv_receiver.conclude_state == KVPoll.Failed
            return int(KVPoll.Failed if lost else KVPoll.Success)
        try:
            return int(self.kv_receiver.poll() if self.error is None else KVPoll.Failed)
        except Exception as e:
            self.mark_failed(e)
            return int(KVPoll.Failed)

    def failure_reason(self) -> str:
        """Why the request failed, as far as this rank knows, after a colon."""
        try:
            if isinstance(self.kv_receiver, CommonKVReceiver):
                return f": {self.error or self.kv_receiver.failure()}"
            self.kv_receiver.failure_exception()
        except Exception as e:
            return f": {self.error or e}"
        return f": {self.error}" if self.error else ""

    def cancel(self) -> None:
        """Tell prefill to stop waiting or writing. If the message is lost, prefill times out."""
        try:
            self.kv_receiver.cancel()
        except Exception as e:
            logger.error(
                "Could not tell prefill that request %s has failed", self.req.rid, exc_info=e
            )

    def writers_done(self) -> bool:
        """Whether no prefill can write to the request's pages, or its time for that has passed."""
        try:
            return self.kv_receiver.writers_done()
        except Exception as e:
            self.mark_failed(e)
            return time.monotonic() - self.failed_at > self.kv_receiver.quarantine_s


class DecodeReqToTokenPool(KeptRows, engine.DecodeReqToTokenPool):
    """The req_to_token pool, with slots that can be withheld from other requests."""


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Admission with a decode-side radix cache; without the flag, every method is the engine's."""

    # Extras may replace these classes.
    schedule_type, admission_type, deltas_type = Schedule, Admission, PrefillDeltas

    def __init__(self, *args, **kwargs):
        """Adds what the engine's queue needs for a radix cache."""
        super().__init__(*args, **kwargs)
        self.has_radix = False
        self.rooms = LiveRooms()
        self._steps = 0
        if isinstance(self.tree_cache, DecodeRadixCache):
            self._init_radix(self.tree_cache)

    def _init_radix(self, tree: DecodeRadixCache) -> None:
        self.has_radix, self.radix, self.tier = True, tree, tree.tier
        self.tier.know_live(self.live, lambda live: self.accounts.ahead(live))
        # Queries do not block the scheduler here. The manager decides on retries and giving up.
        self._ensure_retry_interval, self._max_ensure_retries = 0.0, sys.maxsize
        self.policy = self.transfer_queue.policy
        self.ranks = Ranks(self.gloo_group)
        hooks = self.transfer_queue.hooks
        figures = tuple(of() for of in hooks.measured)
        # What may bring deltas besides prefill: at most one extra.
        self.source: DeltaSource | None = hooks.source[-1]() if hooks.source else None
        extras = zlib.crc32(",".join(loader.extras()).encode())
        if self.ranks.size > 1 and not are_alike(
            self.gloo_group, [sum(one.width for one in figures), extras]
        ):
            raise ValueError(
                "the TP ranks of this decode worker do not measure the same: options, extras or "
                "the package differ between its nodes. Start all of them with the same options and "
                "SGLANG_PD_RADIX_EXTRAS."
            )
        self.accounts = Accounts(
            tree,
            self.req_to_token_pool,
            self.num_reserved_decode_tokens,
            engine.CLIP_MAX_NEW_TOKEN,
        )
        self.schedule = self.schedule_type(self, figures)
        self.admission = self.admission_type(self, self.deltas_type(self))
        self.resumption = Resumption(self)

    # ---- new requests ----

    def add(self, req: Req, is_retracted: bool = False) -> None:
        """Refuses a second live request of a bootstrap_room; an error fails this request only."""
        if not self.has_radix:
            super().add(req, is_retracted)
            return
        if not is_retracted and not is_warmup(req) and self.rooms.refuse(req, self._all_requests):
            self.scheduler.stream_output([req], req.return_logprob)
            return
        try:
            super().add(req, is_retracted)
        except Exception as e:
            if not self.queue or self.queue[-1].req is not req:
                # No receiver was made. In the queue, the request fails on all ranks at once.
                self.queue.append(
                    DecodeRequest(req, FakeKVReceiver(self.kv_manager, "", req.bootstrap_room))
                )
            self.queue[-1].mark_failed(e)
        if not is_retracted and self.queue and self.queue[-1].req is req:
            self._register(self.queue[-1])

    def _register(self, decode_req: DecodeRequest) -> None:
        """Register a new request with the policy, the rooms and the tier."""
        self.schedule.enter(decode_req)
        if is_warmup(decode_req.req):
            return
        self.rooms[decode_req.req.bootstrap_room] = decode_req
        try:
            # The tier fetches the part of the prompt that this worker lacks.
            self.tier.fetch(decode_req.req, decode_req.entry)
        except Exception as e:
            # On all ranks alike: all hash the same prompt.
            decode_req.mark_failed(e)

    def _all_requests(self) -> list[DecodeRequest]:
        return [*self.queue, *self.transfer_queue.queue, *self.transfer_queue.quarantine]

    def _resolve_prefill_dp_rank(self, req: Req) -> int | None:
        """Waits for the prefill's info even if the client names its DP rank.

        The engine never asks for this info then, and so fails all requests that name a rank.
        """
        if self.has_radix and engine._bootstrap_addr(req) not in self.kv_manager.prefill_info_table:
            return None
        return super()._resolve_prefill_dp_rank(req)

    def _resolve_pending_reqs(self) -> None:
        """Fails requests whose prefill is lost, incompatible or unresponsive."""
        super()._resolve_pending_reqs()
        if self.has_radix:
            fail_unreached(self.pending_reqs, self.kv_manager)

    # ---- one step of the queue ----

    def pop_preallocated(self, rids_to_check: list[str] | None = None):
        """Replaces the engine's admission of whole prompts: lock the prefix, ask for the delta.

        rids_to_check: only used with pipeline parallelism, which the flag excludes.
        """
        if not self.has_radix:
            return super().pop_preallocated(rids_to_check)
        # 1. Commit arrived requests, so that requests that wait for their prefixes can go on.
        self.transfer_queue.collect()
        # 2. Find what an in-flight batch still uses of ended requests, before slots are freed.
        guard = overlap_guard.OPEN
        if self.queue:
            guard = overlap_guard.make_guard(
                self.scheduler, self.req_to_token_pool, self.radix.page_size
            )
        # 3. Advance handshakes.
        self._resolve_pending_reqs()
        self._steps, queue, retracted = self._steps + 1, self.queue, self.retracted_queue
        if self.admission.has_nothing_new(self._steps, queue, retracted):
            return [], []
        # 4. Agree with the other ranks on the candidates and their order.
        if (agreed := self._agree()) is None:
            # Else steps would be skipped until a running request ends.
            self.admission.refused = None
            return [], []
        # 5. Drop aborted and failed requests.
        failed = self._drop_aborted()
        # 6. Admit. As in the engine, retracted requests that wait for memory go first.
        admitted = [] if self.retracted_queue else self._admit(agreed, guard)
        return admitted, failed

    def _agree(self) -> Agreed | None:
        """Poll the handshakes and agree with the other ranks on the step; None to skip it."""
        window = self.schedule.window(self.queue)
        requests = window.requests
        if not requests and not self.retracted_queue:
            # All ranks return here, as requests are broadcast. A resume needs measured figures.
            return Agreed((), requests)
        polls = [poll_handshake(dr, self.tier) for dr in requests]
        if self.ranks.size == 1:
            self.take_polls(requests, polls)
            return self.schedule.decide(window)
        return self.schedule.agree(window, polls)

    def take_polls(self, requests: Sequence[DecodeRequest], polls: Sequence[int]) -> None:
        """Apply the reduced polls of ``requests``."""
        failed = take_polls(requests, polls)
        for _ in range(failed if self.scheduler.enable_metrics else 0):
            self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()

    def _drop_aborted(self) -> list[DecodeRequest]:
        gone = [dr for dr in self.queue if dr.req.finished_reason is not None and dr.is_aborted]
        self._forget(gone)
        for decode_req in gone:
            report_end(decode_req.req, self.scheduler)
            self.policy.leave(decode_req.entry)
            decode_req.advance(Phase.RELEASED)
        return gone

    def _admit(self, agreed: Agreed, guard: OverlapGuard) -> list[DecodeRequest]:
        rows = self.req_to_token_pool.available_size() - guard.rows
        admitted = self.admission.admit(agreed, guard, rows)
        self._forget(admitted)
        # With several ranks, the next poll shows first whether the request failed on any.
        alone = self.ranks.size == 1
        return [
            dr
            for dr in admitted
            if not (alone and dr.entry.source is not None and dr.entry.source.agree(dr))
        ]

    def _forget(self, decode_reqs: Sequence[DecodeRequest]) -> None:
        if not decode_reqs:
            return
        gone = {id(dr) for dr in decode_reqs}
        for decode_req in decode_reqs:
            self.tier.leave(decode_req.req.rid)
        self.queue = [dr for dr in self.queue if id(dr) not in gone]
        # Else a failed request would still make its handshake.
        self.pending_reqs = [dr for dr in self.pending_reqs if id(dr) not in gone]

    # ---- memory ----

    def live(self) -> LiveReqs:
        """The requests that hold KV or wait to be resumed."""
        return live_reqs(self.scheduler, self.transfer_queue, self.retracted_queue)

    def _budget(self) -> Budget:
        return self.accounts.budget(self.live())

    # ---- retraction ----

    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Req]:
        """Replaces the engine's resume of whole requests: restores only what the tree has lost."""
        if not self.has_radix:
            return super().resume_retracted_reqs(rids_to_check)
        if not self.retracted_queue:
            return []
        resumed, num_failed = self.resumption.resume()
        self.retracted_queue = self.retracted_queue[len(resumed) + num_failed :]
        return resumed


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Transfers of a decode worker with a radix cache; without the flag, the engine's methods."""

    # Extras may replace this class.
    policy_type = AdmissionPolicy

    def __init__(self, *args, **kwargs):
        """Adds the quarantine: failed requests to whose memory a prefill may still write."""
        super().__init__(*args, **kwargs)
        self.quarantine: list[DecodeRequest] = []
        self.hooks: Hooks[DecodeHooks] = NO_HOOKS
        # Requests that arrived in this step.
        self.arrived: list[Req] = []
        self._collected = False
        if isinstance(self.tree_cache, DecodeRadixCache):
            # The engine's staging buffer does not support a prefix.
            self.enable_staging = False
            # Also the prealloc queue's, which is created after this queue.
            self.policy = self.policy_type.of(self.scheduler.server_args, self.tree_cache)
            self.hooks = self.policy.hooks = Hooks(DecodeHooks, self)

    def _init_staging_handler(self, kv_manager) -> None:
        """Skips the engine's staging handler with a radix cache."""
        if not isinstance(self.tree_cache, DecodeRadixCache):
            super()._init_staging_handler(kv_manager)

    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Req]:
        """Replaces the engine's poll, which frees failed requests while prefill may write to them.

        rids_to_check: only used with pipeline parallelism, which the flag excludes.
        """
        if not isinstance(self.tree_cache, DecodeRadixCache):
            return super().pop_transferred(rids_to_check)
        self.collect()
        self._collected = False
        arrived, self.arrived = self.arrived, []
        return arrived

    def collect(self) -> None:
        """Commit arrived requests, once per step; `pop_transferred` returns them."""
        if not self._collected:
            self._collected = True
            self.arrived = self._poll_transfers()

    def _poll_transfers(self) -> list[Req]:
        polls, released = poll_transfers(
            self.queue, self.quarantine, self.tree_cache.tier, self.gloo_group
        )
        left = set(map(id, released))
        self.quarantine = [dr for dr in self.quarantine if id(dr) not in left]
        arrived: list[Req] = []
        ended: list[Req] = []
        still: list[DecodeRequest] = []
        for dr, poll in zip(self.queue, polls, strict=False):
            if poll == KVPoll.Failed:
                self._fail(dr)
                ended.append(dr.req)
                self._set_aside(dr, released)
            elif dr.phase is LOCAL and poll == KVPoll.Success:
                dr.entry.source.agree(dr)
            elif poll != KVPoll.Success or not self._commit_transfer_to_req(dr):
                still.append(dr)
            elif dr.is_aborted:
                # The buffer held another request's metadata, or the commit failed.
                self.policy.leave(dr.entry)
                ended.append(dr.req)
                self._set_aside(dr, released)
            else:
                # First: it no longer waits, so the tree need not be searched for its prompt.
                self.policy.committed(dr.entry)
                self.tree_cache.commit_req(dr.req)
                let_go(dr, self.tree_cache.tier)
                dr.advance(Phase.COMMITTED)
                arrived.append(dr.req)
                self.req_to_metadata_buffer_idx_allocator.free(dr.metadata_buffer_index)
        for dr in released:
            release(dr, self.tree_cache, self.req_to_metadata_buffer_idx_allocator)
        self.queue = still
        # After the release: this may be the last load report to a DP controller for long.
        for req in ended:
            report_end(req, self.scheduler, failed=True)
        return arrived

    def _set_aside(self, decode_req: DecodeRequest, released: list[DecodeRequest]) -> None:
        """Quarantine a failed request; release it if nothing writes for it."""
        receiver, local = decode_req.kv_receiver, decode_req.phase is LOCAL
        if receiver is None or local or is_warmup(decode_req.req):
            released.append(decode_req)
        else:
            decode_req.advance(Phase.QUARANTINED)
            self.quarantine.append(decode_req)

    def _fail(self, decode_req: DecodeRequest) -> None:
        """Abort a request whose transfer failed on this or another rank."""
        self.policy.leave(decode_req.entry)
        if decode_req.entry.source is not None:
            decode_req.entry.source.forget(decode_req)
        decode_req.abort("transfer")
        decode_req.fail()

    def _commit_transfer_to_req(self, decode_req: engine.DecodeRequest) -> bool:
        """Counts decode's prefix as cached tokens; leaves out another request's metadata."""
        req = decode_req.req
        try:
            if is_warmup(req):
                for row in self.metadata_buffers.get_buf(decode_req.metadata_buffer_index):
                    row.zero_()
            done = super()._commit_transfer_to_req(decode_req)
        except Exception as e:
            if not isinstance(self.tree_cache, DecodeRadixCache):
                raise
            # On all ranks alike: all received the same metadata.
            message = f"Decode commit failed for request {req.rid}: {type(e).__name__}: {e}"
            abort(req, message, error=e)
            return True
        if done and not decode_req.is_aborted and not is_warmup(req):
            note_transfer(req, events_of(self.scheduler.server_args))
        return done


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """The step of a decode worker's queues."""

    def process_decode_queue(self) -> None:
        """Asks for deltas that waited for an in-flight batch, whose result is now processed.

        Then polls handshakes and transfers also while retracted requests wait. The engine polls
        neither until all have resumed: never, if transfers hold their memory.
        """
        queue = self.disagg_decode_prealloc_queue
        if queue.has_radix:
            queue.admission.deltas.ask_deferred(queue.transfer_queue.queue)
        super().process_decode_queue()
        if queue.has_radix and queue.retracted_queue:
            queue.pop_preallocated()
            self.waiting_queue.extend(queue.transfer_queue.pop_transferred())
