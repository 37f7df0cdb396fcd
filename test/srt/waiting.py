"""Waiting, in tests, for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


def until(done: Callable[[], Any], what: str, tell: Callable[[], Any] = lambda: "", timeout: float = 60) -> None:
    """Wait for ``done``, at most ``timeout`` seconds; then fail with ``what``, and with what ``tell`` says.

    Short pauses first, for what comes in a moment; then longer ones, or who asks takes the time of who is waited for.
    """
    deadline, pause = time.monotonic() + timeout, 0.001
    while not done():
        assert time.monotonic() < deadline, f"{what}: {tell()}"
        time.sleep(pause)
        pause = min(0.05, 1.1 * pause)
