"""KV memory that admission may use, computed from figures of the worker: tokens, whole pages.

Live requests grow, and each must be able to finish: as in the engine, by retracting all others that
decode. A shared prefix is stored once. So a request's missing part is counted from what it holds,
and a retraction frees only what no other request holds.

Upstream: none is known that counts a shared prefix once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.mem_cache.prefix_reader import tokens_above
from sglang.srt.mem_cache.state_kind import NO_NEED, NOTHING_KEPT, Kept, Need

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.prefix_reader import PrefixPeek


# Never written to.
NO_SLOTS = torch.empty((0,), dtype=torch.int64)


class Memory(NamedTuple):
    """Tokens of KV, and of the pool beside it, if there is one; see `StateKind`."""

    kv: int
    beside: int = 0

    def plus(self, other: Memory) -> Memory:
        return Memory(self.kv + other.kv, self.beside + other.beside)

    def covers(self, need: Memory, *kept: Memory) -> bool:
        """Whether this is enough for ``need`` plus all of ``kept``."""
        kv, beside = self
        for other in kept:
            kv -= other.kv
            beside -= other.beside
        return kv >= need.kv and beside >= need.beside


class AdmissionPlan(NamedTuple):
    """Tokens that admitting one request takes.

    found: prefix in the tree, valid until the tree changes. Its evictable part counts as needed, as
    a lock makes it unevictable. delta: to allocate now, whole pages. soon: beyond the prefix, for
    the prompt and the reserved decode steps. at_length: beyond the prefix, for its full length.
    beside: the same three for the pool beside KV.
    """

    found: PrefixPeek
    delta: int
    soon: int
    at_length: int
    beside: Need = NO_NEED

    @property
    def needed(self) -> Memory:
        """What must be free or evictable for the near future."""
        return Memory(self.soon + self.found.evictable, self.beside.soon)


class Uses(NamedTuple):
    """Tokens of admitted requests.

    held: by each. private: of all, outside the tree. at_length: of each, at its full length; see
    `Lengths.of`.
    """

    held: list[int]
    private: int
    at_length: list[int]

    def lacks(self, retractable: int = 0) -> int:
        """What the neediest lacks to its end, if retracting all frees ``retractable``."""
        pairs = zip(self.held, self.at_length, strict=True)
        # A request is not given what it holds.
        return max(
            [end - (held if held > retractable else retractable) for held, end in pairs], default=0
        )


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens that requests are planned to reach.

    most_new_tokens: of an answer. An extra plans for more by `at_end` and `lacked_at_most`.
    """

    page_size: int
    most_new_tokens: int

    def at_end(self, num_tokens: int, left: int) -> int:
        """Final tokens, whole pages, of a request that may generate ``left`` more."""
        return pages(num_tokens + min(left, self.most_new_tokens), self.page_size) * self.page_size

    def of(self, req: Req) -> int:
        """`at_end` of an admitted request, stored in its ``kv_at_length``.

        If the answer may exceed the plan, it counts from its present length and is not stored: else
        the request would lack nothing at the planned length, and others would get what it needs.
        """
        prompt, left = len(req.origin_input_ids), req.sampling_params.max_new_tokens
        if left > self.most_new_tokens:
            # The last token has no KV yet.
            done = max(0, len(req.output_ids) - 1)
            return self.at_end(prompt + done, left - done)
        req.kv_at_length = self.at_end(prompt, left)
        return req.kv_at_length

    @property
    def lacked_at_most(self) -> int:
        """The most that a request with the pages of its prompt lacks."""
        return pages(self.most_new_tokens, self.page_size) * self.page_size


