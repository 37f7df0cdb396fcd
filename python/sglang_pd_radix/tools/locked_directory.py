"""A lock on a directory for one writing process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_pd_radix.errors import PdRadixError


@contextlib.contextmanager
def alone(directory: Path, refusal: str) -> Iterator[None]:
    """Lock ``directory``, which has to exist.

    Raises PdRadixError with ``refusal`` if it is locked. Without lock support there is no protection.
    """
    with contextlib.ExitStack() as held:
        try:
            opened = os.open(directory, os.O_RDONLY)
            held.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PdRadixError(refusal) from None
        except OSError:
            pass
        yield
