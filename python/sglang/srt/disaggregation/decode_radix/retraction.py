"""Retracted requests come back: matched anew, and only what the tree has lost is restored from host memory.

Upstream: sgl-project/sglang#29471 (open), a resume that matches again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.admission import ABORT_INTERVAL, Blocked
from sglang.srt.disaggregation.decode_radix.budget import Accounts, AdmissionPlan, Budget, LiveReqs, Memory
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.mem_cache.prefix_reader import NOTHING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.allocation import RequestMemory
    from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks, Hooks
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["Resumption", "joins"]

logger = logging.getLogger(__name__)


def joins(scheduler: Any, hooks: Hooks[DecodeHooks]) -> Callable[[Req], bool]:
    """Asked of one retracted request after the other: whether it decodes in this turn if it comes back now.

    All that wait already go before it. Who waits holds its KV, which no retraction brings.
    """
    elsewhere = [req for reqs in hooks.reqs for req in reqs()]
    # Of these, some may run already.
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


class BudgetOfStep:
    """What a step has to give to those that come back and do not decode at once, as `DecodeAdder` has it.

    Made when it is first asked for, which takes a look at all that live, and from then on kept up by plans.
    """

    def __init__(self, accounts: Accounts, live: LiveReqs, loading: Callable[[], Iterable[TreeNode]]):
        """live: those that wait to come back are left out, for they hold nothing. loading: see `Accounts.budget`."""
        self._accounts, self._live, self._loading = accounts, live._replace(retracted=()), loading
        self._joined: list[Req] = []
        self._budget: Budget | None = None

    def now(self) -> Budget:
        """After all that has come back in this step."""
        if self._budget is None:
            live = self._live._replace(running=[*self._live.running, *self._joined])
            self._budget = self._accounts.budget(live, self._loading())
        return self._budget

    def add(self, req: Req, plan: AdmissionPlan) -> None:
        """``req`` has come back; to decode at once, if nobody has asked yet.

        One that decodes counts as on its way where the budget is there already, which is a little less to give.
        """
        if self._budget is None:
            self._joined.append(req)
        else:
            self._budget.admit(plan, self._accounts.reserved)


class Resumption:
    """Resumes retracted requests of one rank, as all others do. What raises for the memory of one ends the worker."""

    def __init__(
        self,
        tree: DecodeRadixCache,
        accounts: Accounts,
        memory: RequestMemory,
        joins: Callable[[], Callable[[Req], bool]],
        hooks: Hooks[DecodeHooks],
    ):
        """joins: see `joins`."""
        self._hooks = hooks
        self._tree, self._accounts, self._memory = tree, accounts, memory
        self._joins = joins
        # The first that did not fit; and the first that a limit held back, and when.
        self._blocked: Blocked | None = None
        self._held: tuple[str, tuple[int, ...]] | None = None
        # Steps since that was found: one odd measurement must not keep it back until somebody ends.
        self._held_for = 0

    def resume(
        self,
        retracted: Sequence[Req],
        live: LiveReqs,
        version: Callable[[], tuple[int, ...]],
        tell: Callable[[Req], None],
    ) -> tuple[list[Req], int]:
        """Bring back the first of ``retracted``, as many as fit. Returns them, and how many have failed among them.

        One that would only wait, with KV that no retraction brings, needs what an admission needs: others must be able
        to finish beside it.

        version: see `Schedule.version`. tell: tells the client of one whose KV cannot be brought back.
        """
        resumed: list[Req] = []
        failed = 0
        if not retracted:
            return resumed, failed
        self._held_for += 1
        if self._held is not None and self._held_for % ABORT_INTERVAL and self._held == (retracted[0].rid, version()):
            return resumed, failed
        self._held, self._held_for = None, 0
        kept = self._accounts.kept_for_resume(live)
        # A look at each that runs: from here on a resume takes what it needs of it.
        beside = self._accounts.free(live.running).beside
        limits = [limit(live) for limit in self._hooks.limit]
        joins, waiting = self._joins(), BudgetOfStep(self._accounts, live, self._tree.tier.nodes_in_use)
        for req in retracted:
            if self._memory.rows.available_size() <= 0:
                break
            free = Memory(self._accounts.free(()).kv, beside)
            budget = None if joins(req) else waiting
            if self._is_blocked(req, free, kept, budget, version):
                break
            token_ids = (req.origin_input_ids + req.output_ids)[: req.seqlen - 1]
            try:
                plan = self._plan(req, token_ids)
            except Exception as e:
                # On all ranks: they ask the same of the same tree.
                failed += 1
                self._fail(req, e, tell)
                continue
            if not _fits(plan, free, kept, budget):
                self._blocked = Blocked(req.rid, plan, Memory(0), version())
                break
            if not all(limit.add(plan, req, at_once=True) for limit in limits):
                self._held = req.rid, version()
                break
            self._blocked = None
            self._memory.give(req, token_ids, plan)
            req.is_retracted = False
            req.restore_kv_cache(self._memory.rows, self._tree.token_to_kv_pool_allocator, plan.found.length)
            kept = kept.plus(Memory(self._accounts.reserved, plan.beside.soon - plan.beside.now))
            beside -= plan.beside.now
            waiting.add(req, plan)
            resumed.append(req)
        for held in self._hooks.held:
            held(self._held and self._held[0], lambda: len(retracted) - len(resumed) - failed)
        return resumed, failed

    def _is_blocked(
        self, req: Req, free: Memory, kept: Memory, budget: BudgetOfStep | None, version: Callable[[], tuple[int, ...]]
    ) -> bool:
        """Whether ``req`` was found not to fit, and neither what is free nor the tree has changed enough.

        Costs the same for any prompt.
        """
        blocked = self._blocked
        if blocked is None or blocked.rid != req.rid or blocked.version != version():
            return False
        return not _fits(blocked.plan, free, kept, budget)

    def _plan(self, req: Req, token_ids: list[int]) -> AdmissionPlan:
        found = NOTHING
        if self._tree.accepts(req):
            found = self._tree.peek(self._tree.shareable(token_ids), req.extra_key)
        return self._accounts.plan(req, token_ids, found)

    def _fail(self, req: Req, error: Exception, tell: Callable[[Req], None]) -> None:
        """Abort a retracted request whose KV cannot be brought back. On all ranks."""
        message = f"Request {req.rid} could not be resumed: {type(error).__name__}: {error}"
        logger.error(message, exc_info=error)
        prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
        req.is_retracted = False
        tell(req)
        req.forget_saved_kv()


def _fits(plan: AdmissionPlan, free: Memory, kept: Memory, budget: BudgetOfStep | None) -> bool:
    """Whether a retracted request may come back. budget: of an admission, if it would not decode at once."""
    return free.covers(plan.needed, kept) if budget is None else budget.now().covers(plan, Memory(0))
