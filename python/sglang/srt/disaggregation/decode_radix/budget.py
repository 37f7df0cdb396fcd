"""What of the KV pool admission may give away: figures of the worker in, figures out.

Every live request may grow, and one must always be able to finish: as in the engine, by retracting all others that
decode. A prefix that several share is there once, so what a request lacks to its end is counted from what it holds, and
what a retraction brings is only what nobody else holds. All figures are tokens, whole pages.

Upstream: none is known that counts a shared prefix once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.mem_cache.prefix_reader import tokens_above
from sglang.srt.mem_cache.state_kind import NO_NEED, NOTHING_KEPT, Kept, Need

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.prefix_reader import PrefixPeek
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = [
    "Accounts",
    "AdmissionPlan",
    "Budget",
    "Lengths",
    "LiveReqs",
    "Memory",
    "Uses",
    "live_reqs",
    "uses_of",
]


class Memory(NamedTuple):
    """Tokens of KV; and of the pool beside it, where there is one, see `StateKind`."""

    kv: int
    beside: int = 0

    def plus(self, other: Memory) -> Memory:
        return Memory(self.kv + other.kv, self.beside + other.beside)

    def covers(self, need: Memory, *kept: Memory) -> bool:
        """Whether this is enough for ``need`` and all that is kept for others."""
        kv, beside = self
        for other in kept:
            kv -= other.kv
            beside -= other.beside
        return kv >= need.kv and beside >= need.beside


class AdmissionPlan(NamedTuple):
    """What admitting one request takes. All figures are tokens.

    found: what the tree holds of it, good until the tree next changes. Its evictable part counts as needed, since
    locking it takes it out of reach. delta: to allocate now, whole pages. soon: needed beyond the prefix for the prompt
    and the reserved decode steps. at_length: the same for all that the request may come to. beside: the same three of
    the pool beside KV.
    """

    found: PrefixPeek
    delta: int
    soon: int
    at_length: int
    beside: Need = NO_NEED

    @property
    def needed(self) -> Memory:
        """What must be there, free or evictable, for the near future."""
        return Memory(self.soon + self.found.evictable, self.beside.soon)


class Uses(NamedTuple):
    """What requests that have been admitted have of the pool. held: of each, all of it. shared: of these, in the tree.

    at_length: what each will have when it has generated all that it may, see `Lengths.of`.
    """

    held: list[int]
    shared: int
    at_length: list[int]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """What requests come to, as far as that is planned for. All figures are tokens.

    most_new_tokens: of an answer, planned for. An extra may have them be longer: `at_end` and `lacked_at_most`.
    """

    page_size: int
    most_new_tokens: int

    def at_end(self, num_tokens: int, left: int) -> int:
        """What a request with ``num_tokens`` tokens has in the end that may generate ``left`` more; whole pages."""
        return pages(num_tokens + min(left, self.most_new_tokens), self.page_size) * self.page_size

    def of(self, req: Req) -> int:
        """The same of a request that has been admitted, which remembers it in ``kv_at_length``.

        Where its answer may be longer than is planned for, from its present length on: else it would lack nothing once
        it has come as far, and others be given what it needs.
        """
        prompt, left = len(req.origin_input_ids), req.sampling_params.max_new_tokens
        if left > self.most_new_tokens:
            # Of its last token there is no KV yet.
            done = max(0, len(req.output_ids) - 1)
            return self.at_end(prompt + done, left - done)
        req.kv_at_length = self.at_end(prompt, left)
        return req.kv_at_length

    @property
    def lacked_at_most(self) -> int:
        """By a request that has the pages of its prompt."""
        return pages(self.most_new_tokens, self.page_size) * self.page_size


def uses_of(reqs: Sequence[Req], lengths: Lengths) -> Uses:
    """The `Uses` of ``reqs``.

    Asked for all that run in each step in which somebody could be admitted, so it makes no call for each of them.
    """
    page_size = lengths.page_size
    held = [-(-req.kv_allocated_len // page_size) * page_size for req in reqs]
    at_length = [req.kv_at_length or lengths.of(req) for req in reqs]
    return Uses(held, sum([req.cache_protected_len for req in reqs]), at_length)


def lacked(uses: Uses) -> int:
    """What the neediest lacks to its end; 0 if there is none."""
    return max([most - held for held, most in zip(uses.held, uses.at_length, strict=True)], default=0)


class Running(NamedTuple):
    """What the requests that decode have and lack.

    private: theirs outside the tree. lacks: what the neediest of them lacks to its end when the others have been
    retracted; at_most: when they have not.
    """

    private: int = 0
    lacks: int = 0
    at_most: int = 0

    @classmethod
    def of(cls, uses: Uses, in_tree: int) -> Running:
        """in_tree: what a retraction of all of them brings beside what is private."""
        if not uses.held:
            return cls()
        private = sum(uses.held) - uses.shared
        retractable = private + max(0, in_tree)
        pairs = list(zip(uses.held, uses.at_length, strict=True))
        return cls(
            private,
            # What a request holds itself, it need not be given.
            max([most - (held if held > retractable else retractable) for held, most in pairs]),
            lacked(uses),
        )


@dataclasses.dataclass
class Budget:
    """What one step of admission has to give, kept up by its plans and not by what came of them.

    So TP ranks decide alike, also when one of them fails to carry a decision out.

    free: free or evictable. available: free without an eviction. in_tree: locked by requests that decode and by nobody
    else, when the step began; locked: what admissions have locked of it since. uses: of those that decode; it takes a
    look at each, and is asked when that can make a difference. lacks_at_most: no one of them lacks more to its end.
    coming: what the neediest of those on their way to decode lacks to its end. ahead: for the next steps of all that
    are live. retracted: for those that wait to come back.
    """

    free: Memory
    available: int
    in_tree: int
    uses: Callable[[], Uses]
    lacks_at_most: int
    locked: int = 0
    coming: int = 0
    ahead: int = 0
    retracted: int = 0
    # What must be left of the pool beside KV.
    beside: Kept = NOTHING_KEPT

    @cached_property
    def running(self) -> Running:
        """Those that decode, as they were when the step began: an admission changes nothing of them."""
        return Running.of(self.uses(), self.in_tree)

    @property
    def retractable(self) -> int:
        """What becomes free or evictable when all that decode are retracted; a lower bound."""
        return self._retractable(self.locked)

    def _retractable(self, locked: int) -> int:
        return self.running.private + max(0, self.in_tree - locked)

    @property
    def lacks(self) -> int:
        """What the neediest of those that decode lacks to its end when the others have been retracted."""
        return self._lacks(self.locked)

    def _lacks(self, locked: int) -> int:
        """The same with so much of the tree locked, which a retraction of others that hold it no longer brings."""
        lost = self._retractable(0) - self._retractable(locked)
        return min(self.running.at_most, self.running.lacks + lost)

    def _locked_with(self, plan: AdmissionPlan) -> int:
        """``locked`` when an admission has locked what it has found."""
        # What others on their way hold is not in ``in_tree``, and taken off once more: a lower bound.
        return self.locked + plan.found.length - plan.found.evictable

    def needs(self, plan: AdmissionPlan) -> Memory:
        """What must be free or evictable for a request to be admitted, so that each live one can finish if need be."""
        beside = plan.soon - plan.delta + self.ahead
        coming = max(self.coming, plan.at_length - plan.delta)
        # The next steps of many take more than any one of them lacks.
        if beside < max(self.lacks_at_most, coming):
            locked = self._locked_with(plan)
            beside = max(beside, self._lacks(locked), coming - self._retractable(locked))
        kv = plan.delta + plan.found.evictable + beside + self.retracted
        return Memory(kv, self.beside.with_need(plan.beside))

    def covers(self, plan: AdmissionPlan, promised: Memory) -> bool:
        """Whether a request can be admitted. promised: to others, which come before it when a transfer has ended.

        At most half of what is free is kept for them: their prefill may be stalled, and the request have another.
        """
        kept = Memory(*(min(wanted, free // 2) for wanted, free in zip(promised, self.free, strict=True)))
        return self.free.covers(self.needs(plan), kept)

    def admit(self, plan: AdmissionPlan, ahead: int) -> None:
        """A request is admitted as planned. ahead: what is reserved for its next steps."""
        self.locked = self._locked_with(plan)
        self.coming = max(self.coming, plan.at_length - plan.delta)
        self.ahead += ahead
        self.free = Memory(self.free.kv - plan.delta - plan.found.evictable, self.free.beside - plan.beside.now)
        self.available -= plan.delta
        self.beside = self.beside.plus(plan.beside)


class LiveReqs(NamedTuple):
    """The requests that hold KV, or are to get theirs back.

    running: those that decode and have not ended. coming: those that do not decode yet, and will. quarantined: those
    that have failed and whose KV a prefill may still write to. retracted: those that wait for memory to come back.
    """

    running: Sequence[Req] = ()
    coming: Sequence[Req] = ()
    quarantined: Sequence[Req] = ()
    retracted: Sequence[Req] = ()


def live_reqs(scheduler: Any, transfer_queue: Any, retracted: Sequence[Req]) -> LiveReqs:
    """The live requests of a decode worker, from its scheduler and queues."""
    batch, last = scheduler.running_batch.reqs, scheduler.last_batch
    prebuilt = last.reqs if last is not None and last.forward_mode.is_prebuilt() else []
    # Between admission and decoding: in transfer, committed in this step, committed before, in the prebuilt batch; or
    # computed here.
    coming = [dr.req for dr in transfer_queue.queue]
    coming += transfer_queue.arrived
    coming += scheduler.waiting_queue
    elsewhere = [req for reqs in transfer_queue.hooks.reqs for req in reqs()]
    if prebuilt or elsewhere:
        # Of these only, some may run already.
        running = set(map(id, batch))
        coming += [req for req in (*prebuilt, *elsewhere) if id(req) not in running]
    return LiveReqs(
        running=[req for req in batch if req.finished_reason is None],
        coming=[req for req in coming if req.finished_reason is None],
        quarantined=[dr.req for dr in transfer_queue.quarantine],
        retracted=retracted,
    )


class Accounts:
    """What requests take of the memory of one decode worker, and what it has for them."""

    def __init__(self, tree: DecodeRadixCache, reserved: int, most_new_tokens: int):
        """reserved: decode steps for which there is to be room at an admission. most_new_tokens: see `Lengths`."""
        self._tree, self._page, self.reserved = tree, tree.page_size, reserved
        self.lengths = Lengths(tree.page_size, most_new_tokens)

    def plan(self, req: Req, token_ids: Sequence[int], found: PrefixPeek) -> AdmissionPlan:
        """What admitting ``req`` with KV for ``token_ids`` takes, of which the tree holds ``found``."""
        page, prefix_len, num_tokens = self._page, found.length, len(token_ids)
        left = _tokens_left(req)
        # Rounded up once, over the whole sequence: a request that just fits the pool must not wait for ever.
        return AdmissionPlan(
            found=found,
            delta=pages(num_tokens, page) * page - prefix_len,
            soon=pages(num_tokens + min(left, self.reserved), page) * page - prefix_len,
            at_length=self.lengths.at_end(num_tokens, left) - prefix_len,
            beside=self._tree.state.need(req, num_tokens, self.reserved),
        )

    def kept_for(self, req: Req, held: int) -> Memory:
        """What ``req`` needs soon when the tree holds so many tokens of its prompt; see `plan`."""
        num_tokens = len(req.origin_input_ids)
        soon = pages(num_tokens + min(_tokens_left(req), self.reserved), self._page) * self._page
        return Memory(max(0, soon - held), self._tree.state.need(req, num_tokens, self.reserved).soon)

    def free(self, running: Iterable[Req]) -> Memory:
        """What is free or evictable, and beside KV what ``running`` requests can let go of."""
        tree = self._tree
        return Memory(tree.pool.available_size() + tree.evictable_size(), tree.state.available(running))

    def ahead(self, live: LiveReqs) -> int:
        """Tokens that are reserved for the next steps of all live requests."""
        return self.reserved * (len(live.running) + len(live.coming))

    def budget(self, live: LiveReqs, loading: Iterable[TreeNode] = ()) -> Budget:
        """What admission has to give in this state. Cost: some figures of each request on its way to decode.

        loading: nodes of the tree that are locked for loads and saves.
        """
        tree, lengths, running, coming = self._tree, self.lengths, live.running, live.coming
        # A retraction brings nothing of what others hold too, and those in quarantine do, and saves and loads.
        holders = [*[req.last_node for req in (*coming, *live.quarantined)], *loading]
        in_tree = tree.protected_size_ - tokens_above(holders)
        budget = Budget(
            self.free(running),
            tree.pool.available_size(),
            in_tree,
            lambda: uses_of(running, lengths),
            # Who decodes has the pages of its prompt at least.
            lengths.lacked_at_most,
            coming=lacked(uses_of(coming, lengths)),
            ahead=self.ahead(live),
        )
        if live.retracted:
            budget.retracted = sum(req.seqlen + self.reserved for req in live.retracted)
        budget.beside = tree.state.kept(live, self.reserved)
        return budget

    def kept_for_resume(self, live: LiveReqs) -> Memory:
        """What a retracted request that comes back must leave alone."""
        return Memory(self.ahead(live), self._tree.state.kept(live, self.reserved).growth)


def _tokens_left(req: Req) -> int:
    """Tokens that a request may still generate."""
    return max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
