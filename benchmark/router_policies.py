"""What the policies of sglang-router leave decode workers to reuse: the real router before workers that only wait.

The router runs as it does in a PD deployment, with one prefill worker and several decode workers, which note who has
asked them and hold each answer back until it is due. Time is simulated: the next request is sent when the one before
has reached a worker, and an answer is given when all that comes before it has happened, so that the router always sees
the requests in flight that it would see, however slow this machine is. Only what the router does by the clock (it cuts
its tree down every so many seconds) goes by real seconds.

What each worker would have held is found out by the way, with the real decode tree and a pool of the real size. A
request is short text that stands for a long prompt, 8 characters for 64 tokens, and the bound of the router's own tree
is made smaller in proportion.

    python benchmark/router_policies.py --trace conversation_trace.jsonl      # chat and trace, 2 and 4 workers
    python benchmark/router_policies.py --workloads chat --workers 4 --policies manual,cache_aware:patient

Reused: tokens of prompts that the worker held. Best: all that any worker was ever asked or answered before. Even:
requests at the busiest worker over the mean of all, both as means over time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import itertools
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import aiohttp  # noqa: E402
import torch  # noqa: E402
from aiohttp import web  # noqa: E402
from decode_worker import DecodeWorker  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams  # noqa: E402
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sim.figures import Least  # noqa: E402
from sim.scale import SLOT, Many, Trace  # noqa: E402
from sim.workload import SPAN, Request, Workload  # noqa: E402

from sglang_pd_radix.tools.cluster import free_ports  # noqa: E402

POLICIES = (
    "random",
    "round_robin",
    "power_of_two",
    "cache_aware",
    "cache_aware:plain",
    "consistent_hashing",
    "manual",
    "manual:min_load",
)
# Options of the router, after a colon in --policies. plain: the router knows no prefill, and takes decode workers for
# ordinary ones.
TUNED: dict[str, list[str]] = {
    "plain": [],
    "patient": ["--balance-abs-threshold", "1024", "--balance-rel-threshold", "4"],
    "strict": ["--balance-abs-threshold", "16", "--balance-rel-threshold", "1.1"],
    "any": ["--cache-threshold", "0.05"],
    "half": ["--cache-threshold", "0.5"],
    "min_load": ["--assignment-mode", "min_load"],
}
# The router of the command line, whose options leave out two of its policies. (prefix_hash answers 503 in PD mode.)
LAUNCH = """
import sys
from sglang_router.launch_router import launch_router, parse_router_args
args = parse_router_args(sys.argv[2:])
if args.pd_disaggregation:
    args.prefill_policy, args.decode_policy = "round_robin", sys.argv[1]
else:
    args.policy = sys.argv[1]
launch_router(args)
"""
CHARS = 8
# Of the router's tree by default, for 4 characters a token.
TREE = (1 << 26) * CHARS // (4 * SLOT)
# Seconds until the first token, and from one to the next; as in the simulation of the same workloads.
TTFT, ITL = 0.5, 0.045


@dataclass(eq=False)
class Sent:
    """One request on its way: when it began and ended, in simulated seconds, and at which worker."""

    request: Request
    client: int
    began: float
    worker: int = -1
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    due: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task | None = None


class Servers:
    """The workers, all in this process."""

    def __init__(self) -> None:
        # By the end of their text.
        self.book: dict[str, Sent] = {}
        self._runners: list[web.AppRunner] = []

    async def start(self, ports: list[int]) -> None:
        """One server on each port; the first is prefill's."""
        for number, port in enumerate(ports):
            app = web.Application(client_max_size=1 << 26)
            app.router.add_post("/generate", self._prefill if number == 0 else self._decode(number - 1))
            app.router.add_get("/{path:.*}", self._told)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self._runners.append(runner)

    async def _told(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "served_model_name": "m", "status": "ready"})

    async def _prefill(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"text": "", "meta_info": {}})

    def _decode(self, worker: int):
        async def serve(request: web.Request) -> web.Response:
            sent = self.book.pop((await request.json())["text"][-CHARS:])
            sent.worker = worker
            sent.arrived.set()
            await sent.due.wait()
            return web.json_response({"text": "", "meta_info": {}})

        return serve

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


