"""Keys of a tree with EAGLE: each token is paired with the next, on which its draft KV depends.

So all tokens of a prompt but the last can match.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from sglang.srt.mem_cache.prefix_reader import PrefixReader
from sglang.srt.mem_cache.radix_cache import RadixKey, page_align_keys
from sglang.srt.mem_cache.utils import convert_to_bigram_key

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["PairReader", "Pairs"]


class Pairs(Sequence[tuple[Any, Any]]):
    """Pairs of each token with the next, made on access.

    A tuple per token takes several times the prompt's memory, and longer to make than to compare.
    """

    __slots__ = ("tokens",)

    def __init__(self, tokens: Sequence[Any]) -> None:
        self.tokens = tokens

    @classmethod
    def of(cls, pairs: Sequence[tuple[Any, Any]]) -> Pairs:
        """From overlapping pairs, at least one, as a node's key has them."""
        return cls([*(first for first, _ in pairs), pairs[-1][1]])

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1)

    @overload
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[Any, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            found = self.tokens[start : stop + 1] if start < stop else ()
            return list(zip(found, found[1:], strict=False))[::step]
        i = range(len(self))[index]
        return self.tokens[i], self.tokens[i + 1]


class PairReader(PrefixReader):
    """Reads a tree whose keys may be pairs."""

    @property
    def unknown(self) -> int:  # type: ignore[override]
        return int(self._tree.is_eagle)

    def keys_of(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        if not self._tree.is_eagle or (token_ids and isinstance(token_ids[0], tuple)):
            return token_ids
        return Pairs(token_ids)

    def keys_in(self, node: TreeNode) -> Sequence[Any]:
        # Made once: otherwise each prompt compared with the node would make its own tuples.
        return Pairs.of(node.key.token_ids) if self._tree.is_eagle else node.key.token_ids

    def whole_pages(self, token_ids: list[Any], extra_key: str | None) -> RadixKey:
        if not self._tree.is_eagle:
            return super().whole_pages(token_ids, extra_key)
        return RadixKey(page_align_keys(convert_to_bigram_key(token_ids), self._tree.page_size), extra_key, True)

    def tell_tokens(self, events: Iterable[Any]) -> None:
        # KV events have token ids, not pairs.
        for event in events if self._tree.is_eagle else ():
            event.token_ids = [pair[0] for pair in event.token_ids]

    def same(self, a: Sequence[Any], b: Sequence[Any], first: int, last: int, start: int) -> bool:
        if isinstance(a, Pairs) and isinstance(b, Pairs):
            # Pairs are equal if their tokens and the next one are.
            a, b, last = a.tokens, b.tokens, last + 1
        return super().same(a, b, first, last, start)
