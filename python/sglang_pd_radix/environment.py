"""Switches in the environment."""

from __future__ import annotations

import os


def switched_on(name: str, one: str, zero: str) -> bool:
    """Whether the variable is 1; 0 and nothing are off. Raises ValueError for any other value.

    one, zero: what each is for, to be said then.
    """
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}: give 1 {one}, 0 or nothing {zero}.")
    return value == "1"
