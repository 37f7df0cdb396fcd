"""What the policies of a gateway leave workers to reuse: the real gateway before workers that only wait.

The gateway (smg or sglang-router) runs as `pd-radix up` runs it, before prefill and decode workers that note who has
asked them and hold each answer back until it is due. Time is simulated: the next request is sent when the one before
has reached its workers, and an answer is given when all that comes before it has happened, so that the gateway always
sees the requests in flight that it would see, however slow this machine is. Only what it does by the clock goes by
real seconds: it cuts its tree down every second, and asks workers for their load every 2 seconds, which are 10
simulated ones (smg's interval), or fewer on a machine that does not keep pace.

What each worker would have held is found out by the way, with the real decode tree and a pool of the real size. A
request is short text that stands for a long prompt, 8 characters for 64 tokens, and the bound of the gateway's own tree
is made smaller in proportion.

    python benchmark/router_policies.py --trace conversation_trace.jsonl      # both gateways, 2 and 4 decode workers
    python benchmark/router_policies.py --workloads chat --workers 4 --policies smg/cache_aware,sglang-router/manual
    python benchmark/router_policies.py --workloads chat --prefills 2 --prefill-policies cache_aware,round_robin
    python benchmark/router_policies.py --workloads chat --workers 4 --policies smg/cache_aware --happens

Reused: tokens of prompts that the decode worker held. One: what a single worker would have held that is asked
everything and has the memory of all. Best: all that was ever asked or answered before, with memory without end. Even:
requests at the busiest decode worker over the mean of all, both as means over time. With --prefills, the same of
prefill workers. With --happens, decode workers are flushed, restarted, removed and added while it runs, and the
figures are those of each part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import heapq
import itertools
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import aiohttp  # noqa: E402
from routing_workers import CHARS, MODEL, Held, Sent, Servers  # noqa: E402
from sim.figures import Evenness, Least  # noqa: E402
from sim.scale import SLOT, Many, Trace  # noqa: E402
from sim.workload import SPAN, Workload  # noqa: E402

from sglang_pd_radix.tools.cluster import GATEWAYS, SMG, Gateway, free_ports, gateway_options  # noqa: E402

POLICIES = (
    *(f"smg/{policy}" for policy in SMG.policies if policy != "manual"),
    "smg/cache_aware:as_is",
    "smg/manual:min_load",
    *(f"sglang-router/{policy}" for policy in ("round_robin", "cache_aware", "cache_aware:plain", "manual:min_load")),
)
# Those that look at the header X-SMG-Routing-Key, which nobody else is sent.
KEYED = ("manual", "consistent_hashing")
# Options of the gateway, after a colon in --policies, joined by "+". plain: it knows no prefill, and takes decode
# workers for ordinary ones.
TUNED: dict[str, list[str]] = {
    "plain": [],
    "patient": ["--balance-abs-threshold", "1024", "--balance-rel-threshold", "4"],
    "strict": ["--balance-abs-threshold", "16", "--balance-rel-threshold", "1.1"],
    "stricter": ["--balance-abs-threshold", "4", "--balance-rel-threshold", "1.05"],
    "abs8": ["--balance-abs-threshold", "8"],
    "abs16": ["--balance-abs-threshold", "16"],
    "rel1.1": ["--balance-rel-threshold", "1.1"],
    "rel1.3": ["--balance-rel-threshold", "1.3"],
    # As it is when nobody says otherwise.
    "third": ["--cache-threshold", "0.3"],
    "rel1.5": ["--balance-rel-threshold", "1.5"],
    "none": ["--cache-threshold", "0.0"],
    "kv5": ["--least-load-kv-pressure-weight", "5"],
    "kv20": ["--least-load-kv-pressure-weight", "20"],
    "never": ["--load-monitor-interval", "86400"],
    "most": ["--cache-threshold", "0.7"],
    "half": ["--cache-threshold", "0.5"],
    "min_load": ["--assignment-mode", "min_load"],
    # As smg is when nobody says otherwise; `pd-radix up` switches off both.
    "as_is": [
        "--worker-overload-protection",
        "--cache-threshold",
        "0.3",
        "--balance-rel-threshold",
        "1.5",
    ],
}
# The router of the command line, whose options leave out a policy. (prefix_hash answers 503 in PD mode.)
LAUNCH = """
import sys
from sglang_router.launch_router import launch_router, parse_router_args
args = parse_router_args(sys.argv[2:])
args.prefill_policy, args.decode_policy = "round_robin", sys.argv[1]
launch_router(args)
"""
# Of the gateway's tree by default, for 4 characters a token.
TREE = (1 << 26) * CHARS // (4 * SLOT)
# Seconds until the first token, and from one to the next; as in the simulation of the same workloads.
TTFT, ITL = 0.5, 0.045
# Real seconds between two looks of the gateway at its workers' load.
LOOK_S = 2
# With --happens: after which part of the requests what happens to a decode worker; "": only a new part begins.
HAPPENS = ((0.15, ""), (0.3, "flush"), (0.45, "stop"), (0.55, "start"), (0.7, "remove"), (0.85, "add"))


@dataclass(frozen=True)
class Routing:
    """A gateway, how it chooses, and between how many prefill and decode workers."""

    gateway: Gateway
    decode: str
    prefill: str
    prefills: int
    decodes: int

    @classmethod
    def parse(cls, text: str, prefill: str, prefills: int, decodes: int) -> Routing:
        """``text``: GATEWAY/POLICY or GATEWAY/POLICY:TUNING+TUNING."""
        gateway, _, decode = text.partition("/")
        return cls(GATEWAYS[gateway], decode, prefill, prefills, decodes)

    @property
    def plain(self) -> bool:
        """Whether it knows no prefill."""
        return self.decode.endswith(":plain")

    def command(self, prefill: Sequence[str], decode: Sequence[str], port: int, metrics_port: int) -> list[str]:
        """The gateway's, before workers at these URLs."""
        policy, _, tuned = self.decode.partition(":")
        more = ["--max-tree-size", str(TREE), "--eviction-interval-secs", "1", "--log-level", "error"]
        if self.gateway is SMG:
            more += ["--health-check-interval-secs", "1", "--load-monitor-interval", str(LOOK_S)]
        more += [option for name in filter(None, tuned.split("+")) for option in TUNED[name]]
        module = list(self.gateway.module)
        own = ["--host", "127.0.0.1", "--port", str(port)]
        if self.plain:
            more += ["--worker-urls", *decode, "--policy", policy, "--prometheus-port", str(metrics_port)]
            return [sys.executable, *module, *own, *more]
        if policy in self.gateway.policies:
            more += ["--prefill-policy", self.prefill, "--decode-policy", policy]
        else:
            module = ["-c", LAUNCH, policy]
        workers = [(url, 8998) for url in prefill]
        return [
            sys.executable,
            *module,
            *own,
            *gateway_options(self.gateway, workers, decode, None, more, metrics_port),
        ]

    @contextlib.asynccontextmanager
    async def running(self, prefill: list[str], decode: list[str], log: Path) -> AsyncIterator[str]:
        """Its URL, while it runs."""
        port, metrics_port = free_ports(2)
        command = self.command(prefill, decode, port, metrics_port)
        with open(log, "ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "SGLANG_PD_RADIX": "0"})
        url = f"http://127.0.0.1:{port}"
        try:
            async with aiohttp.ClientSession() as session:
                for _ in range(600):
                    with contextlib.suppress(aiohttp.ClientError):
                        async with session.get(url + "/readiness") as reply:
                            if reply.status == 200:
                                break
                    assert process.poll() is None, f"the gateway has ended, see {log}"
                    await asyncio.sleep(0.1)
            yield url
        finally:
            process.kill()
            process.wait()


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


class Run:
    """One workload through one gateway."""

    def __init__(self, workload: Workload, prefills: int = 1, pace: float = 5.0):
        self.workload, self.pace = workload, pace
        self.servers = Servers(self._load)
        self.prefills = [Held(workload.pool) for _ in range(prefills)]
        self.decodes = [Held(workload.pool) for _ in range(workload.decodes)]
        # A single worker with the memory of all, which is asked everything.
        self.one = Held(workload.pool * workload.decodes)
        self.urls: list[str] = []
        self.least, self.least_prompts = Least(1), Least(1)
        self.lacking = self.lacking_prompts = self.asked = self.count = self.failed = 0
        self.busy, self.busy_prefill = Busy(workload.decodes), Busy(prefills)
        self._at = 0.0
        self._unique, self._order = itertools.count(1), itertools.count()
        # What is to happen: when, in which order; a request that gets its first token or ends, or one to be sent.
        self._events: list[tuple[float, int, Sent, str]] = []
        self._slots: dict[int, list[int]] = {}
        self._running: dict[int, Sent] = {}
        self._parts: list[tuple[str, list[float]]] = [("", self._sums())]

    def _load(self, role: str, number: int) -> dict[str, Any]:
        """As of the engine's /v1/loads: decode counts requests in transfer among those that wait."""
        held = (self.prefills if role == "prefill" else self.decodes)[number]
        here = [sent for sent in self._running.values() if getattr(sent, role).worker == number]
        waiting = [sent for sent in here if sent.began + TTFT > self._at]
        said = sum(max(0.0, self._at - sent.began - TTFT) / ITL for sent in here) if role == "decode" else 0.0
        used = held.in_use + int(said) // SLOT
        return {
            "num_running_reqs": len(here) - len(waiting),
            "num_waiting_reqs": len(waiting) if role == "decode" else 0,
            "num_used_tokens": used * SLOT,
            "max_total_num_tokens": held.size * SLOT,
            "token_usage": round(min(1.0, used / held.size), 4),
            "gen_throughput": round((len(here) - len(waiting)) / ITL, 2),
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "max_running_requests": 4096,
        }

    def _then(self, when: float, sent: Sent, what: str) -> None:
        heapq.heappush(self._events, (when, next(self._order), sent, what))

    async def go(self, routing: Routing, log: Path, happens: bool = False) -> None:
        """Let everything happen, one after the other."""
        ports = free_ports(len(self.prefills) + len(self.decodes))
        at = [f"http://127.0.0.1:{port}" for port in ports]
        prefill, self.urls = at[: len(self.prefills)], at[len(self.prefills) :]
        for number, port in enumerate(ports):
            decode = number - len(self.prefills)
            await self.servers.start(*(("decode", decode) if decode >= 0 else ("prefill", number)), port)
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with (
                routing.running([] if routing.plain else prefill, self.urls, log) as url,
                aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session,
            ):
                gateway = GatewayUnderTest(session, url, routing)
                await self._everything(gateway, list(HAPPENS) if happens else [])
        finally:
            await self.servers.stop_all()

    async def _everything(self, gateway: GatewayUnderTest, coming: list[tuple[float, str]]) -> None:
        first, clients = self.workload.rounds[0], self.workload.concurrency
        todo = iter(enumerate(first))
        for client, request in todo if clients is None else itertools.islice(todo, clients):
            when = request.arrival or 0.0
            self._then(when, Sent(request, client, when), "send")
        total, started = _turns(first), time.monotonic()
        while self._events:
            if coming and self.count >= coming[0][0] * total:
                await self._happen(gateway, coming.pop(0)[1])
            now, _, sent, what = heapq.heappop(self._events)
            if sent.over:
                continue
            await asyncio.sleep(max(0.0, started + now / self.pace - time.monotonic()))
            for busy in (self.busy, self.busy_prefill):
                busy.pass_time(now - self._at)
            self._at = now
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
                    self._then(when, Sent(following, sent.client, when), "send")
                elif clients is not None:
                    for client, request in itertools.islice(todo, 1):
                        self._then(now, Sent(request, client, now), "send")

    async def _send(self, gateway: GatewayUnderTest, sent: Sent) -> None:
        request = sent.request
        slots = self._slots[id(sent)] = request.slots(SLOT, self._unique)
        text = text_of(slots, self.count)
        self.servers.book[text[-CHARS:]] = sent
        self.count += 1
        sent.task = asyncio.ensure_future(gateway.ask(text, sent))
        legs = [sent.decode] if gateway.routing.plain else [sent.prefill, sent.decode]
        arrived = asyncio.gather(*(leg.arrived.wait() for leg in legs))
        await asyncio.wait([sent.task, arrived], return_when=asyncio.FIRST_COMPLETED)
        if not all(leg.arrived.is_set() for leg in legs):
            arrived.cancel()
            status = await sent.task
            assert status >= 500, f"answered with {status} without having been asked"
            self.failed += 1
            sent.over = True
            return
        self.asked += request.length
        self.lacking += self.least.asked(slots)
        self.lacking_prompts += self.least_prompts.asked(slots)
        self.decodes[sent.decode.worker].begin(sent, slots)
        self.one.begin(sent, slots)
        self.busy.now[sent.decode.worker] += 1
        if sent.prefill.worker >= 0:
            self.prefills[sent.prefill.worker].begin(sent, slots)
            self.busy_prefill.now[sent.prefill.worker] += 1
        self._running[id(sent)] = sent
        self._then(sent.began + TTFT, sent, "first")
        self._then(sent.began + TTFT + ITL * request.answer, sent, "end")

    def _first(self, sent: Sent) -> None:
        """Prefill is through with it."""
        if sent.prefill.worker >= 0 and not sent.prefill.due.is_set():
            sent.prefill.due.set()
            self.prefills[sent.prefill.worker].end(sent, self._slots[id(sent)])
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
        self.decodes[sent.decode.worker].end(sent, [*slots, *said[:-1]])
        self.one.end(sent, [*slots, *said[:-1]])
        self.busy.now[sent.decode.worker] -= 1
        del self._running[id(sent)]
        sent.over = True

    async def _happen(self, gateway: GatewayUnderTest, what: str) -> None:
        """Something happens to decode worker 0, and a new part of the figures begins."""
        self._parts.append((what or "nothing", self._sums()))
        if what == "flush":
            self.decodes[0].forget()
        elif what == "stop":
            # Who runs there ends now: what becomes of requests that are lost is another question.
            for sent in [sent for sent in self._running.values() if sent.decode.worker == 0]:
                await self._end(sent)
                if sent.request.then is not None:
                    self._then(self._at, Sent(sent.request.then, sent.client, self._at), "send")
            await self.servers.stop("decode", 0)
            reused = self.decodes[0].reused
            self.decodes[0] = Held(self.workload.pool)
            self.decodes[0].reused = reused
        elif what == "start":
            await self.servers.start("decode", 0, int(self.urls[0].rpartition(":")[2]))
            await gateway.wait_for(self.urls[0])
        elif what == "remove":
            await gateway.remove(self.urls[0])
        elif what == "add":
            await gateway.add(self.urls[0])

    def _sums(self) -> list[float]:
        reused = [sum(held.reused for held in role) for role in (self.decodes, self.prefills)]
        of_time = [self.busy.greatest, self.busy.mean, float(self.busy.now[0])]
        return [*map(float, reused), self.asked, self.lacking, self.count, self.failed, *of_time]

    def figures(self) -> dict[str, Any]:
        assert all(held.tree.audit([]) == [] for held in (*self.decodes, *self.prefills))
        found: dict[str, Any] = {
            "requests": self.count - self.failed,
            "failed": self.failed,
            "reused": sum(held.reused for held in self.decodes) / self.asked,
            "best": 1 - self.lacking * SLOT / self.asked,
            "one": self.one.reused / self.asked,
            "even": self.busy.even,
            "running": self.busy.mean / self.busy.seconds,
            "prefill_reused": sum(held.reused for held in self.prefills) / self.asked,
            "prefill_best": 1 - self.lacking_prompts * SLOT / self.asked,
            "prefill_even": self.busy_prefill.even,
            "parts": {},
        }
        ends = [sums for _, sums in self._parts[1:]] + [self._sums()]
        for (name, begin), end in zip(self._parts, ends, strict=True):
            d = [b - a for a, b in zip(begin, end, strict=True)]
            if d[2]:
                found["parts"][name or "beginning"] = {
                    "reused": d[0] / d[2],
                    "best": 1 - d[3] * SLOT / d[2],
                    "requests": int(d[4]),
                    "failed": int(d[5]),
                    "even": d[6] / d[7] if d[7] else 1.0,
                }
        return found


def _turns(first: Sequence[Any]) -> int:
    count = 0
    for request in first:
        while request is not None:
            count, request = count + 1, request.then
    return count


@dataclass
class GatewayUnderTest:
    """The client's side of it, and the operator's."""

    session: aiohttp.ClientSession
    url: str
    routing: Routing

    async def ask(self, text: str, sent: Sent) -> int:
        """Status of the answer to one request."""
        body = {"model": MODEL, "text": text, "sampling_params": {"max_new_tokens": sent.request.answer}}
        keyed = self.routing.decode.partition(":")[0] in KEYED
        headers = {"X-SMG-Routing-Key": str(sent.client)} if keyed else {}
        async with self.session.post(self.url + "/generate", json=body, headers=headers) as reply:
            await reply.read()
            return reply.status

    async def _workers(self) -> dict[str, dict[str, Any]]:
        async with self.session.get(self.url + "/workers") as reply:
            return {worker["url"]: worker for worker in (await reply.json())["workers"]}

    async def wait_for(self, url: str) -> None:
        """Until the gateway takes the worker at ``url`` for healthy."""
        for _ in range(300):
            worker = (await self._workers()).get(url)
            if worker and worker["is_healthy"]:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"the gateway has not noticed that {url} is there")

    async def remove(self, url: str) -> None:
        name = (await self._workers())[url]["id"]
        async with self.session.delete(f"{self.url}/workers/{name}") as reply:
            assert reply.status < 300, await reply.text()
        # Known no more: what is being drained is in the way of another at the same URL.
        for _ in range(300):
            if url not in await self._workers():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"the gateway still knows {url}")

    async def add(self, url: str) -> None:
        async with self.session.post(self.url + "/workers", json={"url": url, "worker_type": "decode"}) as reply:
            assert reply.status < 300, await reply.text()
        await self.wait_for(url)


