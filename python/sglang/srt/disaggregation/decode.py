"""Decode worker with a prefix cache: admission matches, locks and allocates the delta only.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import logging
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.decode_admission import Candidate, Line, Place, Turns, admission_order
from sglang.srt.disaggregation.decode_agreement import CANDIDATES, WINDOW, agree, are_alike
from sglang.srt.disaggregation.decode_budget import Budget, use_of
from sglang.srt.disaggregation.decode_prefix import AdmissionPlan, KvTransferCounters, Memory, pages
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver
from sglang.srt.disaggregation.page_digest import PageDigests
from sglang.srt.disaggregation.step_in_flight import LateStep, late_step
from sglang.srt.disaggregation.utils import kv_to_page_indices, poll_and_all_reduce, prepare_abort
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.decode_radix_cache import NOTHING, DecodeRadixCache, PrefixPeek, is_warmup
from sglang.srt.mem_cache.decode_windows import NO_WINDOW, WindowNeed
from sglang.srt.mem_cache.pegaflow_radix_cache import PegaFlowTree
from sglang.srt.mem_cache.pegaflow_room import live_on_decode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

__all__ = ["DecodePreallocQueue", "DecodeRequest", "DecodeTransferQueue", "HybridMambaDecodeReqToTokenPool"]

# Steps that TP ranks may disagree in a row before they drop what they can differ in.
DISAGREEMENTS = 64
# Tokens of its answer, at most, for which a request must find room.
MOST_NEW_TOKENS = engine.CLIP_MAX_NEW_TOKEN
# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)
# Places of the window that are not given to requests whose handshake is done, where the queue is longer than it.
HANDSHAKES = WINDOW // 4
# Requests that prefills are told of in one step.
ANNOUNCEMENTS = 256
# Steps of a blocked queue between two looks for aborted requests in it.
ABORT_INTERVAL = 16


@dataclass
class DecodeRequest(engine.DecodeRequest):
    """A request of which anything may raise: that fails this request, and on all TP ranks alike.

    error: what went wrong on this rank. From then on the request polls as failed, so the next reduction fails it on all
    ranks; until then it stays in the same queue on all of them.
    """

    error: str | None = None
    failed_at: float = 0.0
    # What prefill is asked for: pages, and what the engine calls the state, if the model has any: a slot of it, or the
    # pages of a window.
    page_indices: np.ndarray | None = None
    state_indices: list[int] | None = None

    def lose(self, error: Exception | str) -> None:
        """Have the next reduction fail this request."""
        if isinstance(error, Exception):
            logger.error("Request %s", self.req.rid, exc_info=error)
            error = f"{type(error).__name__}: {error}"
        self.error = self.error or error

    def poll(self) -> int:
        """What the receiver says."""
        try:
            return int(self.kv_receiver.poll() if self.error is None else KVPoll.Failed)
        except Exception as e:
            self.lose(e)
            return int(KVPoll.Failed)

    def why(self) -> str:
        """Why it failed, as far as this rank knows, after a colon."""
        try:
            if isinstance(self.kv_receiver, CommonKVReceiver):
                return f": {self.error or self.kv_receiver.failure()}"
            self.kv_receiver.failure_exception()
        except Exception as e:
            return f": {self.error or e}"
        return f": {self.error}" if self.error else ""

    def cancel(self) -> None:
        """Tell prefill, which would wait for this request or write for it. Time ends what it has not heard of."""
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
            return time.monotonic() - self.failed_at > self.kv_receiver.kv_mgr.waiting_timeout


class HybridMambaDecodeReqToTokenPool(engine.HybridMambaDecodeReqToTokenPool):
    """Rows and state slots of the requests of a hybrid model. The state pool may have fewer slots than there are rows.

    The prefix cache holds no states, so all slots are requests' or free, and a request has its own from its admission
    to its end.
    """

    def _init_mamba_pool(self, *args, **kwargs) -> None:
        """Adds that the tables from rows to slots have an entry for each row; the engine makes one for each slot."""
        super()._init_mamba_pool(*args, **kwargs)
        rows = len(self.req_to_token)
        slots = self.req_index_to_mamba_index_mapping
        self.req_index_to_mamba_index_mapping = slots.new_zeros(rows)
        if self.enable_mamba_extra_buffer:
            tracked = self.req_index_to_mamba_ping_pong_track_buffer_mapping
            self.req_index_to_mamba_ping_pong_track_buffer_mapping = tracked.new_zeros(rows, tracked.shape[1])

    def available_size(self) -> int:
        """Replaces the engine's number of free rows: requests for which there are a row and the state slots it takes.

        All admissions ask this. The engine's run into an assertion when rows are left and slots are not.
        """
        each = 1 + (self.mamba_ping_pong_track_buffer_size if self.enable_mamba_extra_buffer else 0)
        return min(len(self.free_slots), self.mamba_pool.available_size() // each)


def _free_row(pool: Any, req: Req) -> None:
    """Give back a request's row, and its state slot if it has one."""
    if req.mamba_pool_idx is not None:
        pool.free_mamba_cache(req)
    pool.free(req)


def _takes_prefix(decode_req: engine.DecodeRequest) -> bool:
    return getattr(decode_req.kv_receiver, "peer_takes_prefix", False)


