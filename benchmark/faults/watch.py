"""What the workers of a deployment hold while they work, read again and again: samples that `growth` judges."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Process

from . import books


@dataclass(frozen=True)
class Sample:
    """One look at one worker. ``life``: its process, which a restart ends; ``asked``: requests that all clients had
    been told of by then; at_s: seconds since the first look. The rest are sums over its processes."""

    worker: str
    life: int
    asked: int
    at_s: float
    descriptors: int
    threads: int
    rss_kib: int


def look(process: Process, asked: int, at_s: float) -> Sample:
    own = books.of_process(process)
    return Sample(own.name, own.pid, asked, round(at_s, 2), own.descriptors, own.threads, own.rss_kib)


class Watch:
    """Looks at ``processes`` every ``every_s`` seconds in a thread of its own, between `start` and `stop`.

    asked: how many requests the clients have been told of. away: names of workers that are not to be looked at now.
    also: what else looks at each.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        asked: Callable[[], int],
        away: Callable[[], set[str]] = set,
        every_s: float = 1.0,
        also: Callable[[Process], None] | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self._processes, self._asked, self._away, self._every_s = processes, asked, away, every_s
        self._also = also
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def stop(self) -> list[Sample]:
        self._stopping.set()
        self._thread.join()
        return self.samples

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stopping.wait(self._every_s):
            for process in self._processes:
                with contextlib.suppress(PdRadixError, OSError):
                    found = look(process, self._asked(), time.monotonic() - began)
                    # One that was killed meanwhile was seen in part.
                    if process.ready_s is not None and process.name not in self._away():
                        self.samples.append(found)
                        if self._also is not None:
                            self._also(process)