class Held:
    """What one decode worker holds: the real tree on a pool of numbers."""

    def __init__(self, workload: Workload):
        worker = DecodeWorker(workload.pool // SLOT, 1, max_reqs=8, max_len=8, reserved=0)
        assert isinstance(worker.tree, DecodeRadixCache)
        self.tree, self.allocator = worker.tree, worker.allocator
        self._locks: dict[int, Any] = {}
        # Tokens of prompts that were there when they came.
        self.reused = 0

    def begin(self, sent: Sent, slots: list[int]) -> None:
        self.reused += min(self.tree.peek(slots, None).length * SLOT, sent.request.length)
        self._insert(slots)
        self._locks[id(sent)] = self.tree.lock_found(self.tree.peek(slots, None))[1]

    def end(self, sent: Sent, slots: list[int]) -> None:
        self._insert(slots)
        self.tree.dec_lock_ref(self._locks.pop(id(sent)))

    def _insert(self, slots: list[int]) -> None:
        parts, node = self.tree.lock_found(self.tree.peek(slots, None))
        need = len(slots) - sum(len(part) for part in parts)
        if need > self.allocator.available_size():
            self.tree.evict_shortfall(need - self.allocator.available_size())
        new = self.allocator.alloc(need) if need else None
        # None: running requests hold everything. A real worker would have this one wait.
        if new is not None:
            self.tree.insert(InsertParams(key=RadixKey(slots), value=torch.cat([*parts, new])))
        self.tree.dec_lock_ref(node)


def text_of(slots: list[int], number: int) -> str:
    """Text for a prompt, equal where prompts are; the last piece is the request's own."""
    pieces = [hashlib.blake2s(slot.to_bytes(16, "big", signed=True), digest_size=4).hexdigest() for slot in slots]
    return "".join(pieces) + f"{number:0{CHARS}x}"


class Run:
    """One workload through one router."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.servers = Servers()
        self.held = [Held(workload) for _ in range(workload.decodes)]
        self.least = Least(1)
        self.lacking = self.asked = self.count = 0
        # Integrals over simulated time of requests at the busiest worker, and at each on average.
        self.busiest = self.mean = 0.0
        self._running = [0] * workload.decodes
        self._at = 0.0
        self._unique, self._order = itertools.count(1), itertools.count()
        # What is to happen: when, in which order, and the request that ends; or the one that is to be sent, and whose.
        self._events: list[tuple[float, int, Sent | tuple[Request, int]]] = []
        self._slots: dict[int, list[int]] = {}

    def _then(self, when: float, what: Sent | tuple[Request, int]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    async def go(self, url: str) -> None:
        """Let everything happen, one after the other."""
        first, clients = self.workload.rounds[0], self.workload.concurrency
        todo = iter(enumerate(first))
        for client, request in todo if clients is None else itertools.islice(todo, clients):
            self._then(request.arrival or 0.0, (request, client))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
            while self._events:
                now, _, what = heapq.heappop(self._events)
                passed, self._at = now - self._at, now
                self.busiest += max(self._running) * passed
                self.mean += sum(self._running) / len(self._running) * passed
                if not isinstance(what, Sent):
                    await self._send(session, url, Sent(*what, began=now))
                    continue
                await self._end(what)
                following = what.request.then
                if following is not None:
                    self._then(now + self.workload.think, (following, what.client))
                elif clients is not None:
                    for client, request in itertools.islice(todo, 1):
                        self._then(now, (request, client))

    async def _send(self, session: aiohttp.ClientSession, url: str, sent: Sent) -> None:
        request = sent.request
        slots = self._slots[id(sent)] = request.slots(SLOT, self._unique)
        text = text_of(slots, self.count)
        self.servers.book[text[-CHARS:]] = sent

        async def ask() -> None:
            body = {"text": text, "sampling_params": {"max_new_tokens": request.answer}}
            headers = {"X-SMG-Routing-Key": str(sent.client)}
            async with session.post(url + "/generate", json=body, headers=headers) as reply:
                assert reply.status == 200, (reply.status, await reply.text())

        sent.task = asyncio.ensure_future(ask())
        arrived = asyncio.ensure_future(sent.arrived.wait())
        await asyncio.wait([sent.task, arrived], return_when=asyncio.FIRST_COMPLETED)
        assert sent.arrived.is_set(), await sent.task
        self.count += 1
        self.asked += request.length
        self.lacking += self.least.asked(slots)
        self.held[sent.worker].begin(sent, slots)
        self._running[sent.worker] += 1
        self._then(sent.began + TTFT + ITL * request.answer, sent)

    async def _end(self, sent: Sent) -> None:
        sent.due.set()
        assert sent.task is not None
        await sent.task
        slots, answer = self._slots.pop(id(sent)), sent.request.answer_key * SPAN
        said = range(answer, answer + (sent.request.answer // SLOT if answer else 0))
        if said:
            self.least.answered(slots, said)
        # Its last token has no KV, and so its last slot is not full.
        self.held[sent.worker].end(sent, [*slots, *said[:-1]])
        self._running[sent.worker] -= 1

    def figures(self) -> dict[str, float]:
        assert all(held.tree.audit([]) == [] for held in self.held)
        return {
            "requests": self.count,
            "reused": sum(held.reused for held in self.held) / self.asked,
            "best": 1 - self.lacking * SLOT / self.asked,
            "even": self.busiest / self.mean,
            "running": self.mean / self._at,
        }


def chat(workers: int, args: argparse.Namespace) -> Workload:
    """Conversations of up to 10 turns under one system prompt."""
    return Many(
        decodes=workers,
        documents=1,
        document=1024,
        turns=10,
        requests=args.requests * workers,
        concurrency=150 * workers,
        pool=800_000,
    ).make()


def trace(workers: int, args: argparse.Namespace) -> Workload:
    return Trace(file=args.trace or "", decodes=workers, limit=args.limit).make()


async def measure(name: str, workers: int, policy: str, args: argparse.Namespace) -> dict[str, float]:
    """Run one workload through a router with one policy; returns the figures."""
    run = Run({"chat": chat, "trace": trace}[name](workers, args))
    ports = free_ports(workers + 3)
    await run.servers.start(ports[: workers + 1])
    base, _, tuned = policy.partition(":")
    command = [sys.executable, "-c", LAUNCH, base, "--log-level", "error", "--host", "127.0.0.1"]
    command += ["--port", str(ports[-2]), "--prometheus-port", str(ports[-1])]
    command += ["--max-tree-size", str(TREE), "--eviction-interval-secs", "1"]
    decodes = [f"http://127.0.0.1:{port}" for port in ports[1 : workers + 1]]
    if tuned == "plain":
        command += ["--worker-urls", *decodes]
    else:
        command += ["--pd-disaggregation", "--prefill", f"http://127.0.0.1:{ports[0]}", "8998"]
        command += [item for url in decodes for item in ("--decode", url)]
        command += TUNED[tuned] if tuned else []
    with open(args.log, "ab") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "SGLANG_PD_RADIX": "0"})
    try:
        url = f"http://127.0.0.1:{ports[-2]}"
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                try:
                    async with session.get(url + "/readiness") as reply:
                        if reply.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                assert router.poll() is None, f"the router has ended, see {args.log}"
                await asyncio.sleep(0.1)
        await run.go(url)
    finally:
        router.terminate()
        router.wait()
        await run.servers.stop()
    return run.figures()


HEAD = "| workload | decode workers | policy | reused | best | even | running, mean |\n|---|---|---|---|---|---|---|"


def main() -> int:
    """Run everything that was asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", default="chat,trace")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"POLICY or POLICY:{'|'.join(TUNED)}")
    parser.add_argument("--trace", metavar="FILE", help="Mooncake-format trace")
    parser.add_argument("--limit", type=int, default=0, help="requests of the trace; 0: all")
    parser.add_argument("--requests", type=int, default=1500, help="of the chat, per worker")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the routers")
    args = parser.parse_args()
    # The router asks each worker first whether it speaks HTTP/2.
    logging.disable(logging.ERROR)
    print(HEAD, flush=True)
    for name, workers in itertools.product(args.workloads.split(","), map(int, args.workers.split(","))):
        for policy in args.policies.split(","):
            f = asyncio.run(measure(name, workers, policy, args))
            print(
                f"| {name} | {workers} | {policy} | {f['reused']:.3f} | {f['best']:.3f} | {f['even']:.2f} "
                f"| {f['running']:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
