"""Whether decode's trees were hit: what the answers say that they held of their prompts, against what the requests
make possible.

Each whole answer names the decode worker that it is from, so what that worker had been sent before is known. A page of
a prompt could not be missed if a request with the same beginning was answered by the same worker, after the last event
that may empty its tree and before this request was sent, and so recently that what it was sent since then and what is
under way fits beside it. The least hits possible are these; a worker with less than ``SHARE`` of them has not used its
tree.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_pd_radix.tools.bench import least

from .traffic import Ask, Told

# Of the least hits possible: pages of requests that went away unanswered are not known, and take room too.
SHARE = 0.8
# Tokens of possible hits from which on there is something to judge.
ENOUGH = 500


@dataclass(frozen=True)
class Hits:
    """Of one decode worker, tokens: of the prompts that it has answered, of these held by its tree, and the least that
    could be held."""

    worker: str
    answered: int
    prompts: int
    held: int
    possible: int

    def __str__(self) -> str:
        part = self.held / self.prompts if self.prompts else 0.0
        of_least = f"; {self.possible} could not be missed" if self.possible else ""
        return (
            f"{self.worker}: {self.answered} answers, {self.held} of {self.prompts} tokens ({part:.0%}) held{of_least}"
        )


def judge(
    told: Sequence[Told], asks: Sequence[Ask], workers: Sequence[str], room: int, page: int,
    emptied: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> list[Hits]:  # fmt: skip
    """One for each of ``workers``.

    room: tokens of KV that a worker has beside what can be under way at a time. emptied: by worker, from when to when
    its tree may have been emptied, on the clock of ``told``.
    """
    index = least.PageIndex(page)
    pages = [index.pages(ask.ids) for ask in asks]
    found = []
    for worker in workers:
        own = [one for one in told if one.ended_how == "whole" and one.worker == worker]
        spans = sorted((emptied or {}).get(worker, ()))
        possible = _possible(own, pages, room, page, spans)
        prompts, held = sum(len(asks[one.ask].ids) for one in own), sum(one.hit or 0 for one in own)
        found.append(Hits(worker, len(own), prompts, held, possible))
    return found


def _possible(
    own: Sequence[Told], pages: Sequence[Sequence[int]], room: int, page: int, emptied: Sequence[tuple[float, float]]
) -> int:
    """Tokens that one worker could not miss, of the answers ``own``."""
    tree = _Tree(room // page)
    waiting = sorted(own, key=lambda one: one.ended_s)
    total, done, since = 0, 0, -math.inf
    for one in sorted(own, key=lambda one: one.began_s):
        # The last event that had begun when this was answered; what it overlaps with is not known.
        last = max((end for begin, end in emptied if begin <= one.ended_s), default=-math.inf)
        if last > since:
            since, tree = last, _Tree(room // page)
        while done < len(waiting) and waiting[done].ended_s <= one.began_s:
            if waiting[done].began_s >= since:
                tree.touch(_pages(waiting[done], pages))
            done += 1
        if one.began_s >= since:
            total += page * tree.held(_pages(one, pages))
    return total


def _pages(one: Told, pages: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    """Of its prompt; those of another key are other pages."""
    return [(one.key, number) for number in pages[one.ask]]


@dataclass
class _Tree:
    """The pages that a worker was sent last, as many as fit."""

    room: int
    last: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)

    def touch(self, pages: Sequence[tuple[str, int]]) -> None:
        for number in reversed(pages):
            # The first pages of a prompt are the last to go.
            self.last[number] = None
            self.last.move_to_end(number)
        while len(self.last) > self.room:
            self.last.popitem(last=False)

    def held(self, pages: Sequence[tuple[str, int]]) -> int:
        """How many of the first ``pages`` it has."""
        return next((i for i, number in enumerate(pages) if number not in self.last), len(pages))


def problems(when: str, found: Sequence[Hits]) -> list[str]:
    """Workers that have not used their tree ``when``."""
    return [
        f"{when}: the tree of {one.worker} held {one.held} tokens of its prompts, and {one.possible} could not be "
        f"missed"
        for one in found
        if one.possible >= ENOUGH and one.held < SHARE * one.possible
    ]


def not_judged(when: str, found: Sequence[Hits]) -> list[str]:
    """Workers of which too little was asked twice."""
    return [
        f"{when}: whether the tree of {one.worker} is used: {one.possible} tokens of its prompts could not be missed, "
        f"and {ENOUGH} are needed"
        for one in found
        if one.possible < ENOUGH
    ]
