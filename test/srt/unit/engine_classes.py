"""The engine's own classes, below all that is laid over them."""

from __future__ import annotations


def engine_class(overlaid: type) -> type:
    """The class that the engine has under the name of ``overlaid``."""
    return [one for one in overlaid.__mro__ if one.__name__ == overlaid.__name__][-1]
