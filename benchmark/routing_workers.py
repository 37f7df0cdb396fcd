"""Stand-ins for the workers of a PD deployment, for benchmarks of what routes to them.

They speak as much of the engine's HTTP as a gateway asks for: health, model, server info, loads. `Servers` notes who
has asked which of them and holds each answer back until it is due. `Held` is what a worker would have in its cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from decode_worker import DecodeWorker
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


class Servers:
    """Prefill and decode workers, all in this process. ``load``: what one says of its load, by role and number."""

    def __init__(self, load: Callable[[str, int], dict[str, Any]]) -> None:
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
            path = request.path
            if path == "/health":
                return web.Response()
            if path == "/v1/models":
                card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sglang", "root": MODEL}
                return web.json_response({"object": "list", "data": [card]})
            if path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
                info = {"model_path": MODEL, "served_model_name": MODEL, "version": "0.5.10.post1"}
                return web.json_response({**info, "disaggregation_mode": role})
            if path == "/v1/loads":
                load = {"dp_rank": 0, **self._load(role, number)}
                return web.json_response({"version": "0.5.10.post1", "dp_rank_count": 1, "loads": [load]})
            return web.Response(status=404)

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
    """What one worker holds: the real tree on a pool of numbers, ``pool`` tokens."""

    def __init__(self, pool: int):
        worker = DecodeWorker(pool // SLOT, 1, max_reqs=8, max_len=8, reserved=0)
        assert isinstance(worker.tree, DecodeRadixCache)
        self.tree, self.allocator, self.size = worker.tree, worker.allocator, worker.size
        self._locks: dict[int, Any] = {}
        # Tokens of prompts that were there when they came.
        self.reused = 0

    def begin(self, sent: Sent, slots: list[int]) -> None:
        """A prompt has come: what of it is here is reused, and all of it is here now."""
        self.reused += min(self.tree.peek(slots, None).length * SLOT, sent.request.length)
        self._insert(slots)
        self._locks[id(sent)] = self.tree.lock_prefix(self.tree.peek(slots, None))[1]

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
