"""Decode worker with a prefix cache: admission matches, locks and allocates the delta only.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746), with #24230 and, for Mooncake, #24257; all merged.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.decode_radix import overlap_guard
from sglang.srt.disaggregation.decode_radix.admission import Admission
from sglang.srt.disaggregation.decode_radix.allocation import RequestMemory
from sglang.srt.disaggregation.decode_radix.budget import Accounts, Budget, LiveReqs, live_reqs
from sglang.srt.disaggregation.decode_radix.commit import abort_commit, note_transfer, report_end, take_along
from sglang.srt.disaggregation.decode_radix.delta_request import PrefillDeltas
from sglang.srt.disaggregation.decode_radix.handshake import (
    LiveRooms,
    fail_unreached,
    poll_handshake,
    take_polls,
)
from sglang.srt.disaggregation.decode_radix.hooks import NO_HOOKS, DecodeHooks, Hooks, events_of
from sglang.srt.disaggregation.decode_radix.overlap_guard import Fence
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy, QueueEntry
from sglang.srt.disaggregation.decode_radix.prefix import LENGTH_SIZE
from sglang.srt.disaggregation.decode_radix.quarantine import (
    abort_transfer,
    flush_around,
    let_go,
    poll_transfers,
    release,
)
from sglang.srt.disaggregation.decode_radix.req_slots import KeptRows
from sglang.srt.disaggregation.decode_radix.retraction import Resumption, joins
from sglang.srt.disaggregation.decode_radix.schedule import Agreed, OwnFigures, Schedule, priority_sign
from sglang.srt.disaggregation.decode_radix.tp_agreement import Ranks
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, is_warmup

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
    """A request of which anything may raise: that fails this request, and on all TP ranks alike.

    error: what went wrong on this rank. From then on the request polls as failed, so the next reduction fails it on all
    ranks; until then it stays in the same queue on all of them.
    """

    error: str | None = None
    failed_at: float = 0.0
    phase: Phase = field(default=Phase.HANDSHAKE, init=False)
    # What the schedule policy knows of it, from when it is first asked; see `Schedule.entry_of`.
    entry: QueueEntry | None = None
    # What prefill is asked for: pages, and what the engine calls the state, if the model has any, see `StateKind`.
    page_indices: np.ndarray | None = None
    state_indices: list[int] | None = None
    # What it counts on in a tier (`Tier.lock`), until it is committed or has given its pages back.
    load: Any = None
    # Whether another request of its room was refused: its half may come to prefill after that has dropped the room.
    is_doubled: bool = field(default=False, init=False)

    @property
    def waiting_for_input(self) -> bool:
        """The engine's flag for a request that may be admitted, as part of its phase."""
        return self.phase is Phase.READY

    @waiting_for_input.setter
    def waiting_for_input(self, ready: bool) -> None:
        self.phase = Phase.READY if ready else Phase.HANDSHAKE

    @property
    def priority(self) -> int | None:
        """By which the engine counts the requests of a queue."""
        return self.req.priority

    @property
    def is_aborted(self) -> bool:
        return isinstance(self.req.finished_reason, FINISH_ABORT)

    # ---- what happens to it ----

    def advance(self, phase: Phase) -> None:
        """It has come into ``phase``."""
        self.phase = phase

    def enter(self, entry: QueueEntry) -> QueueEntry:
        """It has joined the queue of a schedule policy."""
        self.entry = entry
        return entry

    def said_prompt(self) -> bytes:
        """What prefill compares of its prompt with its own: how many tokens it has."""
        return len(self.req.origin_input_ids).to_bytes(LENGTH_SIZE, "little")

    def take_buffer(self, index: int) -> None:
        """Its metadata will come into that buffer."""
        self.metadata_buffer_index = index

    def name_target(self, page_indices: np.ndarray, state_indices: list[int] | None) -> None:
        """What prefill is to write to."""
        self.page_indices, self.state_indices = page_indices, state_indices

    def fail(self) -> None:
        """Have prefill, which may write for it, write no more."""
        self.failed_at = time.monotonic()
        if not is_warmup(self.req) and self.phase is not LOCAL:
            # Also where an error came before this rank had asked: the quarantine is the same on all ranks.
            self.kv_receiver.fenced = True
            self.cancel()

    def lose(self, error: Exception | str) -> None:
        """Have the next reduction fail this request."""
        if isinstance(error, Exception):
            logger.error("Request %s", self.req.rid, exc_info=error)
            error = f"{type(error).__name__}: {error}"
        self.error = error if self.error is None else self.error

    def poll(self) -> int:
        """What the receiver says, or whether it is computed here; not before what is copied for it has come."""
        copied = self.load is None or self.load.done()
        return self._poll() if copied else min(self._poll(), int(KVPoll.Transferring))

    def _poll(self) -> int:
        if self.phase is LOCAL:
            lost = self.error is not None or self.kv_receiver.conclude_state == KVPoll.Failed
            return int(KVPoll.Failed if lost else KVPoll.Success)
        try:
            return int(self.kv_receiver.poll() if self.error is None else KVPoll.Failed)
        except Exception as e:
            self.lose(e)
            return int(KVPoll.Failed)

    def failure_reason(self) -> str:
        """Why it failed, as far as this rank knows, after a colon."""
        try:
            if isinstance(self.kv_receiver, CommonKVReceiver):
                return f": {self.error or self.kv_receiver.failure()}"
            self.kv_receiver.failure_exception()
        except Exception as e:
            return f": {self.error or e}"
        return f": {self.error}" if self.error else ""

    def cancel(self) -> None:
        """Tell prefill, which would wait for this request or write for it. Time ends what it has not learnt of."""
        try:
            self.kv_receiver.cancel()
        except Exception as e:
            logger.error("Could not tell prefill that request %s has failed", self.req.rid, exc_info=e)

    def writers_done(self) -> bool:
        """Whether no prefill can write to the request's pages any more, or had as long as a transfer may take."""
        try:
            return self.kv_receiver.writers_done()
        except Exception as e:
            self.lose(e)
            return time.monotonic() - self.failed_at > self.kv_receiver.quarantine_s


