"""A real gateway before workers, for benchmarks of how it routes: its policies and settings, and its own API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from routing_workers import CHARS, MODEL, Sent
from sim.scale import SLOT

from sglang_pd_radix.tools.cluster import GATEWAYS, SMG, Gateway, free_ports, gateway_options

POLICIES = (
    *(f"smg/{policy}" for policy in SMG.policies if policy != "manual"),
    "smg/cache_aware:as_is",
    "smg/manual:min_load",
    *(f"sglang-router/{policy}" for policy in ("round_robin", "cache_aware", "cache_aware:plain", "manual:min_load")),
)
# Those that look at the header X-SMG-Routing-Key, which nobody else is sent.
KEYED = ("manual", "consistent_hashing")
# Of the gateway's tree by default, for 4 characters a token.
TREE = (1 << 26) * CHARS // (4 * SLOT)
# Options of the gateway, after a colon in --policies, joined by "+". plain: it knows no prefill, and takes decode
# workers for ordinary ones.
TUNED: dict[str, list[str]] = {
    "plain": [],
    "patient": ["--balance-abs-threshold", "1024", "--balance-rel-threshold", "4"],
    "strict": ["--balance-abs-threshold", "16", "--balance-rel-threshold", "1.1"],
    "stricter": ["--balance-abs-threshold", "4", "--balance-rel-threshold", "1.05"],
    "abs4": ["--balance-abs-threshold", "4"],
    "abs6": ["--balance-abs-threshold", "6"],
    "abs64": ["--balance-abs-threshold", "64"],
    "abs8": ["--balance-abs-threshold", "8"],
    "abs16": ["--balance-abs-threshold", "16"],
    "rel1.1": ["--balance-rel-threshold", "1.1"],
    "rel1.2": ["--balance-rel-threshold", "1.2"],
    "rel1.15": ["--balance-rel-threshold", "1.15"],
    "rel1.3": ["--balance-rel-threshold", "1.3"],
    # As it is when nobody says otherwise.
    "third": ["--cache-threshold", "0.3"],
    "rel1.5": ["--balance-rel-threshold", "1.5"],
    "none": ["--cache-threshold", "0.0"],
    "twentieth": ["--cache-threshold", "0.05"],
    "tenth": ["--cache-threshold", "0.1"],
    "usage": ["--balance-token-usage-threshold", "0.05"],
    "kv5": ["--least-load-kv-pressure-weight", "5"],
    "kv20": ["--least-load-kv-pressure-weight", "20"],
    "never": ["--load-monitor-interval", "86400"],
    "most": ["--cache-threshold", "0.7"],
    "half": ["--cache-threshold", "0.5"],
    # As many tokens as the workers of the trace have together, where the gateway's own bound is twice that.
    "small": ["--max-tree-size", str(TREE // 2)],
    "no_retries": ["--disable-retries"],
    "min_load": ["--assignment-mode", "min_load"],
    # As `pd-radix up` ran it until 2026-11-24.
    "before": ["--cache-threshold", "0.05", "--balance-rel-threshold", "1.2", "--balance-abs-threshold", "64"],
    # As smg is when nobody says otherwise; `pd-radix up` switches off the first.
    "as_is": [
        "--worker-overload-protection",
        "--cache-threshold",
        "0.3",
        "--balance-rel-threshold",
        "1.5",
        "--balance-abs-threshold",
        "64",
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
# Real seconds between two looks of the gateway at its workers' load.
LOOK_S = 2


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


class GatewayUnderTest:
    """The gateway's process, and what its clients and its operator ask of it."""

    def __init__(self, routing: Routing, prefill: Sequence[str], decode: Sequence[str], log: Path):
        self.routing, self._log = routing, log
        port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._command = routing.command(prefill, decode, port, metrics_port)
        self._process: subprocess.Popen[bytes] | None = None
        self.session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[GatewayUnderTest]:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
            try:
                await self.start()
                yield self
            finally:
                self.stop()

    async def start(self) -> None:
        """Until it is ready. Raises AssertionError if it ends instead."""
        with open(self._log, "ab") as out:
            env = {**os.environ, "SGLANG_PD_RADIX": "0"}
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out, env=env)
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(self.url + "/readiness") as reply:
                    if reply.status == 200:
                        return
            assert self._process.poll() is None, f"the gateway has ended, see {self._log}"
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

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
