"""Texts of others, workers and their clients, as a terminal may have them."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` on one line, what a terminal would obey instead of show as an escape: ``\n``, ``\x1b``, ``\u202e``."""
    # A surrogate that stands alone, which JSON can bring, could not even be written.
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