class DecodeReqToTokenPool(KeptRows, engine.DecodeReqToTokenPool):
    """Rows of requests, of which some can be kept out of others' hands."""


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Admission with a decode-side radix cache; without the flag, every method is the engine's own."""

    # An extra may put others in their place.
    schedule_type, admission_type = Schedule, Admission

    def __init__(self, *args, **kwargs):
        """Adds what the engine's queue needs beside a cache."""
        super().__init__(*args, **kwargs)
        self.has_radix = False
        self.rooms = LiveRooms()
        self._steps = 0
        if isinstance(self.tree_cache, DecodeRadixCache):
            self._init_radix(self.tree_cache)

    def _init_radix(self, tree: DecodeRadixCache) -> None:
        self.has_radix, self.radix, self.tier = True, tree, tree.tier
        self.tier.know_live(self.live, lambda live: self.accounts.ahead(live))
        # A question does not hold up the scheduler here. When to ask again and to give up is the manager's to say.
        self._ensure_retry_interval, self._max_ensure_retries = 0.0, sys.maxsize
        rows, buffer_indices = self.req_to_token_pool, self.req_to_metadata_buffer_idx_allocator
        self.policy = self.transfer_queue.policy
        self.ranks = Ranks(self.gloo_group)
        hooks = self.transfer_queue.hooks
        sources, figures = tuple(of() for of in hooks.source), [measured() for measured in hooks.measured]
        if not self.ranks.are_alike([sum(one.width for one in figures)]):
            raise ValueError(
                "the TP ranks of this decode worker do not measure the same: options, extras or the package differ "
                "between its nodes. Start all of them with the same options and SGLANG_PD_RADIX_EXTRAS."
            )
        self.accounts = Accounts(tree, self.num_reserved_decode_tokens, engine.CLIP_MAX_NEW_TOKEN)
        self.memory = RequestMemory(tree, rows)
        deltas = PrefillDeltas(tree, rows, self.metadata_buffers, buffer_indices, hooks)
        self.schedule = self.schedule_type(self.policy, tree, lambda: priority_sign(self.scheduler), sources, figures)
        events = events_of(self.scheduler.server_args)
        self.admission = self.admission_type(
            tree, self.policy, self.accounts, self.memory, deltas, events, sources, self.ranks
        )
        self.resumption = Resumption(tree, self.accounts, self.memory, lambda: joins(self.scheduler, hooks), hooks)

    # ---- requests that come ----

    def add(self, req: Req, is_retracted: bool = False) -> None:
        """Refuses the second of two live requests of one room; an error fails this request only."""
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
                # Not even a receiver could be made. In the queue it fails on all ranks in the same step.
                self.queue.append(DecodeRequest(req, FakeKVReceiver(self.kv_manager, "", req.bootstrap_room)))
            self.queue[-1].lose(e)
        if not is_retracted and self.queue and self.queue[-1].req is req:
            self._welcome(self.queue[-1])

    def _welcome(self, decode_req: DecodeRequest) -> None:
        """Make a new request known: to the tree and to the tier."""
        self.schedule.entry_of(decode_req)
        if not is_warmup(decode_req.req):
            self.rooms[decode_req.req.bootstrap_room] = decode_req
            self.fetch(decode_req)

    def fetch(self, decode_req: DecodeRequest) -> None:
        """Have the tier bring what is not here of its prompt."""
        try:
            self.tier.fetch(decode_req.req, self.schedule.entry_of(decode_req))
        except Exception as e:
            # On all ranks: they hash the same.
            decode_req.lose(e)

    def _all_requests(self) -> list[DecodeRequest]:
        return [*self.queue, *self.transfer_queue.queue, *self.transfer_queue.quarantine]

    def _resolve_prefill_dp_rank(self, req: Req) -> int | None:
        """Lets a request whose client names the rank wait until its prefill is known.

        The engine fails it, and asks that prefill nothing; so it fails all that name one.
        """
        if self.has_radix and engine._bootstrap_addr(req) not in self.kv_manager.prefill_info_table:
            return None
        return super()._resolve_prefill_dp_rank(req)

    def _resolve_pending_reqs(self) -> None:
        """Fails what waits for a prefill that is gone, of no use or silent."""
        super()._resolve_pending_reqs()
        if self.has_radix:
            fail_unreached(self.pending_reqs, self.kv_manager)

    # ---- one step of the queue ----

    def begin_step(self) -> None:
        """Ask prefills that could not be asked for a step in flight, whose result has now been processed."""
        if self.has_radix:
            self.admission.deltas.ask_deferred(self.transfer_queue.queue)

    def pop_preallocated(self, rids_to_check: list[str] | None = None):
        """Replaces the engine's admission, which allocates whole prompts: match, lock, allocate and ask for the delta.

        rids_to_check: only used with pipeline parallelism, which the flag excludes.
        """
        if not self.has_radix:
            return super().pop_preallocated(rids_to_check)
        # 1. Commit what has arrived, so that who waited for it goes on in this step.
        self.transfer_queue.collect()
        # 2. Find out what a step in flight still uses of requests that have ended, before other rows become free.
        fence = overlap_guard.OPEN
        if self.queue:
            fence = overlap_guard.raise_fence(self.scheduler, self.req_to_token_pool, self.radix.page_size)
        # 3. Go on with handshakes.
        self._resolve_pending_reqs()
        self._steps, queue, retracted = self._steps + 1, self.queue, self.retracted_queue
        if self.admission.has_nothing_new(self._steps, queue, retracted, self.schedule, self._budget, self.live):
            return [], []
        # 4. Agree with the other ranks on who is looked at, and in which order.
        if (agreed := self._agree()) is None:
            # Or they would look again only when somebody ends.
            self.admission.held = None
            return [], []
        # 5. Let go of what has been aborted, or failed.
        failed = self._drop_aborted()
        # 6. Admit. As in the engine, a retracted request that waits for memory goes before everything else.
        admitted = [] if self.retracted_queue else self._admit(agreed, fence)
        return admitted, failed

    def _agree(self) -> Agreed | None:
        """Poll the handshakes and find out, with the other ranks, what to do next; None to skip the step."""
        window = self.schedule.window(self.queue)
        requests = window.requests
        if not requests and not self.retracted_queue:
            # On all ranks alike, by broadcast. Who is to come back goes by what is measured, which is agreed on too.
            return Agreed((), requests)
        polls = [poll_handshake(dr, self.tier) for dr in requests]
        if self.ranks.size == 1:
            self._take_polls(requests, polls)
            return self.schedule.decide(window)
        buffers = self.req_to_metadata_buffer_idx_allocator.available_size()
        own = OwnFigures(len(self.queue), len(self.retracted_queue), self.memory.figures(), buffers)
        return self.schedule.agree(window, polls, self.ranks, own, lambda all_: self._take_polls(requests, all_))

    def _take_polls(self, requests: Sequence[DecodeRequest], polls: Sequence[int]) -> None:
        failed = take_polls(requests, polls)
        for _ in range(failed if self.scheduler.enable_metrics else 0):
            self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()

    def _drop_aborted(self) -> list[DecodeRequest]:
        gone = [dr for dr in self.queue if dr.req.finished_reason is not None and dr.is_aborted]
        self._forget(gone)
        for decode_req in gone:
            report_end(decode_req.req, self.scheduler)
            self.policy.leave(self.schedule.entry_of(decode_req))
            decode_req.advance(Phase.RELEASED)
        return gone

    def _admit(self, agreed: Agreed, fence: Fence) -> list[DecodeRequest]:
        rows = self.req_to_token_pool.available_size() - fence.rows
        admitted = self.admission.admit(agreed, fence, rows, self.live, self._budget, self.schedule)
        self._forget(admitted)
        # Several ranks find out first whether it has failed on one of them.
        alone = self.ranks.size == 1
        return [dr for dr in admitted if not (alone and dr.entry.source is not None and dr.entry.source.agree(dr))]

    def _forget(self, decode_reqs: Sequence[DecodeRequest]) -> None:
        if not decode_reqs:
            return
        gone = {id(dr) for dr in decode_reqs}
        for decode_req in decode_reqs:
            self.tier.leave(decode_req.req.rid)
        self.queue = [dr for dr in self.queue if id(dr) not in gone]
        # Or the handshake of one that has failed would still be made.
        self.pending_reqs = [dr for dr in self.pending_reqs if id(dr) not in gone]

    # ---- memory ----

    def live(self) -> LiveReqs:
        """The requests that hold KV, or are to get theirs back."""
        return live_reqs(self.scheduler, self.transfer_queue, self.retracted_queue)

    def _budget(self) -> Budget:
        """What admission has to give in this state."""
        return self.accounts.budget(self.live(), self.tier.nodes_in_use())

    # ---- retraction ----

    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Req]:
        """Replaces the engine's resume, which restores everything: match again and restore what the tree lost."""
        if not self.has_radix:
            return super().resume_retracted_reqs(rids_to_check)
        if not self.retracted_queue:
            return []
        resumed, num_failed = self.resumption.resume(
            self.retracted_queue, self.live(), self.schedule.version, lambda req: report_end(req, self.scheduler)
        )
        self.retracted_queue = self.retracted_queue[len(resumed) + num_failed :]
        return resumed


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Transfers of a decode worker with a radix cache; without the flag, every method is the engine's own."""

    # An extra may put another in its place.
    policy_type = AdmissionPolicy

    def __init__(self, *args, **kwargs):
        """Adds the quarantine: failed requests whose pages and metadata buffer a prefill may still write to."""
        super().__init__(*args, **kwargs)
        self.quarantine: list[DecodeRequest] = []
        # What has arrived in this step.
        self.hooks: Hooks[DecodeHooks] = NO_HOOKS
        self.arrived: list[Req] = []
        self._collected = False
        if isinstance(self.tree_cache, DecodeRadixCache):
            # The engine's way through the staging buffer knows of no prefix.
            self.enable_staging = False
            # The schedule policy of the queue before this one, which is made after it.
            self.policy = self.policy_type.of(self.scheduler.server_args, self.tree_cache)
            self.hooks = Hooks(DecodeHooks, self)
            self.policy.know(self.hooks)

    def _init_staging_handler(self, kv_manager) -> None:
        """Leaves out the engine's with a radix cache."""
        if not isinstance(self.tree_cache, DecodeRadixCache):
            super()._init_staging_handler(kv_manager)

    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Req]:
        """Replaces the engine's poll, which gives a failed request's pages away while they may still be written.

        rids_to_check: only used with pipeline parallelism, which the flag excludes.
        """
        if not isinstance(self.tree_cache, DecodeRadixCache):
            return super().pop_transferred(rids_to_check)
        self.collect()
        self._collected = False
        arrived, self.arrived = self.arrived, []
        return arrived

    def collect(self) -> None:
        """Take in what has arrived, once in a step; `pop_transferred` hands it on."""
        if not self._collected:
            self._collected = True
            self.arrived = self._poll_transfers()

    def _poll_transfers(self) -> list[Req]:
        polls, released = poll_transfers(self.queue, self.quarantine, self.tree_cache.tier, self.gloo_group)
        left = set(map(id, released))
        self.quarantine = [dr for dr in self.quarantine if id(dr) not in left]
        arrived: list[Req] = []
        ended: list[Req] = []
        still: list[DecodeRequest] = []
        for decode_req, poll in zip(self.queue, polls, strict=False):
            if poll == KVPoll.Failed:
                self._fail(decode_req)
                ended.append(decode_req.req)
                self._set_aside(decode_req, released, closed=is_warmup(decode_req.req) or decode_req.phase is LOCAL)
            elif decode_req.phase is LOCAL and poll == KVPoll.Success:
                decode_req.entry.source.agree(decode_req)
            elif poll != KVPoll.Success or not self._commit_transfer_to_req(decode_req):
                still.append(decode_req)
            elif decode_req.is_aborted:
                # Another request's metadata came into its buffer, or its own cannot be used.
                self.policy.leave(decode_req.entry)
                ended.append(decode_req.req)
                self._set_aside(decode_req, released, decode_req.kv_receiver is None or is_warmup(decode_req.req))
            else:
                # First: it waits no longer, and need not be looked for in the tree again.
                self.policy.committed(decode_req.entry)
                self.tree_cache.commit_req(decode_req.req)
                let_go(decode_req, self.tree_cache.tier)
                decode_req.advance(Phase.COMMITTED)
                arrived.append(decode_req.req)
                self.req_to_metadata_buffer_idx_allocator.free(decode_req.metadata_buffer_index)
        for decode_req in released:
            release(decode_req, self.tree_cache, self.req_to_metadata_buffer_idx_allocator)
        self.queue = still
        # Only now: what an output says of this rank's load may be the last for long that a DP controller hears.
        for req in ended:
            report_end(req, self.scheduler, failed=True)
        return arrived

    def _set_aside(self, decode_req: DecodeRequest, released: list[DecodeRequest], closed: bool) -> None:
        """Put a failed request into quarantine or, if it is ``closed`` and nobody writes for it, to those released."""
        if closed:
            released.append(decode_req)
        else:
            decode_req.advance(Phase.QUARANTINED)
            self.quarantine.append(decode_req)

    def flush_around_quarantine(self, flush: Callable[[], bool]) -> bool:
        """Flush the pools of an otherwise idle worker, and keep what is in quarantine out of them.

        A weight update flushes and takes a refusal for an error that ends the scheduler, so it cannot be told to wait.
        """
        assert isinstance(self.tree_cache, DecodeRadixCache)
        reqs = [dr.req for dr in self.quarantine]
        return flush_around(reqs, self.scheduler.req_to_token_pool, self.tree_cache, flush)

    def _fail(self, decode_req: DecodeRequest) -> None:
        """Abort a request whose transfer failed here or on another rank."""
        self.policy.leave(decode_req.entry)
        if decode_req.entry is not None and decode_req.entry.source is not None:
            decode_req.entry.source.forget(decode_req)
        abort_transfer(decode_req)

    def _commit_transfer_to_req(self, decode_req: engine.DecodeRequest) -> bool:
        """Adds to cached tokens what decode held; leaves out what another request left behind."""
        req = decode_req.req
        try:
            if is_warmup(req):
                for row in self.metadata_buffers.get_buf(decode_req.metadata_buffer_index):
                    row.zero_()
            done = super()._commit_transfer_to_req(decode_req)
        except Exception as e:
            if not isinstance(self.tree_cache, DecodeRadixCache):
                raise
            # On all ranks, which have been sent the same metadata.
            abort_commit(req, e)
            return True
        if done and not decode_req.is_aborted:
            take_along(req)
            if not is_warmup(req):
                note_transfer(req, events_of(self.scheduler.server_args))
        return done


class SchedulerDisaggregationDecodeMixin(engine.SchedulerDisaggregationDecodeMixin):
    """Turns of a decode worker's loop: the step of its queues, and the batch that comes out of them."""

    def process_decode_queue(self) -> None:
        """Adds what begins a step of the queue.

        Transfers end and failures are told also while retracted requests wait for memory. The engine looks at neither
        until all of these are back: if what they wait for is held by transfers, both wait for ever.
        """
        queue = self.disagg_decode_prealloc_queue
        queue.begin_step()
        super().process_decode_queue()
        if queue.retracted_queue and isinstance(self.tree_cache, DecodeRadixCache):
            queue.pop_preallocated()
            self.waiting_queue.extend(self.disagg_decode_transfer_queue.pop_transferred())
