"""What a decode tree holds of a prompt, found without touching the tree: no split, no access time, no lock.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode, page_align_keys

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["NOTHING", "PrefixPeek", "PrefixReader", "tokens_above"]

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


class PrefixReader:
    """Reads one tree, whatever its root is at the time. What it knows tokens by is a subclass's to say."""

    # Tokens at the end of a sequence that the tree cannot know.
    unknown = 0

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree

    def keys_of(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """What the tree knows these tokens by."""
        return token_ids

    def keys_in(self, node: TreeNode) -> Sequence[Any]:
        """A node's keys, as `keys_of` returns them."""
        return node.key.token_ids

    def whole_pages(self, token_ids: list[Any], extra_key: str | None) -> RadixKey:
        """The key for these tokens, up to the last whole page."""
        return RadixKey(page_align_keys(token_ids, self._tree.page_size), extra_key)

    def tell_tokens(self, events: Iterable[Any]) -> None:
        """Have events of a new node tell of tokens, where they have its keys."""

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
        step, ended = max(1, FIRST_LOOK // page), False
        while low < high:
            mid = (low + high + 1) // 2 if ended else min(low + step, high)
            if self.same(a, b, low * page, mid * page, start):
                low = mid
                step *= 2
            else:
                high, ended = mid - 1, True
        return low * page

    def same(self, a: Sequence[Any], b: Sequence[Any], first: int, last: int, start: int) -> bool:
        """Whether ``a`` and what follows ``start`` of ``b`` are equal from ``first`` to ``last``."""
        return bool(a[first:last] == b[start + first : start + last])
