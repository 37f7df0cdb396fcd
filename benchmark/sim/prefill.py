"""Models of what is not the decode worker: prefill workers with their caches, and the links from them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from sim.events import Clock
from sim.times import Times
from sim.workload import Request


class BlockCache:
    """A prefill worker's prefix cache: the blocks used last, ``capacity`` tokens of them."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def match(self, request: Request) -> int:
        """Tokens of the prompt's blocks that are here, from the start."""
        found = 0
        for key, tokens in request.blocks:
            if key not in self._blocks:
                break
            found += tokens
        return found

    def insert(self, request: Request) -> None:
        # From the end, so that the start of a prompt goes last.
        for key, tokens in reversed(request.blocks):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            else:
                self._blocks[key] = tokens
                self.used += tokens
        while self.used > self.capacity:
            self.used -= self._blocks.popitem(last=False)[1]


class Link:
    """From one prefill worker to one decode worker: one transfer after the other."""

    def __init__(self, clock: Clock, times: Times):
        self.clock, self.times = clock, times
        self.free_at = 0.0

    def send(self, tokens: int, arrived: Callable[[], None]) -> None:
        """Send the KV of ``tokens`` tokens (0: the metadata alone); ``arrived`` is called when decode has it."""
        began = max(self.clock.now, self.free_at)
        self.free_at = began + tokens * self.times.kv_bytes / self.times.bandwidth
        self.clock.at(self.free_at + self.times.latency, arrived)


@dataclass(eq=False)
class Job:
    """A prompt to compute, whose KV from ``prefix_len`` tokens on goes over ``link``.

    computed: tokens that have KV; None before its first batch. sent: tokens that decode has or that are on their way.
    """

    request: Request
    prefix_len: int
    link: Link
    arrived: Callable[[], None]
    computed: int | None = None
    sent: int = 0


class Prefill:
    """One prefill worker: jobs in order, chunk by chunk, several in one batch where they fit."""

    def __init__(self, clock: Clock, times: Times, name: str):
        self.clock, self.times, self.name = clock, times, name
        self.cache = BlockCache(times.prefill_cache)
        self.jobs: deque[Job] = deque()
        self.busy = False
        self.busy_time = 0.0
        # Whether a decode worker with the same cores has a step under way.
        self.beside: Callable[[], bool] = lambda: False

    def add(self, job: Job) -> None:
        job.sent = job.prefix_len
        self.jobs.append(job)
        if not self.busy:
            self._begin()

    def _begin(self) -> None:
        """Compute the next batch."""
        left = self.times.chunk
        batch: list[tuple[Job, int]] = []
        for job in self.jobs:
            if left == 0:
                break
            if job.computed is None:
                # The last token of a prompt is computed in any case.
                job.computed = min(self.cache.match(job.request), job.request.length - 1)
            new = min(left, job.request.length - job.computed)
            batch.append((job, new))
            left -= new
        if not batch:
            self.busy = False
            return
        self.busy = True
        taken = self.times.prefill([(job.computed or 0, new) for job, new in batch])
        if self.times.beside and self.beside():
            taken *= 1 + self.times.beside
        self.busy_time += taken
        self.clock.after(taken, lambda: self._end(batch))

    def _end(self, batch: list[tuple[Job, int]]) -> None:
        for job, new in batch:
            job.computed = (job.computed or 0) + new
            last = job.computed == job.request.length
            if last:
                self.jobs.remove(job)
                self.cache.insert(job.request)
            fresh = max(0, job.computed - job.sent)
            if fresh or last:
                job.sent += fresh
                job.link.send(fresh, job.arrived if last else _nothing)
        self._begin()


def _nothing() -> None:
    pass