def chat(workers: int, args: argparse.Namespace) -> Workload:
    """Conversations of up to 10 turns under one system prompt."""
    return _conversations(workers, args, document=1024, turns=10, at_a_time=150)


def shared(workers: int, args: argparse.Namespace) -> Workload:
    """Two turns at most, of which a system prompt that all share is nearly everything."""
    return _conversations(workers, args, document=12_288, turns=2, at_a_time=100)


def _conversations(workers: int, args: argparse.Namespace, document: int, turns: int, at_a_time: int) -> Workload:
    """Conversations under one ``document``, ``at_a_time`` for each worker."""
    return Many(
        decodes=workers,
        documents=1,
        document=document,
        turns=turns,
        requests=args.requests * workers,
        concurrency=at_a_time * workers,
        pool=800_000,
    ).make()


def trace(workers: int, args: argparse.Namespace) -> Workload:
    return Trace(file=args.trace or "", decodes=workers, limit=args.limit).make()


WORKLOADS = {"chat": chat, "shared": shared, "trace": trace}


async def measure(name: str, routing: Routing, args: argparse.Namespace) -> dict[str, Any]:
    """Run one workload through a gateway; returns the figures."""
    run = Run(WORKLOADS[name](routing.decodes, args), routing.prefills, args.pace)
    await run.go(routing, args.log, args.happens)
    return run.figures()


