"""How the TP ranks of a decode worker agree on what admission does next, in one collective per
step.

Reduced by MIN: each rank's poll results, whether each peer understands a prefix, and, together with
their negatives, the figures that admission decides by. The minimum of a figure and the negated
minimum of its negative are the least and the greatest value over the ranks: where they are the
same, all ranks have it. What is measured the first rank decides; the others add nothing to its
word.

Upstream: none is known that agrees on prefixes and admission in one reduction.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import utils as engine

__all__ = ["CANDIDATES", "WINDOW", "Agreement", "RankState", "Ranks", "agree", "are_alike"]

# Requests of the queue that one step looks at. A fixed width keeps the tensors of all TP ranks the
# same size even if their queues were not.
WINDOW = 256
# Requests of which ranks compare one by one what their trees hold: a step admits no others, unless
# it compares more.
CANDIDATES = 8
SHARED_FIGURES = 7
_STATE = SHARED_FIGURES + 2 * CANDIDATES + 1
# Steps in a row that TP ranks may disagree before they end.
DISAGREEMENTS = 64


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What all ranks know after the collective.

    low, high: the least and greatest of each shared figure. polls, capable (0: its prefill takes no
    prefix, 1: it does,
    2: and lets others bring its delta): of each request of the window, by MIN. same: for each
    candidate, whether all ranks' trees hold the same of it; alike: whether all that was compared is
    the same. measured: figures of 0 or more of the first rank.
    """

    low: list[int]
    high: list[int]
    polls: list[int]
    capable: list[int]
    same: list[bool]
    alike: bool
    measured: list[int] = dataclasses.field(default_factory=list)

    @property
    def in_step(self) -> bool:
        """Whether the ranks are in the same state; if not, all of them see that, and skip the
        step.
        """
        return self.low == self.high


def agree(
    group: dist.ProcessGroup,
    shared: Sequence[int],
    held: Sequence[tuple[int, int]],
    polls: Sequence[int],
    capable: Sequence[int],
    measured: Sequence[int] = (),
    digest: int = 0,
) -> Agreement:
    """Reduce over ``group``.

    shared: the figures that must be the same, `SHARED_FIGURES` of them. held: two for each
    candidate, at most `CANDIDATES`; digest: of the same two of more. polls, capable: for each
    request of the window, at most `WINDOW`.
    measured: by the first rank, as many figures of 0 or more on each. Raises ValueError for other
    numbers: the ranks would take one figure for another, or reduce tensors of different sizes.
    """
    if len(shared) != SHARED_FIGURES or len(held) > CANDIDATES or len(polls) > WINDOW:
        raise ValueError(
            f"{len(shared)} shared figures, {len(held)} candidates and {len(polls)} requests to agree on"
        )
    state = [*shared, *(figure for two in held for figure in two)]
    state += [0] * (_STATE - 1 - len(state))
    state.append(digest)
    pad = [0] * (WINDOW - len(polls))
    # Below what the others say.
    from_first = (
        [-figure for figure in measured] if dist.get_rank(group) == 0 else [0] * len(measured)
    )
    mine = [*state, *(-figure for figure in state), *polls, *pad, *capable, *pad, *from_first]
    reduced = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    agreed = reduced.tolist()
    low, high = agreed[:_STATE], [-figure for figure in agreed[_STATE : 2 * _STATE]]
    first = 2 * _STATE
    same = [
        low[i : i + 2] == high[i : i + 2]
        for i in range(SHARED_FIGURES, SHARED_FIGURES + 2 * len(held), 2)
    ]
    return Agreement(
        low=low[:SHARED_FIGURES],
        high=high[:SHARED_FIGURES],
        polls=agreed[first : first + len(polls)],
        capable=agreed[first + WINDOW : first + WINDOW + len(polls)],
        same=same,
        alike=all(same) and low[-1] == high[-1],
        measured=[-figure for figure in agreed[first + 2 * WINDOW :]],
    )


def are_alike(group: dist.ProcessGroup, figures: Sequence[int]) -> bool:
    """Whether all ranks of ``group`` have the same ``figures``, as many on each. All hear the
    same.
    """
    reduced = torch.tensor([*figures, *(-figure for figure in figures)], dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    low, negated = reduced.split(len(figures))
    return bool((low == -negated).all())


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether there is one rank in ``group``."""
    return dist.get_world_size(group) == 1


def told_by_all(own: list[str], group: dist.ProcessGroup) -> list[list[str]]:
    """What each rank of ``group`` says; a collective, but for a rank alone."""
    if is_alone(group):
        return [own]
    told: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, own, group=group)
    return told


def agreed_polls(pollers: Sequence[Any], group: dist.ProcessGroup) -> list[int]:
    """What each poller says, the least of all ranks.

    One rank alone has nobody to ask. The engine's reduction would still wait for a thread of
    gloo's, which a busy host gives no core for longer than a step takes.
    """
    if not is_alone(group) or engine.FAILURE_PROB > 0:
        return engine.poll_and_all_reduce(pollers, group)
    return [int(poller.poll()) for poller in pollers]


class RankState(NamedTuple):
    """What must be the same on all ranks for them to decide alike.

    queued, retracted: lengths of the queues. memory: KV, beside, evictable, rows, and figures of
    host memory, if there is any. buffers: for metadata. order: of the candidates, and what else it
    goes by.
    """

    queued: int
    retracted: int
    memory: Sequence[int]
    buffers: int
    order: str

    def figures(self, rooms: int) -> list[int]:
        """These as `SHARED_FIGURES` figures. rooms: a digest of the rooms of the window."""
        available, beside, evictable, rows, *host = self.memory
        order = zlib.crc32(f"{self.order};{rows};{self.buffers};{host}".encode())
        return [self.queued, rooms, available, beside, evictable, self.retracted, order]


class Ranks:
    """The TP ranks of a decode worker, which take the same decisions in the same steps."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size = group, dist.get_world_size(group)
        # Steps in a row in which they were not in the same state.
        self.disagreements = 0
        # Of the window when the ranks last compared it, a digest of its rooms.
        self._rooms: tuple[Sequence[Any], int] = ((), 0)

    def are_alike(self, figures: Sequence[int]) -> bool:
        """Whether these figures are the same on all ranks."""
        return self.size == 1 or are_alike(self.group, figures)

    def rooms_digest(self, window: Sequence[Any], rooms: Callable[[], Sequence[int]]) -> int:
        """A digest of the rooms of ``window``, which is compared by identity; ``rooms`` is asked if
        it has changed.
        """
        if self._rooms[0] != window:
            self._rooms = window, zlib.crc32(",".join(map(str, rooms())).encode())
        return self._rooms[1]

    def agree(
        self,
        shared: Sequence[int],
        held: Sequence[tuple[int, int]],
        polls: Sequence[int],
        capable: Sequence[int],
        measured: Sequence[int] = (),
        digest: int = 0,
    ) -> Agreement | None:
        """As `agree`; None to skip the step, on all ranks alike."""
        told = agree(self.group, shared, held, polls, capable, measured, digest)
        if told.in_step:
            self.disagreements = 0
            return told
        self._note_disagreement(told)
        return None

    def _note_disagreement(self, told: Agreement) -> None:
        """Ranks that are in other states for long never come together: all of them end, in the same
        step.
        """
        self.disagreements += 1
        if self.disagreements == DISAGREEMENTS:
            raise RuntimeError(
                f"TP ranks have disagreed for {DISAGREEMENTS} steps about what decode holds (queue length, rooms, "
                "available, available for windows, evictable, retracted, order with rows and host memory: "
                f"lowest {told.low}, highest {told.high})"
            )
