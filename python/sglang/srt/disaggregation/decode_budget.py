"""What of the KV pool admission may give away: figures of the worker in, figures out.

Every live request may grow, and one must always be able to finish: as in the engine, by retracting all others that
decode. A prefix that several share is there once, so what a request lacks to its end is counted from what it holds, and
what a retraction brings is only what nobody else holds. All figures are tokens, whole pages.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.decode_prefix import AdmissionPlan, Memory, pages

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["Budget", "Use", "use_of"]


class Use(NamedTuple):
    """What a request has of the pool. held: all of it. shared: of that, in the tree. at_length: what it will have when
    it has generated all that it may, as far as that is planned for."""

    held: int
    shared: int
    at_length: int


def use_of(req: Req, page_size: int, most_new_tokens: int) -> Use:
    """The `Use` of a request that has been admitted. most_new_tokens: of its answer, planned for."""
    most = len(req.origin_input_ids) + min(req.sampling_params.max_new_tokens, most_new_tokens)
    held = pages(req.kv_allocated_len, page_size) * page_size
    return Use(held, req.cache_protected_len, pages(most, page_size) * page_size)


@dataclasses.dataclass
class Budget:
    """What one step of admission has to give, kept up by its plans and not by what came of them.

    So TP ranks decide alike, also when one of them fails to carry a decision out.

    free: free or evictable. available: free without an eviction. in_tree: locked by requests that decode and by nobody
    else. private: theirs outside the tree. lacks: what the neediest of them lacks to its end when the others have been
    retracted; at_most: when they have not. coming: what the neediest of those on their way to decode lacks to its end.
    ahead: for the next steps of all that are live. retracted: for those that wait to come back.
    """

    free: Memory
    available: int
    in_tree: int
    private: int = 0
    lacks: int = 0
    at_most: int = 0
    coming: int = 0
    ahead: int = 0
    retracted: int = 0
    # What a retraction brings, and what must be left, of windows.
    windows_retractable: int = 0
    windows_kept: int = 0

    def count(self, running: Sequence[Use], coming: Sequence[Use]) -> None:
        """Fill in what those that decode hold and lack, and what those on their way lack."""
        if running:
            self.private = sum([use.held - use.shared for use in running])
            retractable = self.retractable
            # What a request holds itself, it need not be given.
            self.lacks = max([use.at_length - max(use.held, retractable) for use in running])
            self.at_most = max([use.at_length - use.held for use in running])
        if coming:
            self.coming = max([use.at_length - use.held for use in coming])

    @property
    def retractable(self) -> int:
        """What becomes free or evictable when all that decode are retracted; a lower bound."""
        return self._retractable(self.in_tree)

    def _retractable(self, in_tree: int) -> int:
        return self.private + max(0, in_tree)

    def _once_locked(self, plan: AdmissionPlan) -> tuple[int, int]:
        """``in_tree`` and ``lacks`` when an admission has locked what it has found.

        A retraction of the others that hold it no longer brings it.
        """
        # What others on their way hold is not in ``in_tree``, and taken off once more: a lower bound.
        locked = plan.found.length - plan.found.evictable
        if not locked:
            return self.in_tree, self.lacks
        in_tree = self.in_tree - locked
        lost = self.retractable - self._retractable(in_tree)
        return in_tree, min(self.at_most, self.lacks + lost)

    def needs(self, plan: AdmissionPlan) -> Memory:
        """What must be free or evictable for a request to be admitted, so that each live one can finish if need be."""
        in_tree, lacks = self._once_locked(plan)
        coming = max(self.coming, plan.at_length - plan.delta) - self._retractable(in_tree)
        steps = plan.soon - plan.delta + self.ahead
        kv = plan.delta + plan.found.evictable + max(steps, lacks, coming) + self.retracted
        window = plan.window
        return Memory(kv, max(window.soon, window.at_length - self.windows_retractable) + self.windows_kept)

    def covers(self, plan: AdmissionPlan, promised: Memory) -> bool:
        """Whether a request can be admitted. promised: to others, which come before it."""
        return self.free.covers(self.needs(plan), promised)

    def admit(self, plan: AdmissionPlan, ahead: int) -> None:
        """A request is admitted as planned. ahead: what is reserved for its next steps."""
        self.in_tree, self.lacks = self._once_locked(plan)
        self.coming = max(self.coming, plan.at_length - plan.delta)
        self.ahead += ahead
        self.free = Memory(self.free.kv - plan.delta - plan.found.evictable, self.free.windows - plan.window.now)
        self.available -= plan.delta
