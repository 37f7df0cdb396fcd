"""Which shared prefixes are read together, figure by figure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_pd_radix.supplied.shared_prefix.levels import Costs, LayerShape, Level, choose_levels

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
