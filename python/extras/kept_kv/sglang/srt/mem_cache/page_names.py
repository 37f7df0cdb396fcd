"""Names of KV pages in a PegaFlow server or storage, within a namespace: a chain of hashes per prompt.

The chain starts with the prompt's ``extra_key`` (salt, adapter), so that tenants stay apart. The namespace covers the
model, the page layout and the TP rank. The engine's own names cover only tokens, model name and TP rank: its
hierarchical cache cannot share these pages, and mixes up models of one name.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

__all__ = ["first_hash", "name_pages", "page_names", "rank_namespace", "split_names"]

_TOKEN = array("q")


def first_hash(extra_key: str | None) -> bytes:
    """The start of a prompt's hash chain; differs between ``extra_key`` values."""
    return hashlib.sha256(
        b"none" if extra_key is None else b"key:" + extra_key.encode("utf-8", "surrogatepass")
    ).digest()


def page_names(token_ids: Sequence[Any], page_size: int, before: bytes) -> list[bytes]:
    """One hash per whole page: SHA-256 of the hash before it and the page's tokens (int64).

    token_ids: ints or, with a draft, pairs of them. before: hash of the previous page, or `first_hash`. A partial last
    page has none. Cost: about 1 us per page plus SHA-256 of 8 bytes per token.
    """
    if token_ids and isinstance(token_ids[0], tuple):
        token_ids, page_size = [token for pair in token_ids for token in pair], 2 * page_size
    step = page_size * _TOKEN.itemsize
    data = array("q", token_ids).tobytes()
    names = []
    for start in range(0, len(data) - step + 1, step):
        before = hashlib.sha256(before + data[start : start + step]).digest()
        names.append(before)
    return names


def name_pages(tree: RadixCache, node: TreeNode) -> None:
    """Set the page names of a new leaf."""
    at_root = node.parent is tree.root_node
    before = first_hash(node.key.extra_key) if at_root else node.parent.page_names[-1]
    node.page_names = page_names(node.key.token_ids, tree.page_size, before)


def split_names(upper: TreeNode, lower: TreeNode, page_size: int) -> None:
    """``upper`` has taken the first tokens of ``lower``."""
    pages = len(upper.key) // page_size
    upper.page_names, lower.page_names = lower.page_names[:pages], lower.page_names[pages:]


def rank_namespace(name: str, made_of: Sequence[object], tp_rank: int | None, tp_size: int) -> str:
    """The namespace of one TP rank's pages. tp_rank: None if all ranks hold the same (MLA).

    made_of: the page layout: its size, and each buffer's layer, heads, dimension and number format.
    """
    shape = hashlib.sha256(repr(list(made_of)).encode()).hexdigest()[:16]
    return f"{name}-{shape}-tp{'all' if tp_rank is None else tp_rank}of{tp_size}"
