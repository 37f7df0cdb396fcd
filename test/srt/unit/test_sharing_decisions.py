"""Two choices, figure by figure: which shared prefixes are read together, and which rank has a request in turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.layers.attention.shared_prefix.levels import Costs, LayerShape, Level, choose_levels
from sglang.srt.managers.prefix_balance import PrefixBalance

SHAPE = LayerShape(heads=2, kv_heads=1, dims=3, kv_bytes=5)


def costs(piece: float = 0, query: float = 0) -> Costs:
    return Costs(byte=1, product=1, score=1, piece=piece, query=query)


class Node(SimpleNamespace):
    __hash__ = object.__hash__


def prefixes():
    """Three rows share 10 tokens, and two of them 6 more."""
    root = Node(parent=None)
    two = Node(members={2, 0}, end=16, children={})
    three = Node(members={1, 2, 0}, end=10, children={5: two}, parent=root)
    two.parent = three
    return SimpleNamespace(root=root, shared=lambda: [three, two])


def test_what_a_token_costs():
    assert [SHAPE.token_cost(n, costs()) for n in (0, 1, 3)] == [5, 13, 29]
    assert SHAPE.token_cost(2, Costs(byte=2, product=3, score=5, piece=0, query=0)) == 10 + 2 * 2 * (5 + 9)


@pytest.mark.parametrize(
    ("piece", "query", "levels"),
    [
        # All three gain 5 for each of 10 tokens, the two 5 for each that is theirs.
        (0, 0, [Level(0, 10, [0, 1, 2]), Level(10, 16, [0, 2])]),
        (20, 9, [Level(0, 10, [0, 1, 2])]),
        (23, 9, [Level(0, 16, [0, 2])]),
        (22, 9, [Level(0, 10, [0, 1, 2])]),
        (80, 0, []),
        (0, 16, [Level(0, 10, [0, 1, 2])]),
        (0, 40, []),
        (29, 0, [Level(0, 10, [0, 1, 2]), Level(10, 16, [0, 2])]),
    ],
)
def test_a_piece_must_gain_more_than_it_costs(piece, query, levels):
    assert choose_levels(prefixes(), SHAPE, costs(piece, query)) == levels


def test_ranks_that_are_alike_take_turns():
    balance = PrefixBalance(3, 1 << 20, 16)
    chosen = []
    for n in range(6):
        chosen.append(balance.choose(range(10), None, [True] * 3, float(n)))
        for rank in range(3):
            balance.report(rank, 0, n + 0.5)
    assert chosen == [0, 1, 2, 0, 1, 2]
    # Also behind one that was sent without being asked about.
    balance.given(1, range(10), None, 7.0)
    for rank in range(3):
        balance.report(rank, 0, 7.5)
    assert balance.choose(range(10), None, [True] * 3, 8.0) == 2
