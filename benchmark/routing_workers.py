"""Stand-ins for the workers of a PD deployment, for benchmarks of what routes to them.

They speak as much of the engine's HTTP as a gateway asks for: health, model, server info, loads. `Servers` notes who
has asked which of them and holds each answer back until it is due. `Held` is what one scheduler would have in its
cache, and `Worker` the DP ranks of a worker, among which it chooses.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from decode_worker import DecodeWorker
from sglang.srt.managers.prefix_balance import PrefixBalance
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sim.scale import SLOT
from sim.workload import Request

MODEL = "m"
# The request's own end of a text.
CHARS = 8


@dataclass(eq=False)
class Leg:
    """One of the two halves of a request: the worker that it has reached, and when it may answer."""

    worker: int = -1
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    due: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Sent:
    """One request on its way, ``began`` in simulated seconds."""

    request: Request
    client: int
    began: float
    prefill: Leg = field(default_factory=Leg)
    decode: Leg = field(default_factory=Leg)
    task: asyncio.Task[int] | None = None
    over: bool = False


def told(path: str, role: str, loads: list[dict[str, Any]]) -> web.Response:
    """What a worker of a role says of itself to a gateway. loads: of each of its DP ranks."""
    if path == "/health":
        return web.Response()
    if path == "/v1/models":
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sglang", "root": MODEL}
        return web.json_response({"object": "list", "data": [card]})
    if path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        info = {"model_path": MODEL, "served_model_name": MODEL, "version": "0.5.10.post1"}
        return web.json_response({**info, "disaggregation_mode": role})
    if path == "/v1/loads":
        by_rank = [{"dp_rank": rank, **load} for rank, load in enumerate(loads)]
        return web.json_response({"version": "0.5.10.post1", "dp_rank_count": len(loads), "loads": by_rank})
    return web.Response(status=404)


class Servers:
    """Prefill and decode workers, all in this process. ``load``: what the ranks of one say, by role and number."""

    def __init__(self, load: Callable[[str, int], list[dict[str, Any]]]) -> None:
        # By the end of their text.
        self.book: dict[str, Sent] = {}
        self._load = load
        self._runners: dict[tuple[str, int], web.AppRunner] = {}

    async def start(self, role: str, number: int, port: int) -> None:
        """Let one worker listen. ``role``: "prefill" or "decode"."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._serve(role, number))
        app.router.add_get("/{path:.*}", self._tell(role, number))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self._runners[role, number] = runner

    async def stop(self, role: str, number: int) -> None:
        """Refuse connections from now on, as a worker that has ended."""
        await self._runners.pop((role, number)).cleanup()

    async def stop_all(self) -> None:
        for key in list(self._runners):
            await self.stop(*key)

    def _tell(self, role: str, number: int):
        async def tell(request: web.Request) -> web.Response:
            return told(request.path, role, self._load(role, number) if request.path == "/v1/loads" else [])

        return tell

    def _serve(self, role: str, number: int):
        async def serve(request: web.Request) -> web.Response:
            sent = self.book[(await request.json())["text"][-CHARS:]]
            leg: Leg = getattr(sent, role)
            leg.worker = number
            leg.arrived.set()
            await leg.due.wait()
            return web.json_response({"text": "", "meta_info": {}})

        return serve


class Held:
    """What one scheduler holds: the real tree on a pool of numbers, ``pool`` tokens."""

    def __init__(self, pool: int):
        worker = DecodeWorker(pool // SLOT, 1, max_reqs=8, max_len=8, reserved=0)
        assert isinstance(worker.tree, DecodeRadixCache)
        self.tree, self.allocator, self.size = worker.tree, worker.allocator, worker.size
        self._locks: dict[int, Any] = {}

    def begin(self, sent: Sent, slots: list[int]) -> int:
        """A prompt has come, and all of it is here now. Returns how many of its tokens were here before."""
        reused = min(self.longest(slots), sent.request.length)
        self._insert(slots)
        self._locks[id(sent)] = self.tree.lock_prefix(self.tree.peek(slots, None))[1]
        return reused

    def longest(self, slots: list[int]) -> int:
        """Tokens of a prompt that are here."""
        return self.tree.peek(slots, None).length * SLOT

    def end(self, sent: Sent, slots: list[int]) -> None:
        """It has ended, and left ``slots``."""
        self._insert(slots)
        self.tree.dec_lock_ref(self._locks.pop(id(sent)))

    def forget(self) -> None:
        """Everything goes that no request has in use."""
        self.tree.evict_shortfall(self.tree.evictable_size())

    @property
    def in_use(self) -> int:
        """Slots of requests that run."""
        return self.size - self.allocator.available_size() - self.tree.evictable_size()

    def _insert(self, slots: list[int]) -> None:
        parts, node = self.tree.lock_prefix(self.tree.peek(slots, None))
        need = len(slots) - sum(len(part) for part in parts)
        if need > self.allocator.available_size():
            self.tree.evict_shortfall(need - self.allocator.available_size())
        new = self.allocator.alloc(need) if need else None
        # None: running requests hold everything. A real worker would have this one wait.
        if new is not None:
            self.tree.insert(InsertParams(key=RadixKey(slots), value=torch.cat([*parts, new])))
        self.tree.dec_lock_ref(node)


class Worker:
    """A worker of ``ranks`` DP ranks, each with a pool of so many tokens.

    method: how a rank is chosen, by the engine's own ``longest_prefix`` or by turns.
    """

    def __init__(self, pool: int, ranks: int = 1, method: str = "longest_prefix"):
        self.ranks = [Held(pool) for _ in range(ranks)]
        self.method = method
        self.balance = PrefixBalance(ranks, pool, SLOT)
        self._turn = itertools.cycle(range(ranks))
        # The rank of each request that runs.
        self._at: dict[int, int] = {}

    def begin(self, sent: Sent, slots: list[int], now: float) -> int:
        """As of `Held`, at ``now``, simulated seconds."""
        rank = self._at[id(sent)] = self._choose(sent, slots, now)
        return self.ranks[rank].begin(sent, slots)

    def end(self, sent: Sent, slots: list[int], now: float) -> None:
        """As of `Held`. The rank says by the way what it has to hold, as a worker's does with its answers."""
        rank = self._at.pop(id(sent))
        self.ranks[rank].end(sent, slots)
        self.balance.report(rank, self.ranks[rank].in_use * SLOT, now)

    def rank_of(self, sent: Sent) -> int:
        return self._at[id(sent)]

    def longest(self, slots: list[int]) -> int:
        return max(held.longest(slots) for held in self.ranks)

    def forget(self) -> None:
        """It is told to flush."""
        self.balance.forget()
        for held in self.ranks:
            held.forget()

    @property
    def sound(self) -> bool:
        return all(held.tree.audit([]) == [] for held in self.ranks)

    def _choose(self, sent: Sent, slots: list[int], now: float) -> int:
        if len(self.ranks) == 1:
            return 0
        if self.method == "turns":
            return next(self._turn)
        # The tokens of one slot are all the same, and nobody shares a part of a slot.
        tokens = [slot for slot in slots for _ in range(SLOT)][: sent.request.length]
        return self.balance.choose(tokens, None, [True] * len(self.ranks), now)
