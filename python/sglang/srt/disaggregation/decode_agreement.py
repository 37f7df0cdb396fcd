"""How the TP ranks of a decode worker agree on what admission does next, in one collective per step.

Reduced by MIN: each rank's poll results, whether each peer understands a prefix, and, together with their negatives,
the figures that admission decides by. The minimum of a figure and the negated minimum of its negative are the least and
the greatest value over the ranks: where they are the same, all ranks have it. What goes by a clock the first rank
decides; the others add nothing to its word.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["CANDIDATES", "WINDOW", "Agreement", "agree", "are_alike"]

# Requests of the queue that one step looks at. A fixed width keeps the tensors of all TP ranks the same size even if
# their queues were not.
WINDOW = 256
# Requests that one step may admit where there are several ranks.
CANDIDATES = 8
SHARED_FIGURES = 8
_STATE = SHARED_FIGURES + 2 * CANDIDATES
# Of the requests of the window, that many stand in one figure, a bit each.
_BITS = 32
_WORDS = WINDOW // _BITS


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What all ranks know after the collective.

    low, high: the least and greatest of each shared figure. polls, capable (0 or 1): of each request of the window, by
    MIN. same: for each candidate, whether all ranks' trees hold the same of it. expired: the requests of the window,
    by index, that by the first rank's clock have waited long enough for what they wait for.
    """

    low: list[int]
    high: list[int]
    polls: list[int]
    capable: list[int]
    same: list[bool]
    expired: list[int]

    @property
    def in_step(self) -> bool:
        """Whether the ranks are in the same state; if not, all of them see that, and skip the step."""
        return self.low == self.high


def agree(
    group: dist.ProcessGroup,
    shared: Sequence[int],
    held: Sequence[tuple[int, int]],
    polls: Sequence[int],
    capable: Sequence[bool],
    expired: Sequence[int] = (),
) -> Agreement:
    """Reduce over ``group``.

    shared: the figures that must be the same, `SHARED_FIGURES` of them. held: two for each candidate, at most
    `CANDIDATES`. polls, capable: for each request of the window, at most `WINDOW`. expired: by this rank's clock, see
    `Agreement`. Raises ValueError for other numbers: the ranks would take one figure for another, or reduce tensors of
    different sizes.
    """
    if len(shared) != SHARED_FIGURES or len(held) > CANDIDATES or len(polls) > WINDOW:
        raise ValueError(f"{len(shared)} shared figures, {len(held)} candidates and {len(polls)} requests to agree on")
    state = [*shared, *(figure for two in held for figure in two)]
    state += [0] * (_STATE - len(state))
    pad = [0] * (WINDOW - len(polls))
    words = [0] * _WORDS
    for i in expired if dist.get_rank(group) == 0 else ():
        # Below what the others say.
        words[i // _BITS] -= 1 << i % _BITS
    mine = [*state, *(-figure for figure in state), *polls, *pad, *capable, *pad, *words]
    reduced = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    agreed = reduced.tolist()
    low, high = agreed[:_STATE], [-figure for figure in agreed[_STATE : 2 * _STATE]]
    first = 2 * _STATE
    return Agreement(
        low=low[:SHARED_FIGURES],
        high=high[:SHARED_FIGURES],
        polls=agreed[first : first + len(polls)],
        capable=agreed[first + WINDOW : first + WINDOW + len(polls)],
        same=[low[i : i + 2] == high[i : i + 2] for i in range(SHARED_FIGURES, SHARED_FIGURES + 2 * len(held), 2)],
        expired=_bits(agreed[first + 2 * WINDOW :]),
    )


def are_alike(group: dist.ProcessGroup, figures: Sequence[int]) -> bool:
    """Whether all ranks of ``group`` have the same ``figures``, as many on each. All hear the same."""
    reduced = torch.tensor([*figures, *(-figure for figure in figures)], dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    low, negated = reduced.split(len(figures))
    return bool((low == -negated).all())


def _bits(words: Sequence[int]) -> list[int]:
    return [n * _BITS + bit for n, word in enumerate(words) if word for bit in range(_BITS) if -word >> bit & 1]
