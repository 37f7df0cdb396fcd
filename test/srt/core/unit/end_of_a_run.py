"""How a process of unit tests ends: a plugin, imported before all that registers what is to be done at the end.

The engine's bootstrap servers have threads with an event loop of uvloop that never end. One that wakes up when the
interpreter has been taken down, while libraries still are, asks it for a thread state: a segmentation fault.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

import pytest


class End:
    """Ends the process with the status of its tests, once all else that is to be done at the end has been done."""

    session: pytest.Session | None = None

    def __call__(self) -> None:
        if self.session is not None:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(int(self.session.exitstatus))


end = End()
# The first to be registered is the last to be called.
atexit.register(end)


def pytest_sessionfinish(session: pytest.Session) -> None:
    end.session = session
