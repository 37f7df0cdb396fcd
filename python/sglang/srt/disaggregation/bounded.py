"""Tables of at most so many entries.

Upstream: none is known.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["remember"]


def remember(book: OrderedDict, key: Any, value: Any, most: int) -> None:
    """Add an entry as the newest of at most ``most``, removing the oldest."""
    book.pop(key, None)
    book[key] = value
    while len(book) > most:
        # `popitem` is O(1); finding a dict's first key walks over all deleted entries.
        book.popitem(last=False)
