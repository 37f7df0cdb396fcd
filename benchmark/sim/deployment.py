"""All workers together, the routers before them, and the clients."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from sim.decode import UNIQUE, SimulatedDecode
from sim.events import Clock
from sim.figures import Least, Record, summary
from sim.prefill import Link, Prefill
from sim.workload import SPAN, Request, Workload

# A run in which nothing was finished for so many simulated seconds is stuck.
PATIENCE = 3600.0
# An affine router turns to the worker with the least load where the best one has so many requests more.
IMBALANCE = 32
# The part of a prompt that must have gone to a worker before to send it there again.
AFFINITY = 0.5
# The same of sglang-router's `cache_aware` policy, its defaults: the part, and by how many requests, and how many times
# as many, the busiest worker has more than the idlest when it turns to the idlest whatever the prompt.
CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5


class Router:
    """Which of ``workers`` a request goes to, by ``policy``: ``round_robin``, ``affine`` or ``cache_aware``.

    Affine: where most of its prompt has gone before, if that is half of it and the worker is not overloaded; else to
    the worker with the fewest requests. Cache-aware, with sglang-router's defaults: the same from 0.3 of the prompt on,
    as long as the workers' loads are balanced.
    """

    def __init__(self, policy: str, workers: int):
        self.policy, self.workers = policy, workers
        self._turn = 0
        self._seen: list[set[int]] = [set() for _ in range(workers)]

    def choose(self, request: Request, loads: Sequence[int]) -> int:
        if self.workers == 1:
            return 0
        if self.policy == "round_robin":
            self._turn += 1
            return (self._turn - 1) % self.workers
        chosen = min(range(self.workers), key=lambda w: loads[w])
        tokens, best = max((self._known(request, w), -w) for w in range(self.workers))
        if self.policy == "affine":
            known = tokens >= AFFINITY * request.length and loads[-best] - loads[chosen] <= IMBALANCE
        else:
            low, high = loads[chosen], max(loads)
            balanced = high - low <= BALANCE_ABS or high <= BALANCE_REL * low
            known = tokens > CACHE_THRESHOLD * request.length and balanced
        if known:
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


def turns(request: Request | None) -> Iterator[Request]:
    """A request and what its client asks after it."""
    while request is not None:
        yield request
        request = request.then


class Deployment:
    """One run of a workload. off: without the cache. options: arguments of the decode server."""

    def __init__(self, workload: Workload, off: bool, options: Mapping[str, Any]):
        self.workload = workload
        self.clock = Clock()
        self.prefill_for: dict[int, int] = {}
        self.least = Least(workload.page)
        self.least_pages = 0
        self.records: list[Record] = []
        self.began: float | None = None
        self._rounds = iter(workload.rounds)
        self._queue: deque[Request] = deque()
        self._open = 0
        self._last_end = 0.0
        self._build(off, options)

    def _build(self, off: bool, options: Mapping[str, Any]) -> None:
        """All workers and routers."""
        workload, times = self.workload, self.workload.times
        longest = max(r.length + r.answer for rnd in workload.rounds for first in rnd for r in turns(first))
        self.prefills = [Prefill(self.clock, times, f"prefill{i}") for i in range(workload.prefills)]
        self.router = Router(workload.router, workload.decodes)
        self.prefill_router = Router(workload.prefill_router, workload.prefills)
        self.prefill_loads = [0] * workload.prefills
        self.decodes = [
            SimulatedDecode(
                self.clock,
                workload,
                off,
                options,
                longest=longest,
                prefill_of=lambda request: self.prefills[self.prefill_for[id(request)]],
                asked=self._asked,
                finished=self._finished,
                name=f"decode{i}",
            )
            for i in range(workload.decodes)
        ]
        for decode in self.decodes:
            decode.links = {p.name: Link(self.clock, times) for p in self.prefills}
            decode.beside = lambda: any(p.busy for p in self.prefills)
        for prefill in self.prefills:
            prefill.beside = lambda: any(decode.running for decode in self.decodes)

    def run(self) -> dict[str, Any]:
        """Let everything happen; returns the figures."""
        # One rank has nothing to reduce, and this is most of what it would take.
        with self.clock.in_place(), mock.patch("torch.distributed.all_reduce", lambda *_, **__: None):
            self._next_round()
            while self._open and self.clock.run_next():
                if self.clock.now - self._last_end > PATIENCE:
                    raise RuntimeError(f"stuck: nothing finished in {PATIENCE:g} s, {self._open} requests are open")
        assert not self._open, "requests are left and nothing is to happen"
        figures = summary(self.records, self.least_pages, self.began or 0.0, [d.gauges for d in self.decodes])
        figures["prefill_busy"] = sum(p.busy_time for p in self.prefills) / len(self.prefills) / self.clock.now
        return figures

    def _next_round(self) -> None:
        asked = next(self._rounds, None)
        if asked is None:
            return
        self._open = sum(1 for first in asked for _ in turns(first))
        if self.began is None and asked[0].measured:
            self.began = self.clock.now
        if self.workload.concurrency is None:
            begin = self.clock.now
            for request in asked:
                self.clock.at(begin + (request.arrival or 0.0), functools.partial(self._send, request))
        else:
            self._queue.extend(asked)
            clients = min(self.workload.concurrency, len(asked))
            for n in range(clients):
                if self.workload.begin:
                    self.clock.after(n * self.workload.begin / clients, self._send_next)
                else:
                    self._send_next()

    def _send_next(self) -> None:
        if self._queue:
            self._send(self._queue.popleft())

    def _send(self, request: Request) -> None:
        self.prefill_for[id(request)] = p = self.prefill_router.choose(request, self.prefill_loads)
        self.prefill_loads[p] += 1
        decode = self.decodes[self.router.choose(request, [d.load for d in self.decodes])]
        self.records.append(decode.arrive(request))

    def _asked(self, record: Record) -> None:
        # Numbers of slots that nobody shares are drawn anew, which changes nothing: they are lacking either way.
        lacking = self.least.asked(record.request.slots(self.workload.scale, UNIQUE))
        if record.request.measured:
            self.least_pages += lacking

    def _finished(self, record: Record) -> None:
        self.prefill_loads[self.prefill_for.pop(id(record.request))] -= 1
        self._open -= 1
        self._last_end = self.clock.now
        request = record.request
        if request.answer_key:
            answer = range(request.answer_key * SPAN, request.answer_key * SPAN + request.answer // self.workload.scale)
            self.least.answered(request.slots(self.workload.scale, UNIQUE), answer)
        if request.then is not None:
            self.clock.after(self.workload.think, functools.partial(self._send, request.then))
        elif self._queue:
            self._send(self._queue.popleft())
        elif not self._open:
            self._next_round()
