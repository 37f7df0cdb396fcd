"""What a decode tree holds of a prompt, found without touching the tree: no split, no access time, no lock.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["NOTHING", "PrefixPeek", "PrefixReader", "tokens_above"]


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
    """Reads one tree, whatever its root is at the time."""

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree

    def keys_of(self, token_ids: Sequence[Any]) -> Sequence[Any]:
        """What the tree knows these tokens by: with EAGLE each is a pair with the one after it, else they themselves.

        A draft's KV of a token depends on the next one too. So of a prompt all tokens but the last can be matched.
        """
        if not self._tree.is_eagle or (token_ids and isinstance(token_ids[0], tuple)):
            return token_ids
        return list(zip(token_ids, token_ids[1:], strict=False))

    def peek(self, token_ids: Sequence[Any], extra_key: str | None) -> PrefixPeek:
        """Longest page-aligned prefix of ``token_ids`` in the tree, without a split, an access time or a lock.

        token_ids: list of ints, as long as the request may match, or their `keys_of`. Cost: one comparison per token,
        at C speed.
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

        ``node`` ends where these tokens end. Nothing is touched; cost: one comparison per token, at C speed.
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
            stop = length + len(held)
            wanted = token_ids[length : stop if stop < end else end]
            if held != wanted:
                # It ends within the node.
                yield child, self.common_length(held, wanted)
                return
            yield child, stop - length
            length, node = stop, child

    def common_length(self, a: Sequence[Any], b: Sequence[Any], known: int = 0) -> int:
        """Tokens, whole pages, that ``a`` and ``b`` share from their start; the first ``known`` are known to be equal.

        A prefix is equal up to some page and never after, so the end is found by halving.
        """
        page = self._tree.page_size
        low, high = known // page, min(len(a), len(b)) // page
        while low < high:
            mid = (low + high + 1) // 2
            if a[low * page : mid * page] == b[low * page : mid * page]:
                low = mid
            else:
                high = mid - 1
        return low * page
