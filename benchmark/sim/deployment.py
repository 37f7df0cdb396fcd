"""All workers together, the router before prefill, and the clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from sim.decode import UNIQUE, SimulatedDecode
from sim.events import Clock
from sim.figures import Least, Record, summary
from sim.prefill import Link, Prefill
from sim.workload import Request, Workload

# A run in which nothing was finished for so many simulated seconds is stuck.
PATIENCE = 3600.0
# The router turns to the worker with the least load where the best one has so many requests more.
IMBALANCE = 32
# The part of a prompt that must have gone to a worker before to send it there again.
AFFINITY = 0.5


class Router:
    """Which of ``workers`` a request goes to: where most of its prompt has gone before, if that is half of it and the
    worker is not overloaded; else the worker with the fewest requests."""

    def __init__(self, workers: int):
        self._seen: list[set[int]] = [set() for _ in range(workers)]

    def choose(self, request: Request, loads: Sequence[int]) -> int:
        chosen = min(range(len(loads)), key=lambda w: loads[w])
        tokens, best = max((self._known(request, w), -w) for w in range(len(loads)))
        if tokens >= AFFINITY * request.length and loads[-best] - loads[chosen] <= IMBALANCE:
            chosen = -best
        self._seen[chosen].update(key for key, _ in request.blocks)
        return chosen

    def _known(self, request: Request, worker: int) -> int:
        tokens = 0
        for key, n in request.blocks:
            if key not in self._seen[worker]:
                break
            tokens += n
        return tokens


class Deployment:
    """One run of a workload. off: without the cache. options: arguments of the decode server."""

    def __init__(self, workload: Workload, off: bool, options: Mapping[str, Any]):
        self.workload = workload
        self.clock = Clock()
        times = workload.times
        self.prefills = [Prefill(self.clock, times, f"prefill{i}") for i in range(workload.prefills)]
        self.router = Router(workload.prefills)
        self.loads = [0] * workload.prefills
        self.prefill_for: dict[int, int] = {}
        self.decode = SimulatedDecode(
            self.clock,
            workload,
            off,
            options,
            prefill_of=lambda request: self.prefills[self.prefill_for[id(request)]],
            asked=self._asked,
            finished=self._finished,
        )
        self.decode.links = {p.name: Link(self.clock, times) for p in self.prefills}
        self.least = Least(workload.page)
        self.least_pages = 0
        self.records: list[Record] = []
        self._queue = deque(workload.requests)
        self._last_end = 0.0

    def run(self) -> dict[str, Any]:
        """Let everything happen; returns the figures."""
        # One rank has nothing to reduce, and this is most of what it would take.
        with self.clock.in_place(), mock.patch("torch.distributed.all_reduce", lambda *_, **__: None):
            for _ in range(min(self.workload.concurrency, len(self._queue))):
                self._send()
            while self.prefill_for and self.clock.run_next():
                if self.clock.now - self._last_end > PATIENCE:
                    raise RuntimeError(f"stuck: nothing finished in {PATIENCE:g} s")
        assert not self.prefill_for, "requests are left and nothing is to happen"
        figures = summary(self.records, self.least_pages, self.decode.gauges)
        figures["prefill_busy"] = sum(p.busy_time for p in self.prefills) / len(self.prefills) / self.clock.now
        return figures

    def _send(self) -> None:
        request = self._queue.popleft()
        self.prefill_for[id(request)] = p = self.router.choose(request, self.loads)
        self.loads[p] += 1
        self.records.append(self.decode.arrive(request))

    def _asked(self, record: Record) -> None:
        # Numbers of slots that nobody shares are drawn anew, which changes nothing: they are lacking either way.
        self.least_pages += self.least.asked(record.request.slots(self.workload.scale, UNIQUE))

    def _finished(self, record: Record) -> None:
        self.loads[self.prefill_for.pop(id(record.request))] -= 1
        self._last_end = self.clock.now
        if self._queue:
            self._send()
