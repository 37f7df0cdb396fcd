"""One workload through one real gateway, on simulated time: what its workers reuse, and how even they are kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from routing_gateway import GatewayUnderTest, Routing
from routing_workers import CHARS, Held, Sent, Servers, Worker
from sim.figures import Evenness, Least
from sim.scale import SLOT
from sim.workload import SPAN, Workload

from sglang_pd_radix.tools.cluster import free_ports

# Seconds until the first token, and from one to the next; as in the simulation of the same workloads.
TTFT, ITL = 0.5, 0.045
# With --happens: what happens to decode worker 0, or to the gateway, after equal parts of the requests. "nothing": only
# a new part of the figures begins.
HAPPENS = ("nothing", "flush", "restart", "stop", "start", "remove", "add", "another", "gateway")


def text_of(slots: list[int], number: int) -> str:
    """Text for a prompt, equal where prompts are; the last piece is the request's own."""
    pieces = [hashlib.blake2s(slot.to_bytes(16, "big", signed=True), digest_size=4).hexdigest() for slot in slots]
    return "".join(pieces) + f"{number:0{CHARS}x}"


class Busy(Evenness):
    """Requests at each worker of a role, ``now`` and over simulated time."""

    def __init__(self, workers: int):
        super().__init__()
        self.now = [0] * workers

    def pass_time(self, seconds: float) -> None:
        self.take(self.now, seconds)


@dataclass
class Sums:
    """Of all requests so far, in tokens but for ``count``, ``failed`` and ``first``.

    reused: held by the decode worker that was chosen. elsewhere: held by another, and not by it. lacking: never asked
    or answered before. first: requests at decode worker 0. greatest, mean: of `Busy`, of decode.
    """

    asked: int = 0
    reused: int = 0
    elsewhere: int = 0
    lacking: int = 0
    one: int = 0
    prefill_reused: int = 0
    prefill_lacking: int = 0
    count: int = 0
    failed: int = 0
    first: int = 0
    greatest: float = 0.0
    mean: float = 0.0


@dataclass
class Parts:
    """The figures of each part, from what happened to what happens next."""

    begun: list[tuple[str, tuple[float, ...], int]] = field(default_factory=list)

    def begin(self, name: str, sums: Sums, workers: int) -> None:
        self.begun.append((name, astuple(sums), workers))

    def figures(self, sums: Sums) -> dict[str, dict[str, float]]:
        """Of each part that has any requests."""
        found = {}
        ends = [begin for _, begin, _ in self.begun[1:]] + [astuple(sums)]
        for (name, begin, workers), end in zip(self.begun, ends, strict=True):
            d = Sums(*(b - a for a, b in zip(begin, end, strict=True)))
            if d.asked:
                found[name] = {
                    "reused": d.reused / d.asked,
                    "elsewhere": d.elsewhere / d.asked,
                    "best": 1 - d.lacking / d.asked,
                    "requests": d.count,
                    "failed": d.failed,
                    "first": d.first * workers / (d.count - d.failed),
                    "even": d.greatest / d.mean if d.mean else 1.0,
                }
        return found


