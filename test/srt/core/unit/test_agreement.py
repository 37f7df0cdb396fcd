"""What TP ranks agree on, figure by figure: two ranks that are threads here and meet in the one collective.

With processes and the worker around it: `test_ranks_decide.py`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decode_world import World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix import tp_agreement
from sglang.srt.disaggregation.decode_radix.tp_agreement import CANDIDATES, WINDOW, are_alike
from test_traps import serve_to_end, tokens


def agree(group: str, *figures: Any) -> Any:
    return tp_agreement.Ranks(group).agree(*figures)  # type: ignore[arg-type]


SHARED = [7, 2**40, 0, 3, 1, 0, 9]


class Ranks:
    """Two threads, a process group of their own, and what each gave to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._rank = threading.local()
        self.given: dict[int, torch.Tensor] = {}
        here = SimpleNamespace(
            all_reduce=self._all_reduce, get_rank=lambda group: self._rank.number, get_world_size=lambda group: 2
        )
        monkeypatch.setattr(tp_agreement, "dist", SimpleNamespace(**vars(here), ReduceOp=dist.ReduceOp))

    def _all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MIN and group == "group"
        self.given[self._rank.number] = tensor.clone()
        self._barrier.wait()
        assert self.given[0].shape == self.given[1].shape
        tensor.copy_(torch.minimum(self.given[0], self.given[1]))
        self._barrier.wait()

    def run(self, what: Any, *args: tuple) -> list[Any]:
        """What each rank is answered to its arguments."""

        def one(rank: int) -> Any:
            self._rank.number = rank
            return what("group", *args[rank])

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def test_ranks_that_are_alike_are_in_step(ranks):
    told = ranks.run(agree, *[(SHARED, [(5, 6), (0, 0)], [2, 4, 1], [True, True, False])] * 2)
    assert told[0] == told[1]
    assert told[0] is not None
    assert told[0].polls == [2, 4, 1] and told[0].capable == [1, 1, 0]
    assert told[0].same == [True, True] and told[0].alike and told[0].measured == []


@pytest.mark.parametrize("which", range(len(SHARED)))
@pytest.mark.parametrize("by", [1, -1])
def test_a_figure_that_differs_is_seen_by_both(ranks, which, by):
    other = [*SHARED]
    other[which] += by
    assert ranks.run(agree, (SHARED, [], [], []), (other, [], [], [])) == [None, None]


def test_the_least_poll_counts_and_who_knows_no_prefix(ranks):
    told = ranks.run(agree, (SHARED, [], [2, 4, 3], [True, True, False]), (SHARED, [], [2, 1, 4], [True, False, True]))
    assert told[0] == told[1]
    assert told[0].polls == [2, 1, 3] and told[0].capable == [1, 0, 0]


@pytest.mark.parametrize("which", [0, 1, CANDIDATES - 1])
@pytest.mark.parametrize("half", [0, 1])
def test_what_the_trees_hold_is_compared_for_each_candidate(ranks, which, half):
    held = [(16 * n, n) for n in range(CANDIDATES)]
    other = [*held]
    other[which] = (held[which][0] + (half == 0), held[which][1] + (half == 1))
    told = ranks.run(agree, (SHARED, held, [], []), (SHARED, other, [], []))
    assert told[0] == told[1]
    assert told[0].same == [n != which for n in range(CANDIDATES)] and not told[0].alike


def test_a_full_window_is_told_apart(ranks):
    polls = [n % 5 for n in range(WINDOW)]
    capable = [n % 3 == 0 for n in range(WINDOW)]
    first = [0, 31, 2**62, WINDOW - 1]
    mine = (SHARED, [(1, 2)] * CANDIDATES, polls, capable, first)
    # What the second rank has measured counts for nothing.
    theirs = (SHARED, [(1, 2)] * CANDIDATES, polls, capable, [5, 40, 2**63 - 1, 0])
    for one in ranks.run(agree, mine, theirs):
        assert one.polls == polls and one.capable == capable and one.same == [True] * CANDIDATES
        assert one.measured == first


def test_ranks_with_queues_of_different_lengths_give_tensors_of_one_size(ranks):
    told = ranks.run(agree, (SHARED, [(1, 1)], [2] * 9, [True] * 9), (SHARED, [], [2], [True]))
    assert told[0].polls == [2] + [0] * 8, "the other rank has no more"
    assert told[1].polls == [2]


def test_what_differs_beside_the_candidates_is_seen_by_both(ranks):
    told = ranks.run(agree, (SHARED, [(1, 1)], [], [], [], 5), (SHARED, [(1, 1)], [], [], [], 6))
    assert all(one.same == [True] and not one.alike for one in told)


def test_figures_are_alike_or_not(ranks):
    assert ranks.run(are_alike, ([1, 2, 3],), ([1, 2, 3],)) == [True, True]
    assert ranks.run(are_alike, ([1, 2, 3],), ([1, 2, 4],)) == [False, False]
    assert ranks.run(are_alike, ([9, -2],), ([8, -2],)) == [False, False]


def test_one_rank_alone_reduces_nothing(monkeypatch):
    """Each reduction waits for a thread of gloo's: on a busy host that took up to 1.6 s in the middle of a step."""
    world = World(size=256)
    assert world.queue.ranks.size == 1
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: pytest.fail("there is nobody to reduce with"))
    serve_to_end(world, tokens(1, 40))
    assert serve_to_end(world, tokens(1, 40)).decode_prefix_len > 0
    failing = world.arrive(tokens(2, 40))
    world.handshake(failing)
    world.step()
    failing.kv_receiver.state = KVPoll.Failed
    world.step()
    assert not world.transfer.queue
    world.check()