def uses_of(reqs: Sequence[Req], lengths: Lengths) -> Uses:
    """The `Uses` of ``reqs``: often all running requests, so without a call for each."""
    page_size = lengths.page_size
    held = [-(-req.kv_allocated_len // page_size) * page_size for req in reqs]
    private = sum(held) - sum([req.cache_protected_len for req in reqs])
    return Uses(held, private, [req.kv_at_length or lengths.of(req) for req in reqs])


@dataclasses.dataclass
class Budget:
    """What one admission step may use.

    Plans update it, not outcomes: TP ranks decide alike even if one fails to carry out a plan.

    free: free or evictable. available: free without an eviction. in_tree: locked only by running
    requests when the step began. locked: locked of it since, by admissions. uses: of running
    requests; reads each, so called only if needed. lacks_at_most: no running request lacks more.
    coming: what the neediest request on its way to decode lacks. ahead: for the next steps of all
    live requests. retracted: for requests that wait to be resumed.
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
    # Reserved of the pool beside KV.
    beside: Kept = NOTHING_KEPT

    @cached_property
    def running(self) -> Uses:
        """The running requests when the step began; admissions do not change them."""
        return self.uses()

    def retractable(self, locked: int) -> int:
        """What retracting all running requests frees; a lower bound. locked: see above."""
        return self.running.private + max(0, self.in_tree - locked)

    def _locked_with(self, plan: AdmissionPlan) -> int:
        """``locked`` after an admission has locked its prefix."""
        # ``in_tree`` lacks what requests on their way hold, yet it is subtracted: a lower bound.
        return self.locked + plan.found.length - plan.found.evictable

    def needs(self, plan: AdmissionPlan) -> Memory:
        """What must be free or evictable to admit a request and let each live request finish."""
        beside = plan.soon - plan.delta + self.ahead
        coming = max(self.coming, plan.at_length - plan.delta)
        # With many requests, their next steps take more than any one lacks.
        if beside < max(self.lacks_at_most, coming):
            retractable = self.retractable(self._locked_with(plan))
            beside = max(beside, self.running.lacks(retractable), coming - retractable)
        kv = plan.delta + plan.found.evictable + beside + self.retracted
        return Memory(kv, self.beside.with_need(plan.beside))

    def covers(self, plan: AdmissionPlan, promised: Memory) -> bool:
        """Whether a request can be admitted. promised: to others, which go first after a transfer.

        At most half of what is free is kept for them: their prefill may be stalled.
        """
        kept = Memory(
            *(min(wanted, free // 2) for wanted, free in zip(promised, self.free, strict=True))
        )
        return self.free.covers(self.needs(plan), kept)

    def admit(self, plan: AdmissionPlan, ahead: int) -> None:
        """Account for an admission. ahead: tokens reserved for its next steps."""
        self.locked = self._locked_with(plan)
        self.coming = max(self.coming, plan.at_length - plan.delta)
        self.ahead += ahead
        self.free = Memory(
            self.free.kv - plan.delta - plan.found.evictable, self.free.beside - plan.beside.now
        )
        self.available -= plan.delta
        self.beside = self.beside.plus(plan.beside)


class LiveReqs(NamedTuple):
    """The requests that hold KV or wait to be resumed.

    running: decode, not ended. coming: will decode. quarantined: failed, but a prefill may still
    write to their KV. retracted: wait to be resumed.
    """

    running: Sequence[Req] = ()
    coming: Sequence[Req] = ()
    quarantined: Sequence[Req] = ()
    retracted: Sequence[Req] = ()


def live_reqs(scheduler: Any, transfer_queue: Any, retracted: Sequence[Req]) -> LiveReqs:
    """The live requests of a decode worker."""
    batch, last = scheduler.running_batch.reqs, scheduler.last_batch
    prebuilt = last.reqs if last is not None and last.forward_mode.is_prebuilt() else []
    # In transfer, committed now, committed before, in the prebuilt batch, and in extras.
    coming = [dr.req for dr in transfer_queue.queue]
    coming += transfer_queue.arrived
    coming += scheduler.waiting_queue
    elsewhere = [req for reqs in transfer_queue.hooks.reqs for req in reqs()]
    if prebuilt or elsewhere:
        # Only these may be in the running batch too.
        running = set(map(id, batch))
        coming += [req for req in (*prebuilt, *elsewhere) if id(req) not in running]
    return LiveReqs(
        running=[req for req in batch if req.finished_reason is None],
        coming=[req for req in coming if req.finished_reason is None],
        quarantined=[dr.req for dr in transfer_queue.quarantine],
        retracted=retracted,
    )


class Accounts:
    """The memory of one decode rank: what requests need of it, what is there, and who gets it."""

    def __init__(self, tree: DecodeRadixCache, rows: Any, reserved: int, most_new_tokens: int):
        """rows: the req_to_token pool. reserved: decode steps that an admission reserves.

        most_new_tokens: see `Lengths`.
        """
        self._tree, self._page, self.rows, self.reserved = tree, tree.page_size, rows, reserved
        self.lengths = Lengths(tree.page_size, most_new_tokens)

    def figures(self) -> list[int]:
        """This rank's KV, pool beside it, evictable tokens, req_to_token slots, and the tier's."""
        tree = self._tree
        return [
            tree.pool.available_size(),
            tree.state.available(),
            tree.evictable_size(),
            self.rows.available_size(),
            *tree.tier.figures(),
        ]

    def plan(self, req: Req, token_ids: Sequence[int], found: PrefixPeek) -> AdmissionPlan:
        """What it takes to admit ``req`` with KV for ``token_ids``; the tree holds ``found``."""
        page, prefix_len, num_tokens = self._page, found.length, len(token_ids)
        left = _tokens_left(req)
        # Rounded up once, over all: else a request that just fits the pool would wait forever.
        return AdmissionPlan(
            found=found,
            delta=pages(num_tokens, page) * page - prefix_len,
            soon=pages(num_tokens + min(left, self.reserved), page) * page - prefix_len,
            at_length=self.lengths.at_end(num_tokens, left) - prefix_len,
            beside=self._tree.state.need(req, num_tokens, self.reserved),
        )

    def free(self, running: Iterable[Req]) -> Memory:
        """What is free or evictable; beside KV, also what ``running`` requests can release."""
        tree = self._tree
        return Memory(
            tree.pool.available_size() + tree.evictable_size(), tree.state.available(running)
        )

    def has_freed(self, free: Memory) -> bool:
        """Whether there may be more memory than ``free``; if not, what did not fit does not fit.

        What running requests lack shrinks at most as much as free memory. Always True with a second
        pool.
        """
        return self._tree.state.has_pool or self.free(()).kv > free.kv

    def ahead(self, live: LiveReqs) -> int:
        return self.reserved * (len(live.running) + len(live.coming))

    def budget(self, live: LiveReqs) -> Budget:
        """What admission may use in this state. Cost: a few figures of each request on its way."""
        tree, lengths, running, coming = self._tree, self.lengths, live.running, live.coming
        # Retraction does not free what these hold too.
        holders = [req.last_node for req in (*coming, *live.quarantined)]
        holders += tree.tier.nodes_in_use()
        in_tree = tree.protected_size_ - tokens_above(holders)
        budget = Budget(
            self.free(running),
            tree.pool.available_size(),
            in_tree,
            lambda: uses_of(running, lengths),
            # Running requests hold at least the pages of their prompts.
            lengths.lacked_at_most,
            coming=uses_of(coming, lengths).lacks(),
            ahead=self.ahead(live),
        )
        if live.retracted:
            budget.retracted = sum(req.seqlen + self.reserved for req in live.retracted)
        budget.beside = tree.state.kept(live, self.reserved)
        return budget

    def kept_for_resume(self, live: LiveReqs) -> Memory:
        """What a resume must leave to live requests."""
        return Memory(self.ahead(live), self._tree.state.kept(live, self.reserved).growth)

    def give(self, req: Req, token_ids: Sequence[int], plan: AdmissionPlan) -> None:
        """Lock the prefix, evict the shortfall, allocate the delta, write the req_to_token slot.

        An exception ends the worker: the plan was to fit, and other TP ranks go on as if it had.
        """
        tree, rows, num_tokens = self._tree, self.rows, len(token_ids)
        parts, req.last_node = tree.lock_prefix(plan.found)
        shortfall = plan.delta - tree.pool.available_size()
        if shortfall > 0:
            tree.evict_shortfall(shortfall)
        # The prefix ends with a page, so the delta is whole pages, the last one partly used.
        delta = tree.alloc_delta(plan.delta)
        if delta is None or rows.alloc([req]) is None:
            raise RuntimeError(f"{req.rid}: admitted beyond what the pool has")
        tree.state.take(req, num_tokens, plan, delta)
        rows.write(
            (req.req_pool_idx, slice(0, num_tokens)), torch.cat([*parts, delta])[:num_tokens]
        )
        # Empty: the engine then starts the prebuilt batch at position 0 with nothing cached. It
        # reads no slots at an offset, and does not count the prefix as a hit of prefill.
        req.prefix_indices = NO_SLOTS
        req.decode_prefix_len = req.cache_protected_len = plan.found.length
        if req.kv_generation is None:
            req.kv_generation = tree.generation
        req.kv_allocated_len = req.kv_committed_len = num_tokens


def _tokens_left(req: Req) -> int:
    """Tokens that a request may still generate."""
    return max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
