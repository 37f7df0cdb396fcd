"""Makes texts of workers and clients safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""``text`` on one line, with control characters escaped: ``\n``, ``\x1b``, ``\u202e``."""
    # JSON can contain lone surrogates, which cannot be written.
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