class Run:
    """``workload`` through a gateway to as many decode workers of ``ranks`` DP ranks as it is made for ranks."""

    def __init__(
        self, workload: Workload, prefills: int = 1, pace: float = 5.0, ranks: int = 1, method: str = "longest_prefix"
    ):
        self.workload, self.pace = workload, pace
        self._ranks, self._method = ranks, method
        self.servers = Servers(self._load)
        self.prefills = [Worker(workload.pool) for _ in range(prefills)]
        self.decodes = [self.worker() for _ in range(workload.decodes // ranks)]
        # A single worker with the memory of all, which is asked everything.
        self.one = Held(workload.pool * workload.decodes)
        # Of decode workers.
        self.urls: list[str] = []
        self.least, self.least_prompts = Least(1), Least(1)
        self.sums, self.parts = Sums(), Parts()
        self.parts.begin("beginning", self.sums, len(self.decodes))
        self.busy, self.busy_prefill = Busy(len(self.decodes)), Busy(prefills)
        # Tokens of prompts that run on each DP rank of all.
        self.even_ranks = Evenness()
        self.now = 0.0
        self._happens = False
        self._unique, self._order = itertools.count(1), itertools.count()
        # What is to happen: when, in which order; a request that gets its first token or ends, or one to be sent.
        self._events: list[tuple[float, int, Sent, str]] = []
        self._slots: dict[int, list[int]] = {}
        self._running: dict[int, Sent] = {}

    def worker(self) -> Worker:
        """A decode worker that holds nothing."""
        return Worker(self.workload.pool, self._ranks, self._method)

    def _load(self, role: str, number: int) -> list[dict[str, Any]]:
        """As of the engine's /v1/loads, by rank: decode counts requests in transfer among those that wait."""
        worker = (self.prefills if role == "prefill" else self.decodes)[number]
        here = [sent for sent in self._running.values() if getattr(sent, role).worker == number]
        if role == "prefill":
            here = [sent for sent in here if not sent.prefill.due.is_set()]
        return [
            self._load_of(held, [sent for sent in here if worker.rank_of(sent) == rank], role == "decode")
            for rank, held in enumerate(worker.ranks)
        ]

    def _load_of(self, held: Held, here: list[Sent], decode: bool) -> dict[str, Any]:
        # Prefill computes what decode waits for.
        waiting = [sent for sent in here if sent.began + TTFT > self.now] if decode else []
        said = sum(max(0.0, self.now - sent.began - TTFT) / ITL for sent in here) if decode else 0.0
        used = held.in_use + int(said) // SLOT
        return {
            "num_running_reqs": len(here) - len(waiting),
            "num_waiting_reqs": len(waiting),
            "num_used_tokens": used * SLOT,
            "max_total_num_tokens": held.size * SLOT,
            "token_usage": round(min(1.0, used / held.size), 4),
            "gen_throughput": round((len(here) - len(waiting)) / ITL, 2),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "max_running_requests": 4096,
        }

    def then(self, when: float, sent: Sent, what: str) -> None:
        heapq.heappush(self._events, (when, next(self._order), sent, what))

    async def go(self, routing: Routing, log: Path, happens: bool = False) -> None:
        """Let everything happen, one after the other."""
        self._happens = happens
        ports = free_ports(len(self.prefills) + len(self.decodes))
        at = [f"http://127.0.0.1:{port}" for port in ports]
        prefill, self.urls = at[: len(self.prefills)], at[len(self.prefills) :]
        for number, port in enumerate(ports):
            decode = number - len(self.prefills)
            await self.servers.start(*(("decode", decode) if decode >= 0 else ("prefill", number)), port)
        try:
            async with GatewayUnderTest(routing, [] if routing.plain else prefill, self.urls, log).running() as gateway:
                await self._everything(gateway)
        finally:
            await self.servers.stop_all()

    async def _everything(self, gateway: GatewayUnderTest) -> None:
        first, clients = self.workload.rounds[0], self.workload.concurrency
        todo = iter(enumerate(first))
        for client, request in todo if clients is None else itertools.islice(todo, clients):
            when = request.arrival or 0.0
            self.then(when, Sent(request, client, when), "send")
        part, started = _turns(first) / (len(HAPPENS) + 1), time.monotonic()
        coming = [(part * (n + 1), what) for n, what in enumerate(HAPPENS)] if self._happens else []
        while self._events:
            if coming and self.sums.count >= coming[0][0]:
                await self._happen(gateway, coming.pop(0)[1])
            now, _, sent, what = heapq.heappop(self._events)
            if sent.over:
                continue
            await asyncio.sleep(max(0.0, started + now / self.pace - time.monotonic()))
            self._pass_time(now)
            if what == "send":
                await self._send(gateway, sent)
            elif what == "first":
                self._first(sent)
            else:
                await self._end(sent)
            if sent.over:
                following = sent.request.then
                if following is not None:
                    when = now + self.workload.think
                    self.then(when, Sent(following, sent.client, when), "send")
                elif clients is not None:
                    for client, request in itertools.islice(todo, 1):
                        self.then(now, Sent(request, client, now), "send")

    def _pass_time(self, now: float) -> None:
        passed, self.now = now - self.now, now
        for busy in (self.busy, self.busy_prefill):
            busy.pass_time(passed)
        if self._ranks > 1:
            self.even_ranks.take([held.in_use * SLOT for worker in self.decodes for held in worker.ranks], passed)
        self.sums.greatest, self.sums.mean = self.busy.greatest, self.busy.mean

    async def _send(self, gateway: GatewayUnderTest, sent: Sent) -> None:
        request, sums = sent.request, self.sums
        slots = self._slots[id(sent)] = request.slots(SLOT, self._unique)
        text = text_of(slots, sums.count)
        self.servers.book[text[-CHARS:]] = sent
        sums.count += 1
        sent.task = asyncio.ensure_future(gateway.ask(text, sent))
        legs = [sent.decode] if gateway.routing.plain else [sent.prefill, sent.decode]
        arrived = asyncio.gather(*(leg.arrived.wait() for leg in legs))
        await asyncio.wait([sent.task, arrived], return_when=asyncio.FIRST_COMPLETED)
        if not all(leg.arrived.is_set() for leg in legs):
            arrived.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await arrived
            status = await sent.task
            assert status >= 500, f"answered with {status} without having been asked"
            sums.failed += 1
            sent.over = True
            return
        self._take(sent, slots)
        self._running[id(sent)] = sent
        self.then(sent.began + TTFT, sent, "first")
        self.then(sent.began + TTFT + ITL * request.answer, sent, "end")

    def _take(self, sent: Sent, slots: list[int]) -> None:
        """It has reached its workers."""
        sums, chosen = self.sums, self.decodes[sent.decode.worker]
        length = sent.request.length
        sums.asked += length
        # The last slot of a prompt need not be full.
        sums.lacking += max(0, length - (len(slots) - self.least.asked(slots)) * SLOT)
        sums.prefill_lacking += max(0, length - (len(slots) - self.least_prompts.asked(slots)) * SLOT)
        if self._happens:
            longest = max(worker.longest(slots) for worker in self.decodes)
            sums.elsewhere += min(longest, length) - min(chosen.longest(slots), length)
        sums.reused += chosen.begin(sent, slots, self.now)
        sums.first += sent.decode.worker == 0
        sums.one += self.one.begin(sent, slots)
        self.busy.now[sent.decode.worker] += 1
        if sent.prefill.worker >= 0:
            sums.prefill_reused += self.prefills[sent.prefill.worker].begin(sent, slots, self.now)
            self.busy_prefill.now[sent.prefill.worker] += 1

    def _first(self, sent: Sent) -> None:
        """Prefill is through with it."""
        if sent.prefill.worker >= 0 and not sent.prefill.due.is_set():
            sent.prefill.due.set()
            self.prefills[sent.prefill.worker].end(sent, self._slots[id(sent)], self.now)
            self.busy_prefill.now[sent.prefill.worker] -= 1

    async def _end(self, sent: Sent) -> None:
        self._first(sent)
        sent.decode.due.set()
        assert sent.task is not None
        status = await sent.task
        assert status == 200, f"answered with {status}"
        slots, answer = self._slots.pop(id(sent)), sent.request.answer_key * SPAN
        said = range(answer, answer + (sent.request.answer // SLOT if answer else 0))
        if said:
            self.least.answered(slots, said)
        # Its last token has no KV, and so its last slot is not full.
        self.decodes[sent.decode.worker].end(sent, [*slots, *said[:-1]], self.now)
        self.one.end(sent, [*slots, *said[:-1]])
        self.busy.now[sent.decode.worker] -= 1
        del self._running[id(sent)]
        sent.over = True

    async def _happen(self, gateway: GatewayUnderTest, what: str) -> None:
        """Something happens to decode worker 0 or the gateway, and a new part of the figures begins."""
        if what == "flush":
            self.decodes[0].forget()
        elif what in ("restart", "stop"):
            await self._end_all(0)
            await self.servers.stop("decode", 0)
            self.decodes[0] = self.worker()
        elif what == "another":
            (port,) = free_ports(1)
            self.urls.append(f"http://127.0.0.1:{port}")
            await self.servers.start("decode", len(self.decodes), port)
            self.decodes.append(self.worker())
            self.busy.now.append(0)
            await gateway.add(self.urls[-1])
        elif what == "gateway":
            await self._end_all()
            gateway.stop()
            await gateway.start()
        elif what == "remove":
            await gateway.remove(self.urls[0])
        elif what == "add":
            await gateway.add(self.urls[0])
        if what in ("restart", "start"):
            await self.servers.start("decode", 0, int(self.urls[0].rpartition(":")[2]))
            await gateway.wait_for(self.urls[0])
        self.parts.begin(what, self.sums, len(self.decodes))

    async def _end_all(self, worker: int | None = None) -> None:
        """Who runs there (None: anywhere) ends now: what becomes of requests that are lost is another question."""
        for sent in [sent for sent in self._running.values() if worker in (None, sent.decode.worker)]:
            await self._end(sent)
            if sent.request.then is not None:
                when = self.now + self.workload.think
                self.then(when, Sent(sent.request.then, sent.client, when), "send")

    def figures(self) -> dict[str, Any]:
        sums = self.sums
        assert all(worker.sound for worker in (*self.decodes, *self.prefills))
        return {
            "requests": sums.count - sums.failed,
            "failed": sums.failed,
            "reused": sums.reused / sums.asked,
            "best": 1 - sums.lacking / sums.asked,
            "one": sums.one / sums.asked,
            "even": self.busy.even,
            "even_ranks": self.even_ranks.even,
            "running": self.busy.mean / self.busy.seconds,
            "prefill_reused": sums.prefill_reused / sums.asked,
            "prefill_best": 1 - sums.prefill_lacking / sums.asked,
            "prefill_even": self.busy_prefill.even,
            "parts": self.parts.figures(sums),
        }


def _turns(first: Sequence[Any]) -> int:
    count = 0
    for request in first:
        while request is not None:
            count, request = count + 1, request.then
    return count