HEAD = "| workload | decode workers | policy | reused | one | best | even | running, mean |\n" + "|---" * 8 + "|"
OF_PREFILL = "| workload | prefill workers | prefill policy | reused | best | even |\n|---|---|---|---|---|---|"
OF_PARTS = "| decode workers | policy | from then on | requests | failed | reused | best | even |\n" + "|---" * 8 + "|"


def _lines(name: str, policy: str, routing: Routing, f: dict[str, Any], args: argparse.Namespace) -> list[str]:
    if args.happens:
        return [
            f"| {routing.decodes} | {policy} | {part} | {g['requests']} | {g['failed']} | {g['reused']:.3f} "
            f"| {g['best']:.3f} | {g['even']:.2f} |"
            for part, g in f["parts"].items()
        ]
    if args.prefills > 1:
        return [
            f"| {name} | {routing.prefills} | {policy.partition('/')[0]}/{routing.prefill} | {f['prefill_reused']:.3f} "
            f"| {f['prefill_best']:.3f} | {f['prefill_even']:.2f} |"
        ]
    return [
        f"| {name} | {routing.decodes} | {policy} | {f['reused']:.3f} | {f['one']:.3f} | {f['best']:.3f} "
        f"| {f['even']:.2f} | {f['running']:.0f} |"
    ]


