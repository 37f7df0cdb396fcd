"""What a gateway makes of a worker that fails: what the client is answered, how often workers are asked, by which room.

The real gateway before two prefill and two decode workers that only answer, of which the first of a role fails in one
way. Each request is noted with its room where it comes, and so it is seen whether a second attempt is a request of its
own: a room that comes to one role twice would be a duplicate.

    python benchmark/gateway_retries.py        # smg as `pd-radix up` runs it, and without retries
    python benchmark/gateway_retries.py --policies sglang-router/round_robin

Attempts: of the decode role, or of prefill, for all requests. Twice: rooms that came to one role more than once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before the engine is imported, which warns of what a CPU host lacks.
warnings.simplefilter("ignore")

import aiohttp  # noqa: E402
from aiohttp import web  # noqa: E402
from routing_gateway import GatewayUnderTest, Routing  # noqa: E402
from routing_workers import MODEL, told  # noqa: E402

from sglang_pd_radix.tools.cluster import free_ports  # noqa: E402

# How the first worker of a role fails: a status that it answers with, or what it does to the connection.
FAILS = ("refuses", "closes", "breaks off", "400", "500", "503")
REQUESTS = 10


@dataclass
class Asked:
    """Rooms that have come to each role, and how the first worker of ``role`` fails."""

    role: str
    fails: str
    rooms: dict[str, list[int]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def app(self, role: str, number: int) -> web.Application:
        async def generate(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.rooms[role].append(body["bootstrap_room"])
            if (role, number) == (self.role, 0):
                if self.fails.isdigit():
                    return web.json_response({"error": {"message": "fails"}}, status=int(self.fails))
                return await broken(request, begun=self.fails == "breaks off")
            if body.get("stream"):
                return await streamed(request)
            return web.json_response({"text": "whole", "meta_info": {}})

        async def tell(request: web.Request) -> web.Response:
            return told(request.path, role, [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}])

        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/{path:.*}", tell)
        return app


async def streamed(request: web.Request) -> web.StreamResponse:
    """An answer of two pieces."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for piece in ('{"text": "who"}', '{"text": "whole"}', "[DONE]"):
        await reply.write(f"data: {piece}\n\n".encode())
    return reply


async def broken(request: web.Request, begun: bool) -> web.StreamResponse:
    """The connection ends without an answer, or within one."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    if begun:
        await reply.prepare(request)
        await reply.write(b'data: {"text": "who"}\n\n')
    assert request.transport is not None
    request.transport.close()
    return reply


async def ask(gateway: GatewayUnderTest, number: int, stream: bool) -> str:
    """What one client is answered: a status, and of 200 whether it is whole."""
    body = {"model": MODEL, "text": f"request {number}", "stream": stream, "sampling_params": {"max_new_tokens": 8}}
    try:
        async with gateway.session.post(gateway.url + "/generate", json=body) as reply:
            said = await reply.text()
    except aiohttp.ClientError:
        return "broken off"
    if reply.status != 200:
        return str(reply.status)
    return "200" if "whole" in said else "200, not whole"


async def measure(routing: Routing, role: str, fails: str, stream: bool, log: Path) -> dict[str, Any]:
    """What comes of ``REQUESTS`` requests, one after the other."""
    asked, runners = Asked(role, fails), []
    ports = free_ports(4)
    at = [f"http://127.0.0.1:{port}" for port in ports]
    refusing: web.TCPSite | None = None
    for number, port in enumerate(ports):
        of = "prefill" if number < 2 else "decode"
        runner = web.AppRunner(asked.app(of, number % 2), access_log=None)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        if (of, number % 2) == (role, 0):
            refusing = site
    try:
        async with GatewayUnderTest(routing, at[:2], at[2:], log).running() as gateway:
            if fails == "refuses":
                assert refusing is not None
                await refusing.stop()
            began, answers = time.monotonic(), Counter[str]()
            longest = 0.0
            for number in range(REQUESTS):
                sent = time.monotonic()
                answers[await ask(gateway, number, stream)] += 1
                longest = max(longest, time.monotonic() - sent)
            return {
                "answers": dict(answers),
                "attempts": {role: len(rooms) for role, rooms in asked.rooms.items()},
                "twice": sum(count > 1 for rooms in asked.rooms.values() for count in Counter(rooms).values()),
                "longest_s": longest,
                "seconds": time.monotonic() - began,
            }
    finally:
        for runner in runners:
            with contextlib.suppress(RuntimeError):
                await runner.cleanup()


def main() -> int:
    """Run everything that was asked for and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--policies", default="smg/round_robin,smg/round_robin:no_retries", help="as of router_policies"
    )
    parser.add_argument("--roles", default="prefill,decode", help="of the worker that fails")
    parser.add_argument("--fails", default=",".join(FAILS), help="how")
    parser.add_argument("--stream", action="store_true", help="ask for streamed answers")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the gateways")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    print(
        "| gateway | worker | fails | answers | attempts at prefill, decode | twice | longest, s |\n" + "|---" * 7 + "|"
    )
    for policy in args.policies.split(","):
        for role in args.roles.split(","):
            for fails in args.fails.split(","):
                routing = Routing.parse(policy, "round_robin", 2, 2)
                f = asyncio.run(measure(routing, role, fails, args.stream, args.log))
                answers = ", ".join(f"{count} x {answer}" for answer, count in sorted(f["answers"].items()))
                attempts = ", ".join(str(f["attempts"][of]) for of in ("prefill", "decode"))
                print(
                    f"| {policy} | {role} | {fails} | {answers} | {attempts} | {f['twice']} | {f['longest_s']:.1f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
