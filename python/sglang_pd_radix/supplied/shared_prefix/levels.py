"""Which shared prefixes are worth reading together: what a step costs with and without.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .prefixes import RunningPrefixes


@dataclass(frozen=True)
class Costs:
    """What attention to a piece of KV takes on some device, in nanoseconds."""

    #: To read a byte of KV.
    byte: float
    #: A multiplication and addition of a head's query with a key or a value; and its score: maximum, exponential, sum.
    product: float
    score: float
    #: A piece, whatever its length, and each query of it: to be selected, and merged with the others of its request.
    piece: float
    query: float


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer on this rank. dims: those of a key and of the value that is computed; kv_bytes: of one token."""

    heads: int
    kv_heads: int
    dims: int
    kv_bytes: int

    def token_cost(self, queries: int, costs: Costs) -> float:
        """Nanoseconds for ``queries`` requests to attend to a token that is read once."""
        return costs.byte * self.kv_bytes + queries * self.heads * (costs.score + costs.product * self.dims)


@dataclass(frozen=True)
class Level:
    """Positions ``start`` to ``end``, to be read once for all ``rows``."""

    start: int
    end: int
    rows: Sequence[int]


def choose_levels(prefixes: RunningPrefixes, shape: LayerShape, costs: Costs) -> list[Level]:
    """The levels to read together, parents before children; of a row, each begins where the one before ends.

    From the root down: what a node gains is what its children, and the rows that end in it, would take to read it each
    for itself. Where that is less than a piece costs, its positions are left to those.
    """
    levels: list[Level] = []
    # Where what no level holds begins, for the rows of a node.
    begins = {prefixes.root: 0}
    for node in prefixes.shared():
        assert node.parent is not None
        start, count = begins[node.parent], len(node.members)
        below = [len(child.members) for child in node.children.values()]
        apart = sum(shape.token_cost(n, costs) for n in below)
        apart += (count - sum(below)) * shape.token_cost(1, costs)
        gain = (apart - shape.token_cost(count, costs)) * (node.end - start)
        if gain > costs.piece + costs.query * count:
            levels.append(Level(start, node.end, sorted(node.members)))
            start = node.end
        begins[node] = start
    return levels