def _is_aborted(decode_req: engine.DecodeRequest) -> bool:
    return isinstance(decode_req.req.finished_reason, FINISH_ABORT)


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Admission with a decode-side radix cache; without the flag, every method is the engine's own."""

    def __init__(self, *args, **kwargs):
        """Adds the cache's bookkeeping to the engine's queue."""
        super().__init__(*args, **kwargs)
        self.has_radix = False
        # The last request of each room, for as long as there is one.
        self.rooms: WeakValueDictionary[int, engine.DecodeRequest] = WeakValueDictionary()
        if isinstance(self.tree_cache, DecodeRadixCache):
            self.has_radix, self.radix = True, self.tree_cache
        # The same tree, where it loads from a PegaFlow server.
        self.pegaflow = self.tree_cache if isinstance(self.tree_cache, PegaFlowTree) else None
        if self.pegaflow is not None:
            self.pegaflow.live = lambda: live_on_decode(self)
        self.num_ranks = dist.get_world_size(self.gloo_group)
        # What a retracted request must save and restore too.
        self.token_to_kv_pool_allocator.draft_kv_pool = self.draft_token_to_kv_pool
        self.counters = KvTransferCounters.get(self.scheduler.server_args)
        if self.has_radix:
            options: Any = self.scheduler.server_args
            by_prefix = options.disaggregation_decode_admission == "prefix"
            overtaken = options.disaggregation_decode_max_overtaken if by_prefix else 0
            self.line = self.transfer_queue.line = Line(self.radix, by_prefix, overtaken)
            if self.radix.windows is not None:
                # The engine's limit of a prompt is the smaller pool, which need not hold a prompt here.
                self.max_total_num_tokens = self.radix.pool_size
        # The request that did not fit, what it takes, what was kept from it, and the state in which it was asked. And
        # the same of the retracted one that did not.
        self._blocked: tuple[str, AdmissionPlan, Memory, tuple[int, ...]] | None = None
        self._not_resumed: tuple[str, AdmissionPlan, Memory, tuple[int, ...]] | None = None
        # The last order of admission, and the state in which it was found.
        self._ordered: tuple[tuple, list[int]] | None = None
        # Of the requests of the window when the ranks last compared them, a digest of their rooms.
        self._rooms: tuple[list[Place], int] = ([], 0)
        # Steps in a row in which the TP ranks were not in the same state.
        self._disagreements = 0
        self._steps = 0
        # A decode step in flight that some of its requests have not outlived, and how many of the free rows it reads.
        self._late: LateStep | None = None
        self._late_rows = 0
        # Admitted requests whose prefill is asked when that step is over.
        self._unasked: list[engine.DecodeRequest] = []
        if self.has_radix:
            # A question does not hold up the scheduler here. When to ask again and to give up is the manager's to say.
            self._ensure_retry_interval, self._max_ensure_retries = 0.0, sys.maxsize
            # Requests that prefill has not been told of, and when all that wait were last looked at.
            self._unannounced: list[engine.DecodeRequest] = []
            self._announced_at = time.monotonic()
            self._announce_again = envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get() / 4

    def _init_kv_manager(self):
        """Adds what the digests of pages are compared with, with --disaggregation-decode-verify-pages."""
        manager: Any = super()._init_kv_manager()
        if self.scheduler.server_args.disaggregation_decode_verify_pages:
            manager.page_digests = PageDigests.of_rank(
                self.token_to_kv_pool,
                manager.attn_tp_rank,
                manager.attn_tp_size,
                self.scheduler.model_config.get_total_num_kv_heads(),
            )
        return manager

    def add(self, req: Req, is_retracted: bool = False) -> None:
        """Adds that of two live requests of one room the second is refused.

        A room is what KV, metadata and notifications are told apart by. The engine lets the two mix; one ends the books
        of the other, and the scheduler with them.
        """
        if self.has_radix and not is_retracted and not is_warmup(req) and self._is_live(req.bootstrap_room):
            message = (
                f"bootstrap_room {req.bootstrap_room} of request {req.rid} belongs to a request that is still being "
                "served. With PD disaggregation each request needs a room of its own."
            )
            logger.error(message)
            prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
            self.scheduler.stream_output([req], req.return_logprob)
            return
        if not self.has_radix:
            super().add(req, is_retracted)
            return
        try:
            super().add(req, is_retracted)
        except Exception as e:
            if not self.queue or self.queue[-1].req is not req:
                # Not even a receiver could be made. In the queue it fails on all ranks in the same step.
                self.queue.append(DecodeRequest(req, FakeKVReceiver(self.kv_manager, "", req.bootstrap_room)))
            self.queue[-1].lose(e)
        if not is_retracted and self.queue and self.queue[-1].req is req:
            if not is_warmup(req):
                self.rooms[req.bootstrap_room] = self.queue[-1]
            # From here on the tree knows what is waited for.
            self._place(self.queue[-1])
            self._unannounced.append(self.queue[-1])
            if self.pegaflow is not None and not is_warmup(req):
                try:
                    self.pegaflow.prefetch(req.rid, req.origin_input_ids, req.extra_key, req.priority or 0)
                except Exception as e:
                    # On all ranks: they hash the same.
                    self.queue[-1].lose(e)

    def announce(self) -> None:
        """Tell prefills of the requests that wait here; for the end of a step. Not of those admitted in their first.

        And again after a quarter of the time after which prefill takes nobody to know of them.
        """
        now = time.monotonic()
        if now - self._announced_at > self._announce_again:
            self._announced_at, self._unannounced = now, [*self.queue]
        if not self._unannounced:
            return
        waiting, later = {id(dr) for dr in self.queue}, []
        for decode_req in self._unannounced[:ANNOUNCEMENTS]:
            receiver = decode_req.kv_receiver
            if id(decode_req) not in waiting or not isinstance(receiver, CommonKVReceiver):
                continue
            try:
                # Behind the window it is not polled.
                receiver.shake_hands()
                if receiver.bootstrap_infos is None:
                    # The handshake is not done.
                    later.append(decode_req)
                else:
                    receiver.announce()
            except Exception as e:
                decode_req.lose(e)
        self._unannounced = [*self._unannounced[ANNOUNCEMENTS:], *later]

    def _resolve_prefill_dp_rank(self, req: Req) -> int | None:
        """Adds that a request whose client names the rank is one of a prefill that has to be known first.

        The engine fails it, and asks that prefill nothing; so it fails all that name one.
        """
        if self.has_radix and engine._bootstrap_addr(req) not in self.kv_manager.prefill_info_table:
            return None
        return super()._resolve_prefill_dp_rank(req)

    def _resolve_pending_reqs(self) -> None:
        """Adds that what waits for a prefill that is gone, of no use or silent does not wait for ever."""
        super()._resolve_pending_reqs()
        waits: set[str] = set()
        for decode_req in self.pending_reqs if self.has_radix else []:
            receiver = decode_req.kv_receiver
            if receiver.bootstrap_addr in waits:
                # What an older one still waits for it does too; there may be thousands.
                continue
            reason = self.kv_manager.why_unreached(receiver.bootstrap_addr, receiver.made_at)
            if reason is None:
                waits.add(receiver.bootstrap_addr)
            else:
                decode_req.lose(reason)

    def _is_live(self, room: int) -> bool:
        known = self.rooms.get(room)
        if known is None:
            return False
        # Only then are they looked through, which takes a millisecond where thousands wait.
        return any(dr is known for dr in (*self.queue, *self.transfer_queue.queue, *self.transfer_queue.quarantine))

    # ---- one step of the queue ----

    def pop_preallocated(self, rids_to_check: list[str] | None = None):
        """Replaces the engine's admission, which allocates whole prompts: match, lock, allocate and ask for the delta.

        rids_to_check: only used with pipeline parallelism, which the flag excludes.
        """
        if not self.has_radix:
            return super().pop_preallocated(rids_to_check)
        self._look_behind()
        # First, so that who waited for what has just arrived goes on in this step.
        self.transfer_queue.collect()
        self._resolve_pending_reqs()
        if self._nothing_new():
            return [], []
        agreed = self._agree()
        if agreed is None:
            return [], []
        failed = [dr for dr in self.queue if dr.req.finished_reason is not None and _is_aborted(dr)]
        for decode_req in failed:
            self.scheduler.stream_output([decode_req.req], decode_req.req.return_logprob)
        if failed:
            self._forget(failed)
            for decode_req in failed:
                self.line.leave(self._place(decode_req))
        # As in the engine, a retracted request that waits for memory goes before everything else.
        admitted = [] if self.retracted_queue else self._admit_ready(*agreed)
        if admitted:
            self._forget(admitted)
        if self._blocked is None and not self.retracted_queue:
            # While a request waits for memory, what is cached may be what it waits for.
            self.radix.evict_to_watermark()
        self.counters.tree(self.radix.evictable_size(), self.radix.protected_size())
        return admitted, failed

    def _place(self, decode_req: engine.DecodeRequest) -> Place:
        """The place of a request in the line, which it joins when it is first asked for."""
        place = getattr(decode_req, "place", None)
        if place is None:
            req = decode_req.req
            priority = 0
            if getattr(self.scheduler, "enable_priority_scheduling", False):
                # As in the engine's own order of requests.
                priority = req.priority * (1 if self.scheduler.schedule_low_priority_values_first else -1)
            prompt = None if is_warmup(req) else req.origin_input_ids
            prefill = getattr(decode_req.kv_receiver, "bootstrap_addr", None)
            try:
                place = self.line.enter(prompt, req.extra_key, priority, prefill)
            except Exception as e:
                # On all ranks: they ask the same of the same tree.
                decode_req.lose(e)
                place = self.line.enter(None, None, priority, prefill)
            decode_req.place = place
        return place

    def _nothing_new(self) -> bool:
        """Whether this step can be left out: all handshakes are done and what goes next still does not fit.

        Then only an abort or a lost prefill could change the queue, and that is looked for every few steps. All ranks
        decide alike: they have the same queue and pool, and whose handshake is done has been reduced.
        """
        self._steps += 1
        if self.retracted_queue:
            return self._steps % ABORT_INTERVAL != 0
        if self._steps % ABORT_INTERVAL == 0 or self._blocked is None or not self.queue:
            return False
        if not all(dr.waiting_for_input for dr in self.queue):
            return False
        _, plan, kept, asked_in = self._blocked
        return asked_in == self._asked_in() and not self._budget().covers(plan, kept)

    # ---- the step in flight, see step_in_flight.py ----

    def _look_behind(self) -> None:
        """Find out what a decode step in flight may still use of requests that have ended.

        A request may be given their pages at once, but its prefill is asked for KV in the next step, when the result of
        that one has been processed. Their rows go to nobody in this step. Steps do not use metadata buffers.
        """
        self._late, self._late_rows = None, 0
        if self.queue:
            self._late = late_step(self.scheduler, self.token_to_kv_pool_allocator.page_size)
        if self._late is not None:
            rows, free = self._late.rows, self.req_to_token_pool.free_slots
            # They are taken from the front.
            free.sort(key=rows.__contains__)
            self._late_rows = len(rows.intersection(free))

    def ask_late(self) -> None:
        """Ask for the KV of those whose pages a step in flight used; for the start of the step after it."""
        unasked, self._unasked = self._unasked, []
        for decode_req in unasked:
            try:
                self._ask(decode_req)
            except Exception as e:
                decode_req.lose(e)

    def _pre_alloc(self, req: Req) -> torch.Tensor:
        """Adds that without the flag nothing is given to a prefill that a decode step in flight may still use.

        The request gets what the engine gives it; only if that step uses it, the end of the step is waited for. Where
        steps write to more than a slot of each request (state, drafts, host memory), wherever one has ended.
        """
        kv_loc = super()._pre_alloc(req)
        page = self.token_to_kv_pool_allocator.page_size
        late = late_step(self.scheduler, page)
        if late is None:
            return kv_loc
        more = hasattr(self.token_to_kv_pool, "get_state_buf_infos") or self.scheduler.enable_hisparse
        if (
            more
            or not self.scheduler.spec_algorithm.is_none()
            or req.req_pool_idx in late.rows
            or bool(torch.isin(kv_loc // page, late.pages).any())
        ):
            late.done.synchronize()
        return kv_loc

    def _forget(self, decode_reqs: Sequence[engine.DecodeRequest]) -> None:
        gone = {id(dr) for dr in decode_reqs}
        if self.pegaflow is not None:
            for decode_req in decode_reqs:
                self.pegaflow.release_aborted_request(decode_req.req.rid)
        self.queue = [dr for dr in self.queue if id(dr) not in gone]
        # Or the handshake of one that has failed would still be made.
        self.pending_reqs = [dr for dr in self.pending_reqs if id(dr) not in gone]

    def _agree(self) -> tuple[list[engine.DecodeRequest], Iterable[bool], list[engine.DecodeRequest]] | None:
        """Poll the handshakes and agree with the other TP ranks, in one collective, on what to do next.

        Equal figures on all ranks mean that all go on to the same decisions. Ranks whose queue, pool or order differ
        skip the step. A request of which their trees hold different prefixes goes without one.

        Returns the candidates for admission, in order; of each whether it may match; and all that the step looks at.
        None to skip the step.
        """
        window = self._window()
        if not window:
            # On all ranks alike: requests reach the queues of a TP group by broadcast.
            return [], [], []
        places = [getattr(dr, "place", None) or self._place(dr) for dr in window]
        polls = [self._poll(dr) for dr in window]
        if self.num_ranks == 1:
            self._take_polls(window, polls)
            for i in self._follow(window, places):
                self.line.give_up(places[i])
            ready = [window[i] for i in self._order(window, places)]
            # Asked one by one: most of a long queue stands behind the first that does not fit.
            return ready, map(_takes_prefix, ready), window

        # Those whose handshake is done, and as far as there is room those that may turn out to be in this step.
        expired = self._follow(window, places)
        order = self._order(window, places)
        picked = list(islice((i for i in order if not places[i].coming), CANDIDATES))
        late = [i for i, dr in enumerate(window) if not dr.waiting_for_input][: CANDIDATES - len(picked)]
        chosen = set(picked)
        order = [i for i in order if i in chosen or places[i].coming]
        picked += late
        told = agree(
            self.gloo_group,
            self._state(window, places, order),
            [self.line.held(places[i]) for i in picked],
            polls,
            [_takes_prefix(dr) for dr in window],
            expired,
        )
        if not told.in_step:
            self._on_disagreement(told.low, told.high)
            return None
        self._disagreements = 0
        self._take_polls(window, told.polls)
        if self.line.may_follow:
            for place, capable in zip(places, told.capable, strict=True):
                place.takes_prefix = bool(capable)
        for i in told.expired:
            # From the next step on; the order of this one is agreed.
            self.line.give_up(places[i])
        same = dict(zip(picked, told.same, strict=True))
        going = [i for i in (*order, *late) if window[i].waiting_for_input]
        return [window[i] for i in going], [told.capable[i] and same.get(i, True) for i in going], window

    def _window(self) -> list[engine.DecodeRequest]:
        """The requests that this step looks at, at most `WINDOW`; of a longer queue those that are ready go first.

        All ranks find the same: they have agreed on whose handshake is done.
        """
        if len(self.queue) <= WINDOW:
            return self.queue
        ready = [dr for dr in self.queue if dr.waiting_for_input]
        if getattr(self.scheduler, "enable_priority_scheduling", False):
            ready.sort(key=lambda dr: self._place(dr).priority)
        ready = ready[: WINDOW - HANDSHAKES]
        others = [dr for dr in self.queue if not dr.waiting_for_input]
        room = WINDOW - len(ready)
        if len(others) > room:
            # By turns: those of a prefill that does not answer must not hide all that come after them.
            first = self._steps * room % len(others)
            others = [*others[first:], *others[:first]][:room]
        return ready + others

    def _poll(self, decode_req: engine.DecodeRequest) -> int:
        """What its receiver says, but a request whose prefix is being loaded has not shaken hands yet."""
        poll = decode_req.poll()
        if self.pegaflow is None or decode_req.waiting_for_input or poll != KVPoll.WaitingForInput:
            return poll
        loaded = self.pegaflow.check_prefetch_progress(decode_req.req.rid)
        return poll if loaded else int(KVPoll.Bootstrapping)

    def _follow(self, window: list[engine.DecodeRequest], places: list[Place]) -> list[int]:
        """Find out for each request that is ready whether it waits for the transfer of another.

        Returns the indices of those that by this rank's clock have waited long enough.
        """
        if not self.line.may_follow:
            self.line.stop_following(places)
            return []
        now, expired = time.monotonic(), []
        for i, decode_req in enumerate(window):
            if not decode_req.waiting_for_input:
                continue
            if self.num_ranks == 1:
                places[i].takes_prefix = _takes_prefix(decode_req)
            try:
                if self.line.look(places[i], now):
                    expired.append(i)
            except Exception as e:
                decode_req.lose(e)
        return expired

    def _order(self, window: list[engine.DecodeRequest], places: list[Place]) -> list[int]:
        """Indices of the requests of ``window`` whose handshake is done, in the order of admission."""
        ready = [i for i, dr in enumerate(window) if dr.waiting_for_input]
        if len(ready) < 2:
            return ready
        # The same requests, of which the same wait for others, and the same tree: the same order.
        tree = self.radix
        coming = [places[i].coming for i in ready] if self.line.may_follow else []
        asked_in = (self._asked_in(), tree.evictable_size(), tree.protected_size(), ready, coming, places)
        if self._ordered is None or self._ordered[0] != asked_in:
            candidates = [self._candidate(window[i], places[i]) for i in ready]
            order = [ready[n] for n in admission_order(candidates, self.line.max_overtaken)]
            self._ordered = asked_in, order
        return self._ordered[1]

    def _candidate(self, decode_req: engine.DecodeRequest, place: Place) -> Candidate:
        try:
            return self.line.candidate(place, len(decode_req.req.origin_input_ids))
        except Exception as e:
            decode_req.lose(e)
            return Candidate(place.arrival, place.priority, 0, 0, 0, 0, place.overtaken)

    def _state(self, window: list[engine.DecodeRequest], places: list[Place], order: list[int]) -> list[int]:
        """The figures that must be the same on all ranks for them to decide alike."""
        if self._rooms[0] != places:
            self._rooms = places, zlib.crc32(",".join(str(dr.req.bootstrap_room) for dr in window).encode())
        line = ",".join(f"{i}/{places[i].coming}" for i in order)
        available, windows, evictable, rows = self._memory()
        # Of an admission that failed on one rank there may be nothing else that differs.
        line += f";{rows};{self.req_to_metadata_buffer_idx_allocator.available_size()}"
        return [
            len(self.queue),
            self._rooms[1],
            available,
            windows,
            evictable,
            len(self.retracted_queue),
            zlib.crc32(line.encode()),
            self.radix.watches.leaders,
        ]

    def _take_polls(self, window: list[engine.DecodeRequest], polls: list[int]) -> None:
        waiting = KVPoll.WaitingForInput
        for decode_req, poll in zip(window, polls, strict=True):
            if poll == waiting and decode_req.waiting_for_input:
                continue
            if poll == KVPoll.Failed:
                self._fail_handshake(decode_req)
            elif poll == waiting:
                n = decode_req.req.sampling_params.n
                if n > 1:
                    # Its samples would be requests of one room. Refused only now that its prefill can be told, which
                    # would wait for it for ever.
                    decode_req.kv_receiver.abort()
                    refusal = f"n is {n}. With PD disaggregation n must be 1: send the request n times."
                    self._fail_handshake(decode_req, refusal)
                    continue
                decode_req.waiting_for_input = True
                decode_req.req.time_stats.set_bootstrap_done_time()
            elif poll != KVPoll.Bootstrapping:
                decode_req.lose("prefill says that it has sent what it has not been asked for")

    def _on_disagreement(self, low: list[int], high: list[int]) -> None:
        """Skip a step; if that does not help for long, give up what the ranks can differ in: the unlocked tree.

        All ranks see each disagreement in the same step, so they also come here together.
        """
        self._disagreements += 1
        if self._disagreements % DISAGREEMENTS:
            return
        logger.error(
            "TP ranks have disagreed for %d steps about what decode holds (queue length, rooms, available, "
            "available for windows, evictable, retracted, order and rows, leaders): lowest %s, highest %s. "
            "The unlocked part of the tree is dropped on all of them.",
            self._disagreements,
            low,
            high,
        )
        self.radix.evict_shortfall(self.radix.evictable_size())

    def _fail_handshake(self, decode_req: engine.DecodeRequest, refusal: str | None = None) -> None:
        """Abort a request before its admission. ``refusal``: what is wrong with the request itself, if anything."""
        req = decode_req.req
        if isinstance(req.finished_reason, FINISH_ABORT):
            return
        message = (
            f"Decode handshake failed for request {req.rid} (bootstrap_room={req.bootstrap_room}){decode_req.why()}"
        )
        status = HTTPStatus.BAD_REQUEST if refusal else HTTPStatus.INTERNAL_SERVER_ERROR
        message = refusal or message
        logger.error(message)
        prepare_abort(req, message, status_code=status)
        if isinstance(decode_req.kv_receiver, CommonKVReceiver):
            # Prefill would wait for this request's message for ever.
            decode_req.cancel()
        if self.scheduler.enable_metrics:
            self.scheduler.metrics_collector.increment_bootstrap_failed_reqs()

    # ---- admission ----

    def _admit_ready(
        self,
        candidates: list[engine.DecodeRequest],
        matching: Iterable[bool],
        window: Sequence[engine.DecodeRequest],
    ) -> list[engine.DecodeRequest]:
        """Admit requests in the order given, until one does not fit.

        matching: of each, whether it may match. window: all that this step knows, candidates or not.
        """
        line, now = self.line, time.monotonic()
        admitted: list[engine.DecodeRequest] = []
        # Both are found out for the first that is not told to wait; the budget is kept up if there is another.
        budget: Budget | None = None
        turns: Turns | None = None
        taken: AdmissionPlan | None = None
        places = min(
            self.req_to_token_pool.available_size() - self._late_rows,
            self.req_to_metadata_buffer_idx_allocator.available_size(),
        )
        # Kept for those that wait for a transfer of others and will then go first.
        promised = Memory(0)
        was_blocked = self._blocked
        self._blocked = None
        for decode_req, may_match in zip(candidates, matching, strict=True):
            req, place = decode_req.req, decode_req.place
            if isinstance(req.finished_reason, FINISH_ABORT) or decode_req.error is not None:
                continue
            try:
                may_match = may_match and self.radix.takes(req)
                # In the step in which it has shaken hands nobody has asked before.
                place.takes_prefix = place.takes_prefix or may_match
                coming = place.coming = line.look_again(place, now) if may_match and line.may_follow else 0
                plan = self._plan(req, req.origin_input_ids, self._found(place) if may_match else NOTHING)
            except Exception as e:
                # On all ranks: they ask the same of the same tree.
                decode_req.lose(e)
                continue
            if coming:
                promised = promised.plus(Memory(max(0, plan.soon - coming), plan.window.soon))
                continue
            if len(admitted) >= places:
                break
            if budget is None:
                budget = self._budget()
            elif taken is not None:
                budget.admit(taken, self.num_reserved_decode_tokens)
                budget.windows_kept = self._windows_kept(budget.windows_retractable, True, admitted)
                taken = None
            if not budget.covers(plan, promised):
                if was_blocked is None or was_blocked[0] != req.rid:
                    self.counters.blocked()
                self._blocked = (req.rid, plan, promised, self._asked_in())
                break
            if turns is None and len(window) > 1:
                able = [dr for dr in window if dr.waiting_for_input and dr.error is None and not _is_aborted(dr)]
                turns = Turns(line, [dr.place for dr in able])
            if turns is not None and not turns.take(place):
                break
            evicts = self.num_ranks > 1 and plan.delta > budget.available
            self._admit_one(decode_req, plan)
            admitted.append(decode_req)
            taken = plan
            if evicts:
                # What the ranks have agreed on of the next request's prefix may be gone.
                break
        if admitted and turns is not None:
            self.counters.overtaken(turns.end([dr.place for dr in admitted]))
        return admitted

    def _admit_one(self, decode_req: engine.DecodeRequest, plan: AdmissionPlan) -> None:
        """Carry out an admission. Whatever comes of it on this rank, all ranks go on as if it had come about."""
        req, place = decode_req.req, decode_req.place
        if place.following_since is not None:
            self.counters.followed(plan.found.length - place.held_alone, place.waited_s)
        # Others may follow it from now on.
        self.line.admitted(place, len(req.origin_input_ids) - plan.found.length)
        try:
            self._admit(req, req.origin_input_ids, plan)
            self._request_kv(decode_req)
        except Exception as e:
            # Maybe on this rank only. The transfer queue fails it on all, and gives back what it has got.
            decode_req.lose(e)

    def _found(self, place: Place) -> PrefixPeek:
        return NOTHING if place.watch is None else self.radix.found(place.watch)

    def _asked_in(self) -> tuple[int, ...]:
        """What must have changed for a request that did not fit to fit now, other than free memory."""
        tree = self.radix
        return tree.growth, tree.locks_taken, tree.locks_released, tree.watches.leaders, self.line.left

    def _still_blocked(self, req: Req, free: Memory, reserve: Memory) -> bool:
        """Whether a retracted request was found not to fit, and neither what is free nor the tree has changed enough.

        Costs the same for any prompt.
        """
        if self._not_resumed is None:
            return False
        rid, plan, kept, asked_in = self._not_resumed
        if rid != req.rid or asked_in != self._asked_in():
            return False
        return not free.covers(plan.needed, reserve, kept)

    def _free_or_evictable(self) -> Memory:
        """Of windows also what lies behind those of running requests; the engine frees that from time to time."""
        kv, windows = self.radix.pool.available_size() + self.radix.evictable_size(), self.radix.windows
        if windows is None:
            return Memory(kv)
        behind = sum(windows.behind(req) for req in self.running())
        return Memory(kv, windows.available_size() + behind)

    def running(self) -> list[Req]:
        """The requests that decode and have not ended."""
        return [req for req in self.scheduler.running_batch.reqs if not req.finished()]

    def coming(self) -> list[Req]:
        """The requests that hold KV, do not decode yet, and will."""
        last = self.scheduler.last_batch
        prebuilt = last.reqs if last is not None and last.forward_mode.is_prebuilt() else []
        others = [*[dr.req for dr in self.transfer_queue.queue], *self._committed(), *prebuilt]
        if not others:
            return others
        running = set(map(id, self.scheduler.running_batch.reqs))
        return [req for req in others if id(req) not in running and not req.finished()]

    def ahead(self) -> int:
        """Tokens that are reserved for the next steps of all live requests."""
        return self.num_reserved_decode_tokens * (len(self.running()) + len(self.coming()))

    def _budget(self) -> Budget:
        """What admission has to give in this state. Cost: some figures of each live request."""
        page, tree, windows = self.token_to_kv_pool_allocator.page_size, self.radix, self.radix.windows
        running, coming = self.running(), self.coming()
        # A retraction brings nothing of what others hold too, and those in quarantine do, and saves and loads.
        holders = [req.last_node for req in (*coming, *[dr.req for dr in self.transfer_queue.quarantine])]
        if self.pegaflow is not None:
            holders += self.pegaflow.nodes_in_use()
        in_tree = tree.protected_size_ - tree.held_by(holders)
        budget = Budget(self._free_or_evictable(), tree.pool.available_size(), in_tree)
        budget.count(
            [use_of(req, page, MOST_NEW_TOKENS) for req in running],
            [use_of(req, page, MOST_NEW_TOKENS) for req in coming],
        )
        budget.ahead = self.num_reserved_decode_tokens * (len(running) + len(coming))
        if self.retracted_queue:
            budget.retracted = sum(req.seqlen + self.num_reserved_decode_tokens for req in self.retracted_queue)
        if windows is not None:
            budget.windows_retractable = sum(windows.rule.held(req.kv_allocated_len) for req in running)
            budget.windows_kept = self._windows_kept(budget.windows_retractable, count_retracted=True)
        return budget

    def _windows_kept(
        self, retractable: int | None, count_retracted: bool, admitted: Sequence[engine.DecodeRequest] = ()
    ) -> int:
        """What admission must leave alone of windows: what requests will grow by, and what one can finish with.

        retractable: what retracting all that run brings; None when only the near future counts. admitted: in this step,
        before.
        """
        if self.radix.windows is None:
            return 0
        running = self.running()
        live = {id(req): req for req in (*running, *(dr.req for dr in admitted), *self.coming())}
        needs = {key: self._window_need(req, req.kv_allocated_len) for key, req in live.items()}
        kept = sum(need.soon - need.now for need in needs.values())
        if retractable is not None:
            # A request that runs can have what all that run hold, also one that is still on its way to there.
            ours = {id(req) for req in running}
            lacks = (need.at_length - (0 if key in ours else need.now) for key, need in needs.items())
            kept = max(kept, max(lacks, default=0) - retractable)
        if count_retracted:
            kept += sum(self._window_need(req, req.seqlen - 1).soon for req in self.retracted_queue)
        return kept

    def _window_need(self, req: Req, num_tokens: int) -> WindowNeed:
        """What ``req`` takes of the window pool with KV of ``num_tokens`` tokens."""
        windows = self.radix.windows
        if windows is None:
            return NO_WINDOW
        left = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
        return windows.rule.need(num_tokens, left, self.num_reserved_decode_tokens)

    def _committed(self) -> list[Req]:
        """Requests whose KV has come and that do not decode yet."""
        return [*self.transfer_queue.arrived, *self.scheduler.waiting_queue]

    def _plan(self, req: Req, token_ids: list[int], found: PrefixPeek) -> AdmissionPlan:
        """What admitting ``req`` with KV for ``token_ids`` takes, of which the tree holds ``found``."""
        page, prefix_len, num_tokens = self.token_to_kv_pool_allocator.page_size, found.length, len(token_ids)
        left = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
        # Rounded up once, over the whole sequence: a request that just fits the pool must not wait for ever.
        return AdmissionPlan(
            found=found,
            delta=pages(num_tokens, page) * page - prefix_len,
            soon=pages(num_tokens + min(left, self.num_reserved_decode_tokens), page) * page - prefix_len,
            at_length=pages(num_tokens + min(left, MOST_NEW_TOKENS), page) * page - prefix_len,
            window=self._window_need(req, num_tokens),
        )

    def _admit(self, req: Req, token_ids: list[int], plan: AdmissionPlan) -> None:
        """Lock the prefix, evict the shortfall, allocate the delta and write the request's table; or none of it."""
        allocator, pool, windows = self.radix.pool, self.req_to_token_pool, self.radix.windows
        fill_len, prefix_len = len(token_ids), plan.found.length
        parts, node = self.radix.lock_found(plan.found)
        delta = slots = None
        try:
            shortfall = plan.delta - allocator.available_size()
            if shortfall > 0:
                self.radix.evict_shortfall(shortfall)
            # The prefix ends with a page, so the rest is whole new pages, the last one used in part.
            delta = allocator.alloc_long_runs(plan.delta)
            slots = pool.alloc([req])
            if windows is not None and delta is not None:
                if plan.window.now > windows.available_size():
                    self.scheduler.running_batch.free_behind_windows()
                # The prefix ends where the window begins, or before.
                start = windows.rule.start(fill_len)
                windows.take(delta[start - prefix_len :], fill_len - start)
                req.swa_evicted_seqlen = start
            assert delta is not None and slots is not None, f"{req.rid}: admitted beyond what the pool has"
            kv_loc = torch.cat([*parts, delta])
            if prefix_len + plan.delta > fill_len:
                kv_loc = kv_loc[:fill_len]
            pool.write((req.req_pool_idx, slice(0, fill_len)), kv_loc)
        except Exception:
            if slots is not None:
                _free_row(pool, req)
            if delta is not None:
                # With its window, if it has got one.
                self.token_to_kv_pool_allocator.free(delta)
            self.radix.dec_lock_ref(node)
            raise

        # prefix_indices stays empty: to the engine, a prebuilt batch then starts at position 0 with nothing cached, so
        # it neither reads slots at an offset nor counts the prefix as prefill's hit.
        req.prefix_indices = NO_SLOTS
        req.decode_prefix_len = prefix_len
        if req.kv_generation is None:
            req.kv_generation = self.radix.generation
        req.last_node, req.cache_protected_len = node, prefix_len
        req.kv_allocated_len = req.kv_committed_len = fill_len
        req.fill_ids = req.origin_input_ids + req.output_ids
        req.set_extend_input_len(len(req.fill_ids))

    def _request_kv(self, decode_req: engine.DecodeRequest) -> None:
        """Give the request its metadata buffer and ask prefill for the delta, now or when a step in flight is over."""
        req, receiver = decode_req.req, decode_req.kv_receiver
        req.transfer_prefix_len = req.decode_prefix_len
        index = decode_req.metadata_buffer_index = self.req_to_metadata_buffer_idx_allocator.alloc()
        if not is_warmup(req):
            # A room left by the buffer's last user would read as corruption; 0 reads as not there yet. On a device, the
            # copy below waits for it, and so does what is asked for.
            room = self.metadata_buffers.bootstrap_room[index]
            room.zero_()
            receiver.metadata_room = lambda: int(room[0])
            receiver.fenced = True
        table = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        delta = table[req.decode_prefix_len : len(req.origin_input_ids)].cpu().numpy()
        page_indices = decode_req.page_indices = kv_to_page_indices(delta, self.token_to_kv_pool_allocator.page_size)
        if req.mamba_pool_idx is not None:
            # However much of the prompt decode holds: no state of a prefix is kept.
            decode_req.state_indices = [int(req.mamba_pool_idx)]
        elif self.radix.windows is not None:
            window = table[req.swa_evicted_seqlen : len(req.origin_input_ids)]
            decode_req.state_indices = self.radix.windows.pages_of(window).tolist()
        if self._late is not None and self._is_late(self._late, page_indices, decode_req.state_indices):
            self._unasked.append(decode_req)
        else:
            self._ask(decode_req)

    @staticmethod
    def _is_late(late: LateStep, page_indices: np.ndarray, state_indices: list[int] | None) -> bool:
        """Whether a step in flight may still write to what a prefill is about to be asked to write."""
        if state_indices is not None and not late.writes.isdisjoint(state_indices):
            return True
        return bool(np.isin(page_indices, late.pages.cpu()).any())

    def _ask(self, decode_req: engine.DecodeRequest) -> None:
        req, receiver, index = decode_req.req, decode_req.kv_receiver, decode_req.metadata_buffer_index
        page_indices, states = decode_req.page_indices, decode_req.state_indices
        if getattr(receiver, "peer_takes_prefix", False):
            receiver.send_metadata(page_indices, index, states, decode_prefix_len=req.decode_prefix_len)
        else:
            receiver.send_metadata(page_indices, index, states)
        req.time_stats.set_decode_transfer_queue_entry_time()

    # ---- retraction ----

    def resume_retracted_reqs(self, rids_to_check: list[str] | None = None) -> list[Req]:
        """Replaces the engine's resume, which restores everything: match again and restore what the tree lost.

        TP ranks resume the same: while one has other memory than the rest, none does.
        """
        if not self.has_radix:
            return super().resume_retracted_reqs(rids_to_check)
        resumed: list[Req] = []
        failed: list[Req] = []
        if not self.retracted_queue or not self._on_all_ranks(self._memory()):
            return resumed
        reserve = Memory(self.ahead(), self._windows_kept(None, count_retracted=False))
        for req in self.retracted_queue:
            free = self._free_or_evictable()
            if self.req_to_token_pool.available_size() <= 0 or self._still_blocked(req, free, reserve):
                break
            try:
                token_ids = (req.origin_input_ids + req.output_ids)[: req.seqlen - 1]
                shared = self.radix.shareable(token_ids)
                found = self.radix.peek(shared, req.extra_key) if self.radix.takes(req) else NOTHING
                plan = self._plan(req, token_ids, found)
            except Exception as e:
                # On all ranks: they ask the same of the same tree.
                failed.append(req)
                self._fail_resume(req, e)
                continue
            if not free.covers(plan.needed, reserve):
                self._not_resumed = (req.rid, plan, Memory(0), self._asked_in())
                break
            self._not_resumed = None
            error = self._bring_back(req, token_ids, plan)
            alike = self._on_all_ranks([error is None])
            if error is not None or not alike:
                failed.append(req)
                self._fail_resume(req, error or RuntimeError("another TP rank could not"))
                continue
            reserve = reserve.plus(Memory(self.num_reserved_decode_tokens, plan.window.soon - plan.window.now))
            resumed.append(req)
        self.retracted_queue = self.retracted_queue[len(resumed) + len(failed) :]
        return resumed

    def _bring_back(self, req: Req, token_ids: list[int], plan: AdmissionPlan) -> Exception | None:
        """Give a retracted request its KV again; returns what went wrong, maybe on this rank only."""
        try:
            self._admit(req, token_ids, plan)
            req.is_retracted = False
            req.restore_kv_cache(self.req_to_token_pool, self.token_to_kv_pool_allocator, plan.found.length)
        except Exception as e:
            return e
        return None

    def _on_all_ranks(self, figures: Sequence[int]) -> bool:
        """Whether these figures are the same on all TP ranks."""
        return self.num_ranks == 1 or are_alike(self.gloo_group, figures)

    def _memory(self) -> list[int]:
        """Figures of this rank's memory by which it decides what it can hold."""
        tree = self.radix
        windows = 0 if tree.windows is None else tree.windows.available_size()
        return [tree.pool.available_size(), windows, tree.evictable_size(), self.req_to_token_pool.available_size()]

    def _fail_resume(self, req: Req, error: Exception) -> None:
        """Abort a retracted request whose KV cannot be brought back. On all ranks, wherever the error was."""
        message = f"Request {req.rid} could not be resumed: {type(error).__name__}: {error}"
        logger.error(message, exc_info=error)
        prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
        req.is_retracted = False
        self.scheduler.stream_output([req], req.return_logprob)
        if req.req_pool_idx is not None:
            release_kv_cache(req, self.tree_cache, is_insert=False)
        req.kv_cache_cpu = req.draft_kv_cache_cpu = req.state_cpu = req.window_cpu = None


class _Writers:
    """Polls as done when no prefill can write to a failed request's pages any more."""

    def __init__(self, decode_req: DecodeRequest):
        self.decode_req = decode_req

    def poll(self) -> int:
        return KVPoll.Success if self.decode_req.writers_done() else KVPoll.Transferring


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Transfers of a decode worker with a radix cache; without the flag, every method is the engine's own."""

    def __init__(self, *args, **kwargs):
        """Adds the quarantine: failed requests whose pages and metadata buffer a prefill may still write to."""
        super().__init__(*args, **kwargs)
        self.quarantine: list[engine.DecodeRequest] = []
        # Set by the queue before this one, which is made after it.
        self.line: Line
        # What has arrived in this step, and whether that has been asked already.
        self.arrived: list[Req] = []
        self._collected = False
        if isinstance(self.tree_cache, DecodeRadixCache):
            # The engine's way through the staging buffer; receivers have their own, see delta_staging.py.
            self.enable_staging = False

    def _init_staging_handler(self, kv_manager) -> None:
        """Leaves out the engine's with a radix cache."""
        if not isinstance(self.tree_cache, DecodeRadixCache):
            super()._init_staging_handler(kv_manager)

    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Req]:
        """Replaces the engine's poll, which gives a failed request's pages away while they may still be written.

        One reduction over requests in transfer and in quarantine. rids_to_check: only used with pipeline parallelism,
        which the flag excludes.
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
        if not self.queue and not self.quarantine:
            return []
        pollers = [*self.queue, *(_Writers(dr) for dr in self.quarantine)]
        polls = poll_and_all_reduce(pollers, self.gloo_group)
        released = [
            dr for dr, poll in zip(self.quarantine, polls[len(self.queue) :], strict=True) if poll == KVPoll.Success
        ]
        self.quarantine = [dr for dr in self.quarantine if dr not in released]
        arrived: list[Req] = []
        still: list[engine.DecodeRequest] = []
        for decode_req, poll in zip(self.queue, polls, strict=False):
            if poll == KVPoll.Failed:
                self._fail(decode_req)
                (released if is_warmup(decode_req.req) else self.quarantine).append(decode_req)
            elif poll != KVPoll.Success or not self._commit_transfer_to_req(decode_req):
                still.append(decode_req)
            elif isinstance(decode_req.req.finished_reason, FINISH_ABORT):
                # Another request's metadata came into its buffer, or its own cannot be used.
                self.line.leave(decode_req.place)
                self._report_failed(decode_req.req)
                closed = decode_req.kv_receiver is None or is_warmup(decode_req.req)
                (released if closed else self.quarantine).append(decode_req)
            else:
                self.tree_cache.commit_req(decode_req.req)
                self.line.committed(decode_req.place)
                arrived.append(decode_req.req)
                self.req_to_metadata_buffer_idx_allocator.free(decode_req.metadata_buffer_index)
        for decode_req in released:
            # Not into the tree: part of it may never have been written. And an error may have come before it got any.
            if decode_req.req.req_pool_idx is not None:
                release_kv_cache(decode_req.req, self.tree_cache, is_insert=False)
            if decode_req.metadata_buffer_index != -1:
                self.req_to_metadata_buffer_idx_allocator.free(decode_req.metadata_buffer_index)
        self.queue = still
        return arrived

    def flush_around_quarantine(self, flush: Callable[[], bool]) -> bool:
        """Flush the pools of an otherwise idle worker, and keep what is in quarantine out of them.

        A weight update flushes and takes a refusal for an error that ends the scheduler, so it cannot be told to wait.
        """
        # One in whose admission something raised has nothing to keep.
        reqs = [dr.req for dr in self.quarantine if dr.req.req_pool_idx is not None]
        pool, tree = self.scheduler.req_to_token_pool, self.tree_cache
        assert isinstance(tree, DecodeRadixCache)
        allocator, windows = tree.pool, tree.windows
        page = allocator.page_size
        tables = []
        for req in reqs:
            end = pages(req.kv_allocated_len, page) * page
            table = pool.req_to_token[req.req_pool_idx, req.cache_protected_len : end].clone()
            tables.append((table, None if windows is None else windows.of(table)))
        if not flush():
            return False
        for req, (table, window) in zip(reqs, tables, strict=True):
            # Its prefix went with the tree; what is left of it is the delta, which begins a sequence of its own.
            length = req.kv_allocated_len - req.cache_protected_len
            pool.req_to_token[req.req_pool_idx, :length] = table[:length]
            pool.free_slots.remove(req.req_pool_idx)
            if req.mamba_pool_idx is not None:
                states = pool.mamba_pool
                states.free_slots = states.free_slots[states.free_slots != req.mamba_pool_idx]
                pool.req_index_to_mamba_index_mapping[req.req_pool_idx] = req.mamba_pool_idx
            allocator.free_pages = allocator.free_pages[~torch.isin(allocator.free_pages, table[:length] // page)]
            if windows is not None and window is not None:
                windows.hold(table[:length], window[:length])
                req.swa_evicted_seqlen -= req.cache_protected_len
            req.kv_allocated_len = req.kv_committed_len = length
            req.last_node, req.cache_protected_len = tree.root_node, 0
            tree.inc_lock_ref(req.last_node)
        return True

    def _fail(self, decode_req: engine.DecodeRequest) -> None:
        """Abort a request whose transfer failed here or on another rank, and ask prefill to stop writing for it."""
        req = decode_req.req
        # Of those that waited for it, the first becomes the leader of the others.
        self.line.leave(decode_req.place)
        message = (
            f"Decode transfer failed for request {req.rid} (bootstrap_room={req.bootstrap_room}){decode_req.why()}"
        )
        logger.error(message)
        prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
        decode_req.failed_at = time.monotonic()
        if not is_warmup(req):
            # Also where an error came before this rank had asked: the quarantine is the same on all ranks.
            decode_req.kv_receiver.fenced = True
            decode_req.cancel()
        self._report_failed(req)

    def _report_failed(self, req: Req) -> None:
        self.scheduler.stream_output([req], req.return_logprob)
        if self.scheduler.enable_metrics:
            self.scheduler.metrics_collector.increment_transfer_failed_reqs()

    def _commit_transfer_to_req(self, decode_req: engine.DecodeRequest) -> bool:
        """Adds to the engine's commit the counters, and what decode held to the tokens that count as cached.

        And, with the flag or without, that what a draft starts from is taken out of the metadata buffer.
        """
        req = decode_req.req
        try:
            done = super()._commit_transfer_to_req(decode_req)
        except Exception as e:
            if not isinstance(self.tree_cache, DecodeRadixCache):
                raise
            # On all ranks, which have been sent the same metadata.
            message = f"Decode commit failed for request {req.rid}: {type(e).__name__}: {e}"
            logger.error(message, exc_info=e)
            prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
            return True
        if done and req.hidden_states_tensor is not None:
            # Views of the metadata buffer. They are read when the prebuilt batch is made, which may wait for a place to
            # run, and the buffer goes to the next transfer before that.
            req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = (
                tensor.clone() for tensor in (req.output_topk_p, req.output_topk_index, req.hidden_states_tensor)
            )
        if done and not is_warmup(req) and not isinstance(req.finished_reason, FINISH_ABORT):
            counters = KvTransferCounters.get(self.scheduler.server_args)
            counters.committed(len(req.origin_input_ids), req.transfer_prefix_len or 0)
            if req.transfer_prefix_len is not None:
                # A token that either worker held was cached. They are not added: what both hold would count twice.
                req.prefill_cached_tokens = req.cached_tokens
                req.cached_tokens = min(max(req.cached_tokens, req.transfer_prefix_len), len(req.origin_input_ids))
        return done
