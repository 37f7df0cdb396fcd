"""What a decode tree holds of a prompt, found without touching the tree: no split, no access time, no lock.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["NOTHING", "Pairs", "PrefixPeek", "PrefixReader", "tokens_above"]

# Tokens that are compared first: as many cost hardly more than one.
FIRST_LOOK = 256


class PrefixPeek(NamedTuple):
    """What the tree holds of a prompt, found without touching the tree. Good until the tree next changes.

    length: matched tokens, a multiple of the page size.
    evictable: how many of them no request has locked; locking the match takes these out of the evictable size.
    path: the nodes that hold them, from the root down.
    in_last: tokens of the last node that matched, a multiple of the page size.
    """

    length: int
    evictable: int
    path: list[TreeNode]
    in_last: int


NOTHING = PrefixPeek(0, 0, [], 0)


def tokens_above(nodes: Iterable[TreeNode | None], seen: set[TreeNode] | None = None) -> int:
    """Tokens of the tree that locks on ``nodes`` hold, each once. Cost: the nodes above these, each once.

    seen: nodes that do not count, to which this adds those that have been counted. Asked of all that run in each step
    in which one comes or goes, so it makes no call for each of them.
    """
    seen = set() if seen is None else seen
    tokens = 0
    for node in nodes:
        while node is not None and node.parent is not None and node not in seen:
            seen.add(node)
            tokens += len(node.key.token_ids)
            node = node.parent
    return tokens


class Pairs(Sequence[tuple[Any, Any]]):
    """Each token of a prompt but the last with the one after it, made where it is asked for.

    A tuple for each is several times the prompt, and takes longer to make than to compare.
    """

    __slots__ = ("tokens",)

    def __init__(self, tokens: Sequence[Any]) -> None:
        self.tokens = tokens

    @classmethod
    def of(cls, pairs: Sequence[tuple[Any, Any]]) -> Pairs:
        """These pairs, one or more, of which each begins with what the one before it ends with: as of a node's key."""
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


class PrefixReader:
    """Reads one tree, whatever its root is at the time."""

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree

    def keys_of(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """What the tree knows these tokens by: with EAGLE each is a pair with the one after it, else they themselves.

        A draft's KV of a token depends on the next one too. So of a prompt all tokens but the last can be matched.
        """
        if not self._tree.is_eagle or (token_ids and isinstance(token_ids[0], tuple)):
            return token_ids
        return Pairs(token_ids)

    def peek(self, token_ids: Sequence[Any], extra_key: str | None) -> PrefixPeek:
        """Longest page-aligned prefix of ``token_ids`` in the tree, without a split, an access time or a lock.

        token_ids: list of ints, as long as the request may match, or their `keys_of`. Cost: see `descend`.
        """
        token_ids = self.keys_of(token_ids)
        path: list[TreeNode] = []
        length = evictable = span = 0
        for node, span in self.descend(self._tree.root_node, 0, token_ids, extra_key):
            path.append(node)
            length += span
            if node.lock_ref == 0:
                evictable += span
        return PrefixPeek(length, evictable, path, span)

    def descend(
        self, node: TreeNode, length: int, token_ids: Sequence[Any], extra_key: str | None
    ) -> Iterator[tuple[TreeNode, int]]:
        """The nodes below ``node`` that hold what follows the first ``length`` tokens, each with how many it holds.

        token_ids: as `keys_of` returns them.

        ``node`` ends where these tokens end. Nothing is touched; cost: a few comparisons per token that is held, at C
        speed.
        """
        page, child_key = self._tree.page_size, self._tree.get_child_key_fn
        end = len(token_ids) // page * page
        following = RadixKey([], extra_key)
        while length < end:
            following.token_ids = token_ids[length : length + page]
            child = node.children.get(child_key(following))
            if child is None:
                return
            held = child.key.token_ids
            # It goes by its first page.
            span = self.common_length(held, token_ids, page, length)
            yield child, span
            if span < len(held):
                # It ends within the node.
                return
            length, node = length + span, child

    def common_length(self, a: Sequence[Any], b: Sequence[Any], known: int = 0, start: int = 0) -> int:
        """Tokens, whole pages, that ``a`` and what follows the first ``start`` of ``b`` have in common.

        The first ``known`` are known to be equal. Both as `keys_of` returns them. A prefix is equal up to some page and
        never after: it is looked for in steps that double, so that what is compared goes by what they share, not by how
        long they are, and in the step in which it ends by halving.
        """
        page = self._tree.page_size
        low, high = known // page, min(len(a), len(b) - start) // page
        more = 0
        if isinstance(a, Pairs) and isinstance(b, Pairs):
            # Pairs are equal where their tokens are, and the one after the last.
            a, b, more = a.tokens, b.tokens, 1
        step, ended = max(1, FIRST_LOOK // page), False
        while low < high:
            mid = (low + high + 1) // 2 if ended else min(low + step, high)
            first, last = low * page, mid * page + more
            if a[first:last] == b[start + first : start + last]:
                low = mid
                step *= 2
            else:
                high, ended = mid - 1, True
        return low * page
