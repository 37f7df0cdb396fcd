"""How the TP ranks of a decode worker agree on an admission step, in one collective per step.

A MIN reduction of poll results, of whether each prefill accepts a prefix, and of the figures that
admission decides by. Their negatives are reduced too, which gives the maximum: if it equals the
minimum, all ranks have the figure. Of measured figures only the first rank's count.

Upstream: none is known that agrees on prefixes and admission in one reduction.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import utils as engine

# Requests that one step looks at; fixed, so that tensors have one size even if queues differ.
WINDOW = 256
# Requests whose prefixes ranks compare one by one. Others are admitted only if a digest is equal.
CANDIDATES = 8
# Consecutive steps in which TP ranks may disagree before they end.
DISAGREEMENTS = 64


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of the collective, the same on all ranks.

    polls, capable: MIN per request of the window; capable is 0 if its prefill takes no prefix, 1 if
    it does, 2 if it also lets other sources bring the delta. same: per candidate, whether all trees
    hold the same of it. alike: whether they hold the same of all requests compared. measured: the
    first rank's figures, 0 or more.
    """

    polls: list[int]
    capable: list[int]
    same: list[bool]
    alike: bool
    measured: list[int]


def are_alike(group: dist.ProcessGroup, figures: Sequence[int]) -> bool:
    """Whether all ranks of ``group`` have equal ``figures``. All pass as many and get the same."""
    reduced = torch.tensor([*figures, *(-figure for figure in figures)], dtype=torch.int64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    low, negated = reduced.split(len(figures))
    return bool((low == -negated).all())


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether there is one rank in ``group``."""
    return dist.get_world_size(group) == 1


def told_by_all(own: list[str], group: dist.ProcessGroup) -> list[list[str]]:
    """``own`` of each rank of ``group``; a collective, unless there is one rank."""
    if is_alone(group):
        return [own]
    told: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, own, group=group)
    return told


def agreed_polls(pollers: Sequence[Any], group: dist.ProcessGroup) -> list[int]:
    """The minimum over all ranks of each poll."""
    if not is_alone(group) or engine.FAILURE_PROB > 0:
        return engine.poll_and_all_reduce(pollers, group)
    # No reduction: a busy host may delay the engine's gloo thread for longer than a step takes.
    return [int(poller.poll()) for poller in pollers]


class Ranks:
    """The TP ranks of a decode worker, which take the same decisions in the same steps."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size = group, dist.get_world_size(group)
        # Consecutive steps with different states.
        self.disagreements = 0
        # The window last compared, and the digest of its bootstrap_rooms.
        self._rooms: tuple[Sequence[Any], int] = ((), 0)

    def rooms_digest(self, window: Sequence[Any], rooms: Callable[[], Sequence[int]]) -> int:
        """Digest of ``rooms``, which is called if ``window``, compared by identity, has changed."""
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
        """Reduce over all ranks; None to skip the step, on all ranks alike: their states differ.

        shared: figures that must be equal. held: two per candidate, at most `CANDIDATES`. digest:
        of the same two for more requests. polls, capable: per request of the window, at most
        `WINDOW`. measured: by the first rank, 0 or more. All ranks pass as many figures, shared and
        measured. Ends all ranks after `DISAGREEMENTS` steps, in the same one: they stay so.
        """
        state = [*shared, *(figure for two in held for figure in two)]
        state += [*[0] * (len(shared) + 2 * CANDIDATES - len(state)), digest]
        pad = [0] * (WINDOW - len(polls))
        # Negative, so that MIN takes the first rank's.
        first = dist.get_rank(self.group) == 0
        from_first = [-x for x in measured] if first else [0] * len(measured)
        mine = [*state, *(-figure for figure in state), *polls, *pad, *capable, *pad, *from_first]
        reduced = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=self.group)
        agreed, num, width = reduced.tolist(), len(shared), len(state)
        low, high = agreed[:width], [-figure for figure in agreed[width : 2 * width]]
        if not self._in_step(low[:num], high[:num]):
            return None
        of_polls, of_capable = agreed[2 * width :], agreed[2 * width + WINDOW :]
        same = [low[i : i + 2] == high[i : i + 2] for i in range(num, num + 2 * len(held), 2)]
        return Agreement(
            polls=of_polls[: len(polls)],
            capable=of_capable[: len(polls)],
            same=same,
            alike=all(same) and low[-1] == high[-1],
            measured=[-figure for figure in of_capable[WINDOW:]],
        )

    def _in_step(self, low: list[int], high: list[int]) -> bool:
        self.disagreements = 0 if low == high else self.disagreements + 1
        if self.disagreements == DISAGREEMENTS:
            raise RuntimeError(
                f"TP ranks have disagreed for {DISAGREEMENTS} steps about what decode "
                "holds (queue length, rooms, available, available for windows, evictable, "
                "retracted, order with rows and host memory: "
                f"lowest {low}, highest {high})"
            )
        return low == high
