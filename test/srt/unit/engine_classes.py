"""The engine's classes below those of the core and of extras."""

from __future__ import annotations


def engine_of(cls: type) -> type:
    """The engine's class of that name."""
    return [one for one in cls.__mro__ if one.__name__ == cls.__name__][-1]
