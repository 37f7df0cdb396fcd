"""Retracted requests resume: match again, restore from host memory only what the tree has lost.

Upstream: sgl-project/sglang#29471 (open), a resume that matches again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.admission import ABORT_INTERVAL
from sglang.srt.disaggregation.decode_radix.budget import (
    AdmissionPlan,
    Budget,
    Memory,
)
from sglang.srt.disaggregation.decode_radix.commit import abort, report_end
from sglang.srt.mem_cache.prefix_reader import NOTHING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks, Hooks
    from sglang.srt.managers.schedule_batch import Req


def joins(scheduler: Any, hooks: Hooks[DecodeHooks]) -> Callable[[Req], bool]:
    """Returns a test of retracted requests, in order: would it decode in this turn?

    All waiting requests go first. A waiting request holds KV that no retraction frees.
    """
    elsewhere = [req for reqs in hooks.reqs for req in reqs()]
    # As a set: a request may be in several of these.
    ahead = set(map(id, (*scheduler.running_batch.reqs, *scheduler.waiting_queue, *elsewhere)))
    places = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests) - len(ahead)
    tests = [joins() for joins in hooks.joins] if places > 0 else []

    def joins_now(req: Req) -> bool:
        nonlocal places
        if places <= 0 or not all(test(req) for test in tests):
            return False
        places -= 1
        return True

    return joins_now


class Resumption:
    """Resumes retracted requests, as all ranks do. A failed allocation ends the worker."""

    def __init__(self, queue: DecodePreallocQueue):
        self._queue, self._hooks = queue, queue.transfer_queue.hooks
        self._tree, self._accounts = queue.radix, queue.accounts
        # The first request that did not fit or that a limit held back, the state then, and free
        # memory; and steps since then.
        self._refused: tuple[str, tuple[int, ...], Memory] | None = None
        self._refused_for = 0

    def resume(self) -> tuple[list[Req], int]:
        """Resume the first retracted requests that fit. Returns them, and how many others failed.

        A request that would only wait must fit as in an admission: no retraction frees its KV.
        """
        retracted, version = self._queue.retracted_queue, self._queue.schedule.version
        resumed: list[Req] = []
        failed = 0
        self._refused_for += 1
        # Looks every few steps: one odd measurement must not hold it back until a request ends.
        if self._refused is not None and self._refused_for % ABORT_INTERVAL:
            *state, free = self._refused
            if state == [retracted[0].rid, version()] and not self._accounts.has_freed(free):
                return resumed, failed
        self._refused, self._refused_for = None, 0
        held_rid: str | None = None
        live = self._queue.live()
        kept = self._accounts.kept_for_resume(live)
        # Reads each running request, so only once: resumes subtract what they take.
        beside = self._accounts.free(live.running).beside
        limits = [limit(live) for limit in self._hooks.limit]
        decodes = joins(self._queue.scheduler, self._hooks)
        # What requests that do not decode at once may use, as in `DecodeAdder`.
        step: Budget | None = None
        for req in retracted:
            if self._accounts.rows.available_size() <= 0:
                break
            free = Memory(self._accounts.free(()).kv, beside)
            budget = None
            if not decodes(req):
                # Retracted requests hold no KV.
                now = live._replace(running=[*live.running, *resumed], retracted=())
                step = budget = step or self._accounts.budget(now)
            token_ids = (req.origin_input_ids + req.output_ids)[: req.seqlen - 1]
            try:
                plan = self._plan(req, token_ids)
            except Exception as e:
                # On all ranks alike: their trees are the same.
                failed += 1
                self._fail(req, e)
                continue
            fits = _fits(plan, free, kept, budget)
            if fits and not all(limit.add(plan, req, at_once=True) for limit in limits):
                fits, held_rid = False, req.rid
            if not fits:
                self._refused = req.rid, version(), self._accounts.free(())
                break
            self._accounts.give(req, token_ids, plan)
            req.is_retracted = False
            req.restore_kv_cache(
                self._accounts.rows, self._tree.token_to_kv_pool_allocator, plan.found.length
            )
            kept = kept.plus(Memory(self._accounts.reserved, plan.beside.soon - plan.beside.now))
            beside -= plan.beside.now
            if step is not None:
                # Counts as on its way to decode, which leaves slightly less.
                step.admit(plan, self._accounts.reserved)
            resumed.append(req)
        for held in self._hooks.held:
            held(held_rid, lambda: len(retracted) - len(resumed) - failed)
        return resumed, failed

    def _plan(self, req: Req, token_ids: list[int]) -> AdmissionPlan:
        found = NOTHING
        if self._tree.accepts(req):
            found = self._tree.peek(self._tree.shareable(token_ids), req.extra_key)
        return self._accounts.plan(req, token_ids, found)

    def _fail(self, req: Req, error: Exception) -> None:
        """Abort a retracted request whose KV cannot be restored. On all ranks alike."""
        message = f"Request {req.rid} could not be resumed: {type(error).__name__}: {error}"
        abort(req, message, error=error)
        req.is_retracted = False
        report_end(req, self._queue.scheduler)
        req.forget_saved_kv()


def _fits(plan: AdmissionPlan, free: Memory, kept: Memory, budget: Budget | None) -> bool:
    """Whether a retracted request may resume. budget: if it would not decode at once."""
    return free.covers(plan.needed, kept) if budget is None else budget.covers(plan, Memory(0))