def main() -> int:
    """Run everything that was asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", default="chat,trace", help=f"of {', '.join(WORKLOADS)} (default: chat,trace)")
    parser.add_argument("--workers", default="2,4", help="decode workers (default: 2,4)")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"GATEWAY/POLICY[:{'|'.join(TUNED)}], of decode")
    parser.add_argument("--prefills", type=int, default=1, help="prefill workers (default: 1)")
    parser.add_argument("--prefill-policies", default="round_robin", help="of prefill (default: round_robin)")
    parser.add_argument("--happens", action="store_true", help="flush, restart, remove and add a decode worker")
    parser.add_argument("--trace", metavar="FILE", help="Mooncake-format trace")
    parser.add_argument("--limit", type=int, default=0, help="requests of the trace; 0: all")
    parser.add_argument("--requests", type=int, default=1500, help="of chat and shared, per worker")
    parser.add_argument("--pace", type=float, default=5.0, help="simulated seconds in a real one, at most (default: 5)")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the gateways")
    args = parser.parse_args()
    # The gateway asks each worker first whether it speaks HTTP/2.
    logging.disable(logging.ERROR)
    print(OF_PARTS if args.happens else OF_PREFILL if args.prefills > 1 else HEAD, flush=True)
    for name, workers in itertools.product(args.workloads.split(","), map(int, args.workers.split(","))):
        for policy, prefill in itertools.product(args.policies.split(","), args.prefill_policies.split(",")):
            routing = Routing.parse(policy, prefill, args.prefills, workers)
            figures = asyncio.run(measure(name, routing, args))
            print("\n".join(_lines(name, policy, routing, figures, args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
