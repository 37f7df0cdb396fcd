"""A time by the wall clock that the engine's time-outs are counted from, for a clock that may be set meanwhile.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["SinceThen"]


class SinceThen:
    """An attribute that is set to a time by the wall clock, or None, and stays as long ago as that was.

    Where somebody sets the clock (a machine that was suspended, the first answer of a time server), the engine takes
    all transfers for overdue at once, or none any more.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: float | None) -> None:
        instance.__dict__[self._name] = None if value is None else time.monotonic() - (time.time() - value)

    def __get__(self, instance: Any, owner: type | None = None) -> float | None:
        since = instance.__dict__.get(self._name)
        return None if since is None else time.time() - (time.monotonic() - since)
