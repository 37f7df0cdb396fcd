"""A worker's HTTP server without an engine, for a process of its own.

The server, its app and what ends them are real; the tokenizer manager is what `Drain` asks of one, and a request takes
as many seconds as its body says, or until there is a file that it names. SIGTERM is taken as the engine takes it: by
the loop, at the first request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from sglang.srt.managers import drain


def tell(*words: object) -> None:
    """Say so on the process's own stdout, whatever a test has made of Python's."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Manager:
    """What the drain asks of a tokenizer manager; says on stdout what it is asked for."""

    def __init__(self, timeout_s: float, server: uvicorn.Server, app: FastAPI, port: int) -> None:
        self.rid_to_state: dict[int, object] = {}
        self.gracefully_exit, self._subprocess_watchdog = False, None
        self.server_status = SimpleNamespace(name="Up")
        self.server_args = SimpleNamespace(
            disaggregation_mode="prefill", host="127.0.0.1", port=port, api_key="of the workers"
        )
        self.drain = drain.Drain(server, app, timeout_s)
        self.busy_until, self.aborted, self.task = 0.0, asyncio.Event(), None

    def start(self) -> None:
        if self.task is None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, self, "gracefully_exit", True)
            self.task = asyncio.create_task(self.drain.run(self))

    def _tell_peer(self, part: SimpleNamespace, reason: str) -> None:
        tell("told", part.bootstrap_room)

    def dump_requests_before_crash(self) -> None:
        pass

    def abort_request(self, abort_all: bool) -> None:
        tell("aborted", len(self.rid_to_state))
        self.aborted.set()

    async def get_internal_state(self) -> list[dict]:
        return [{"kv_pool": {"idle": time.monotonic() >= self.busy_until}}, {}]


def main(port: int, timeout_s: float) -> None:
    logging.basicConfig(level=logging.INFO, stream=open(2, "w", closefd=False), force=True)
    app = FastAPI()

    async def entry(scope, receive, send):
        # When the server knows of the request, whose body may still be coming; in front of a door too.
        if scope["type"] == "http":
            tell("asked", scope["path"])
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(entry, port=port, log_level="warning", loop="uvloop"))
    manager = Manager(timeout_s, server, app, port)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    tell("child", child.pid)

    async def ends_of(body: dict) -> None:
        await asyncio.sleep(body["seconds"])
        while "file" in body and not Path(body["file"]).exists():
            await asyncio.sleep(0.02)

    async def work(body: dict) -> str:
        manager.start()
        manager.rid_to_state[id(body)] = body
        tell("works on", body["seconds"])
        ends = asyncio.create_task(ends_of(body))
        aborted = asyncio.create_task(manager.aborted.wait())
        await asyncio.wait({ends, aborted}, return_when=asyncio.FIRST_COMPLETED)
        # Pages in quarantine outlive the request.
        manager.busy_until = max(manager.busy_until, time.monotonic() + body.get("busy", 0))
        del manager.rid_to_state[id(body)]
        return "aborted" if manager.aborted.is_set() else "done"

    @app.post("/generate")
    async def generate(request: Request):
        return await work(await request.json())

    @app.post("/v1/completions")
    async def stream(request: Request):
        body = await request.json()

        async def lines():
            yield "begun\n"
            yield await work(body) + "\n"
            # The answer is not all there when the manager has forgotten the request.
            await asyncio.sleep(1.5)
            yield "over\n"

        return StreamingResponse(lines())

    @app.post("/abort_request")
    async def abort():
        return "heard"

    server.run()
    # Only a drain ends it with status 0.
    os._exit(99)
