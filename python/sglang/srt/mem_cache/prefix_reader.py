"""Finds what a decode tree holds of a prompt without changing it: no split, access time or lock.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode, page_align_keys

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache

# Tokens of the first comparison: so many cost hardly more than one.
FIRST_LOOK = 256


class PrefixPeek(NamedTuple):
    """A match of a prompt, valid until the tree changes.

    length: matched tokens, a multiple of the page size.
    evictable: how many of them are unlocked: a lock subtracts these from the evictable size.
    path: the matched nodes, from the root down.
    in_last: matched tokens of the last node, a multiple of the page size.
    """

    length: int
    evictable: int
    path: list[TreeNode]
    in_last: int


NOTHING = PrefixPeek(0, 0, [], 0)


def tokens_above(nodes: Iterable[TreeNode | None], seen: set[TreeNode] | None = None) -> int:
    """Tokens that locks on ``nodes`` hold, each once. Cost: one visit per node above ``nodes``.

    seen: nodes to skip; the counted nodes are added to it. Computed over the whole batch whenever a
    request starts or ends, so it makes no call per request.
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
    """Reads one tree. A subclass may map tokens to other keys (`keys_of`)."""

    # Tokens at the end of a sequence that have no key yet.
    unknown = 0

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree

    def keys_of(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """The keys of these tokens in the tree."""
        return token_ids

    def keys_in(self, node: TreeNode) -> Sequence[Any]:
        """The keys of ``node``, as `keys_of` returns them."""
        return node.key.token_ids

    def whole_pages(self, token_ids: list[Any], extra_key: str | None) -> RadixKey:
        """The key of the whole pages of these tokens."""
        return RadixKey(page_align_keys(token_ids, self._tree.page_size), extra_key)

    def tell_tokens(self, events: Iterable[Any]) -> None:
        """Replace keys by tokens in KV events of a new node."""

    def peek(self, token_ids: Sequence[Any], extra_key: str | None) -> PrefixPeek:
        """The longest page-aligned prefix of ``token_ids`` in the tree.

        token_ids: the ints that the request may match, or their `keys_of`. Cost: see `descend`.
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
        """The nodes below ``node`` that match ``token_ids[length:]``, each with its matched tokens.

        token_ids: as `keys_of` returns them; ``node`` ends after the first ``length``.
        Cost: a few comparisons per matched token, at C speed.
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
            # The child's first page is equal: it is its dict key.
            span = self.common_length(held, token_ids, page, length)
            yield child, span
            if span < len(held):
                # The match ends inside the node.
                return
            length, node = length + span, child

    def common_length(
        self, a: Sequence[Any], b: Sequence[Any], known: int = 0, start: int = 0
    ) -> int:
        """Tokens, in whole pages, that ``a`` and ``b[start:]`` share; both as by `keys_of`.

        known: tokens known to be equal. The search doubles its step up to the first difference and
        bisects the last step, so its cost depends on the shared length.
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
        """Whether ``a`` and ``b[start:]`` are equal from ``first`` to ``last``."""
        return bool(a[first:last] == b[start + first : start + last])
