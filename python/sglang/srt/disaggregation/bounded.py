"""Tables of at most so many entries.

Upstream: none is known.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["remember"]


def remember(book: OrderedDict, key: Any, value: Any, most: int) -> None:
    """Put an entry into a book of at most ``most``, as its newest. The oldest is forgotten first."""
    book.pop(key, None)
    book[key] = value
    while len(book) > most:
        # The first key of a dict is found by a walk over all that were deleted before it.
        book.popitem(last=False)
