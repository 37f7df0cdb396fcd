"""A directory to which one process at a time writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_pd_radix.errors import PdRadixError


@contextlib.contextmanager
def alone(directory: Path, refusal: str) -> Iterator[None]:
    """Keep all others that ask for it too out of ``directory``, which is there.

    Raises PdRadixError, which says ``refusal``, if somebody has it. Where there are no locks, or none may be had,
    nobody is kept out.
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
