"""Ordinary servers in place of prefill and decode workers: a model, with the times of `times`.

Each has as much KV memory as the others and its own cache. A step computes prompts in order of arrival, at most
``chunk`` tokens, and does so before any decode step, as the engine does; ``mixed``: running requests take part in it.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sim.deployment import Deployment, Router
from sim.events import Clock
from sim.figures import Gauges, Record
from sim.workload import Request, Workload

# The engine's on a GPU of 80 GB.
CHUNK = 8192


class Memory:
    """KV of one server, ``capacity`` tokens: what requests hold, and behind it the blocks that were used last."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.held = self._idle = 0
        self._users: Counter[int] = Counter()
        # Blocks that have been computed, the one used last at the end; ``_idle`` tokens of them have no user.
        self._here: OrderedDict[int, int] = OrderedDict()

    def take(self, request: Request) -> bool:
        """Hold memory for a prompt and its answer; False where others hold too much."""
        fresh = [(key, tokens) for key, tokens in request.blocks if not self._users[key]]
        need = request.answer + sum(tokens for _, tokens in fresh)
        if self.held + need > self.capacity:
            return False
        self.held += need
        self._idle -= sum(tokens for key, tokens in fresh if key in self._here)
        self._users.update(key for key, _ in request.blocks)
        self._evict()
        return True

    def match(self, request: Request) -> int:
        """Tokens of the prompt's blocks that are here, from the start."""
        found = 0
        for key, tokens in request.blocks:
            if key not in self._here:
                break
            found += tokens
        return found

    def computed(self, request: Request) -> None:
        """The prompt is here, in use. From its end, so that its start goes last."""
        for key, tokens in reversed(request.blocks):
            self._here[key] = tokens
            self._here.move_to_end(key)

    def release(self, request: Request) -> None:
        """It has ended. Its answer stays where it is a block of later prompts."""
        self._users.subtract(key for key, _ in request.blocks)
        left = sum(tokens for key, tokens in request.blocks if not self._users[key])
        self.held -= left + request.answer
        self._idle += left
        if request.answer_key:
            self._here[request.answer_key] = request.answer
            self._idle += request.answer
        self._evict()

    def _evict(self) -> None:
        for key in list(self._here) if self.held + self._idle > self.capacity else ():
            if self.held + self._idle <= self.capacity:
                return
            if not self._users[key]:
                self._idle -= self._here.pop(key)


@dataclass(eq=False)
class Job:
    """A prompt of which ``computed`` tokens have KV."""

    record: Record
    computed: int


class Server:
    """One ordinary server."""

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        memory: Memory,
        chunk: int,
        mixed: bool,
        asked: Callable[[Record], None],
        finished: Callable[[Record], None],
    ):
        self.clock, self.times, self.memory, self.chunk, self.mixed = clock, workload.times, memory, chunk, mixed
        self.asked, self.finished, self.max_running = asked, finished, workload.max_running
        self.gauges = Gauges()
        self.waiting: deque[Record] = deque()
        self.jobs: list[Job] = []
        self.running: list[Record] = []
        self.busy = False
        # Of steps that compute prompts.
        self.busy_time = 0.0

    def arrive(self, request: Request) -> Record:
        record = Record(request, self.clock.now)
        self.waiting.append(record)
        if not self.busy:
            self.busy = True
            self.clock.at(self.clock.now, self._begin)
        return record

    def _begin(self) -> None:
        """The next step."""
        parts = self._parts()
        decoding = [] if parts and not self.mixed else list(self.running)
        self.gauges.note(self.clock.now, len(self.running), len(self.jobs), len(self.waiting), self.memory.held)
        self.busy = bool(parts or decoding)
        if not self.busy:
            assert not self.waiting, "one request alone does not fit the pool"
            return
        read = sum(record.request.length + record.tokens for record in decoding)
        seconds = self.times.prefill([(job.computed, new) for job, new in parts]) if parts else 0.0
        self.busy_time += seconds
        if decoding:
            seconds += self.times.decode_step(len(decoding), read) - (self.times.batch if parts else 0.0)
        self.clock.after(seconds, functools.partial(self._end, parts, decoding))

    def _parts(self) -> list[tuple[Job, int]]:
        """What of which prompts the next step computes."""
        left, parts = self.chunk, []
        for job in self.jobs:
            parts.append((job, min(left, job.record.request.length - job.computed)))
            left -= parts[-1][1]
        while left and self.waiting and len(self.running) + len(self.jobs) < self.max_running:
            record, request = self.waiting[0], self.waiting[0].request
            if not self.memory.take(request):
                break
            self.waiting.popleft()
            record.admitted = self.clock.now
            # The last token of a prompt is computed in any case.
            record.prefix_len = min(self.memory.match(request), request.length - 1)
            self.asked(record)
            self.jobs.append(Job(record, record.prefix_len))
            parts.append((self.jobs[-1], min(left, request.length - record.prefix_len)))
            left -= parts[-1][1]
        return parts

    def _end(self, parts: list[tuple[Job, int]], decoding: list[Record]) -> None:
        for record in decoding:
            record.tokens += 1
        for job, new in parts:
            job.computed += new
            if job.computed == job.record.request.length:
                self.jobs.remove(job)
                self.memory.computed(job.record.request)
                job.record.first, job.record.tokens = self.clock.now, 1
                self.running.append(job.record)
        ended = [record for record in self.running if record.tokens >= record.request.answer]
        self.running = [record for record in self.running if record.tokens < record.request.answer]
        self.gauges.decoded += len(decoding)
        for record in ended:
            record.done = self.clock.now
            self.memory.release(record.request)
            self.finished(record)
        self._begin()


class Aggregated(Deployment):
    """As many servers as there are workers, with as much KV memory in all, behind a router that knows what they have.

    options: ``router``, ``chunk`` and ``mixed``.
    """

    def _build(self, off: bool, options: Mapping[str, Any]) -> None:
        workload, count = self.workload, self.workload.prefills + self.workload.decodes
        total = workload.prefills * workload.times.prefill_cache + workload.decodes * workload.pool
        chunk, mixed = int(options.get("chunk", CHUNK)), bool(options.get("mixed"))
        self.prefill_router, self.prefill_loads = Router(options["router"], count), [0] * count
        self.prefills = self.decodes = [
            Server(self.clock, workload, Memory(total // count), chunk, mixed, self._asked, self._finished)
            for _ in range(count)
        ]

    def _send(self, request: Request) -> None:
        self.prefill_for[id(request)] = chosen = self.prefill_router.choose(request, self.prefill_loads)
        self.prefill_loads[chosen] += 1
        self.records.append(self.decodes[chosen].arrive(request))
