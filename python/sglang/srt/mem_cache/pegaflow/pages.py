"""What pages of KV are called in a PegaFlow server and in a storage, within a namespace: a chain of hashes per prompt.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["first_hash", "page_hashes"]

_TOKEN = array("q")


def first_hash(extra_key: str | None) -> bytes:
    """What the hash of a prompt's first page is chained to: another one for each ``extra_key`` (salt, adapter)."""
    return hashlib.sha256(
        b"none" if extra_key is None else b"key:" + extra_key.encode("utf-8", "surrogatepass")
    ).digest()


def page_hashes(token_ids: Sequence[int], page_size: int, before: bytes) -> list[bytes]:
    """One hash for each whole page of ``token_ids``, SHA-256 of the hash before it and the page's tokens (int64).

    before: the hash of the page that ends where ``token_ids`` begin, or `first_hash`. A rest of less than a page has
    none. Cost: about a microsecond per page and what SHA-256 takes for 8 bytes per token.
    """
    step = page_size * _TOKEN.itemsize
    data = array("q", token_ids).tobytes()
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        before = hashlib.sha256(before + data[start : start + step]).digest()
        hashes.append(before)
    return hashes
