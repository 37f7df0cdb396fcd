"""SIGTERM on a worker of a pair: it refuses what is new, ends what it has, and exits with status 0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draining_worker
import pytest
import requests
from engine_classes import engine_class
from fastapi import FastAPI
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import drain
from sglang.srt.managers.samples import sample_room
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient
from test_top import workers
from waiting import until

#: The engine's own class, below all that is laid over it.
ENGINE = engine_class(TokenizerManager)

# ---- whom SIGTERM drains ----


def args(mode: str = "decode", flag: bool = True, tokenizers: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        disaggregation_mode=mode, disaggregation_decode_enable_radix_cache=flag, tokenizer_worker_num=tokenizers
    )


@pytest.mark.parametrize(
    "of, given, seconds",
    [
        (args(), None, drain.DEFAULT_S),
        (args(), "20", 20),
        (args(), "0", None),
        (args(flag=False), None, None),
        (args(flag=False), "20", 20),
        (args("prefill", flag=False), None, None),
        (args("prefill", flag=False), " 7.5 ", 7.5),
        (args("null", flag=False), "20", None),
        (args(tokenizers=2), "20", None),
    ],
)
def test_who_drains(monkeypatch, of, given, seconds):
    monkeypatch.delenv(drain.VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(drain.VARIABLE, given)
    assert drain.drain_seconds(of) == seconds


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "nan"])
def test_what_is_no_time_is_refused(monkeypatch, given):
    monkeypatch.setenv(drain.VARIABLE, given)
    with pytest.raises(ValueError, match=f"{drain.VARIABLE} is '{given}': give seconds"):
        drain.drain_seconds(args())


def test_without_a_server_of_its_own_sigterm_is_the_engines(monkeypatch):
    """As in a front end that has the engine in its own process."""
    monkeypatch.delenv(drain.VARIABLE, raising=False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert drain.Drain.of(args()) is None
    manager, engines = object.__new__(TokenizerManager), []
    manager.drain, manager.disaggregation_mode = None, DisaggregationMode.DECODE

    async def engines_own(self) -> None:
        engines.append(self)

    monkeypatch.setattr(ENGINE, "sigterm_watchdog", engines_own)
    asyncio.run(manager.sigterm_watchdog())
    assert engines == [manager]


def test_a_prefill_without_a_drain_sends_first_what_its_clients_have_been_answered_for(monkeypatch):
    """They are answered when a prompt has been computed, and the engine ends the worker when nobody waits."""
    manager, events = object.__new__(TokenizerManager), []
    manager.drain, manager.disaggregation_mode = None, DisaggregationMode.PREFILL
    manager.server_args = SimpleNamespace(tokenizer_worker_num=1)
    manager.server_status, manager.gracefully_exit = SimpleNamespace(name="Up"), True
    manager.rid_to_state, idle = {"asked": 1}, [False, False, True]

    async def state() -> list[dict[str, Any]]:
        events.append(f"idle: {idle[0]}")
        return [{"kv_pool": {"idle": idle.pop(0)}}]

    async def engines_own(self) -> None:
        events.append("ends")

    async def sleep(seconds: float) -> None:
        events.append(f"{len(manager.rid_to_state)} unanswered")
        manager.rid_to_state.clear()

    manager.get_internal_state = state
    monkeypatch.setattr(ENGINE, "sigterm_watchdog", engines_own)
    monkeypatch.setattr(drain.asyncio, "sleep", sleep)
    asyncio.run(manager.sigterm_watchdog())
    waits = ["idle: False", "0 unanswered"]
    assert events == ["1 unanswered", *waits, *waits, "idle: True", "ends"]


# ---- what is refused ----

# Routes of the engine that bring no work for a scheduler's queues.
CONTROL = """set_internal_state flush_cache clear_hicache_storage_backend hicache start_profile stop_profile
set_trace_level freeze_gc start_expert_distribution_record stop_expert_distribution_record
dump_expert_distribution_record update_weights_from_disk init_weights_send_group_for_remote_instance
send_weights_to_remote_instance init_weights_update_group destroy_weights_update_group
update_weights_from_tensor update_weights_from_distributed update_weights_from_ipc update_weight_version
get_weights_by_name release_memory_occupation resume_memory_occupation weights_checker slow_down
load_lora_adapter load_lora_adapter_from_tensors unload_lora_adapter open_session close_session
configure_logging abort_request parse_function_call separate_reasoning pause_generation continue_generation
tokenize detokenize"""


def test_every_route_of_the_engine_is_work_or_not():
    routes = [(path, method) for path, method in engines_routes() if method in ("POST", "PUT")]
    assert ("/generate", "POST") in routes and ("/v1/chat/completions", "POST") in routes
    for path, method in routes:
        works = drain.brings_work({"path": path, "method": method})
        named = path.split("/")[1] in CONTROL.split() or path.endswith("/cancel")
        assert works != named, f"{method} {path}"


def engines_routes():
    for route in http_server.app.routes:
        for method in getattr(route, "methods", None) or ():
            yield route.path, method


def test_work_is_work_under_other_names(monkeypatch):
    """Behind a proxy that takes off a part of the path, and where Vertex AI or Ollama's clients name the routes."""
    behind = {"root_path": "/llm", "method": "POST"}
    assert drain.brings_work(behind | {"path": "/llm/generate"})
    assert drain.brings_work(behind | {"path": "/llm/v1/chat/completions"})
    assert not drain.brings_work(behind | {"path": "/llm/abort_request"})
    for variable in drain.WORK_NAMED:
        assert not drain.brings_work({"path": "/of/theirs", "method": "POST"})
        monkeypatch.setenv(variable, "/of/theirs")
        assert drain.brings_work({"path": "/of/theirs", "method": "POST"})
        assert drain.brings_work(behind | {"path": "/llm/of/theirs"})
        monkeypatch.delenv(variable)
    # The variables are those that the engine reads.
    folder = Path(http_server.__file__).parent
    assert all(f'"{variable}"' in "".join(p.read_text() for p in folder.rglob("*.py")) for variable in drain.WORK_NAMED)


@pytest.mark.parametrize("admin_key", [None, "the admin's"])
@pytest.mark.parametrize("given, status", [(None, 401), ("another", 401), ("the admin's", 401), ("the key", 503)])
def test_a_stranger_is_refused_as_ever_and_nobody_is_told(given, status, admin_key):
    """With --api-key. Else a stranger would end others' requests, by a word that this worker signs."""
    told: list[list[int]] = []
    app = FastAPI()
    app.post("/generate")(lambda: "done")
    add_api_key_middleware(app, api_key="the key", admin_api_key=admin_key)
    client = TestClient(app, headers={"Authorization": f"Bearer {given}"} if given else {})
    assert client.post("/generate").status_code == (200 if status == 503 else 401)
    manager: Any = SimpleNamespace(rid_to_state={}, server_args=args())
    manager._tell_peer = lambda part, reason: told.append(part.bootstrap_room)
    server: Any = SimpleNamespace(server_state=SimpleNamespace(connections=set()))
    drain.Drain(server, app, 60).close_door(manager)
    body = {"bootstrap_room": [777, 778], "bootstrap_host": "127.0.0.1", "bootstrap_port": 9}
    reply = client.post("/generate", json=body)
    assert (reply.status_code, told) == (status, [[777, 778]] if status == 503 else [])
    assert ("retry-after" in reply.headers) == (status == 503)


# ---- the other worker's half ----


def rooms(body: object, samples: bool = False) -> list[tuple]:
    said = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = drain.rooms_of(said, samples)
    return [(part.bootstrap_room, part.bootstrap_host, part.bootstrap_port) for part in parts]


def test_rooms_of_a_refused_request():
    one = {"bootstrap_room": 7, "bootstrap_host": "p", "bootstrap_port": 9}
    assert rooms(one) == [([7], "p", 9)]
    batch = {"bootstrap_room": [7, 8], "bootstrap_host": ["p", "q"], "bootstrap_port": [9, None]}
    assert rooms(batch) == [([7, 8], ["p", "q"], [9, None])]
    many = rooms({"bootstrap_room": list(range(300)), "bootstrap_host": "p", "bootstrap_port": [9] * 300})
    assert [len(part[0]) for part in many] == [300] and [len(part[2]) for part in many] == [300]


@pytest.mark.parametrize("params", [{"sampling_params": {"n": 3}}, {"sampling_params": [{"n": 3}]}, {"n": 3}])
def test_prefill_refuses_what_decode_would_ask_for_of_samples(params):
    ((told, _, _),) = rooms({"bootstrap_room": 7} | params, samples=True)
    assert told == [7, *(sample_room(7, i) for i in range(3))]
    # Prefill knows nothing of these before decode has spoken.
    assert rooms({"bootstrap_room": 7} | params, samples=False) == [([7], None, None)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"bootstrap_room": null}',
        b'{"bootstrap_room": []}',
    ],
)
def test_what_names_no_room_is_nobodys(body):
    assert rooms(body, samples=True) == []


@pytest.mark.parametrize("n", [1, True, 0, -1, 10**9, "3", None])
def test_what_is_no_number_of_samples_has_no_rooms(n):
    assert rooms({"bootstrap_room": 7, "n": n}, samples=True) == [([7], None, None)]
    assert rooms({"bootstrap_room": "x", "n": 2}, samples=True) == [(["x"], None, None)]


# ---- a process ----


class Worker:
    """A child process that runs draining_worker.py. A fork: its imports would take longer than all of these tests."""

    def __init__(self, folder: Path, timeout_s: float, **variables: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url, self.status = f"http://127.0.0.1:{self.port}", None
        self.out, self.log = folder / "out", folder / "log"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for number, path in ((1, self.out), (2, self.log)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
                os.environ.update(variables)
                draining_worker.main(self.port, timeout_s)
            finally:
                os._exit(98)
        self.wait(lambda: self.ask({"seconds": 0}) == (200, '"done"'), "an answer")
        self.child = int(self.out.read_text().split()[1])
        self.begun = self.out.read_text().count("works on")

    def wait(self, there: Callable[[], object], what: str) -> None:
        """Wait until something is there, which what has ended brings about no more."""

        def come() -> object:
            found = there()
            assert found or not self.over(), f"it ended before {what}: {self.told()}"
            return found

        until(come, what, self.told)

    def told(self) -> str:
        """Its output and log."""
        return self.out.read_text() + self.log.read_text()

    def works_on(self, count: int) -> None:
        """Wait until it has begun so many requests."""
        self.wait(lambda: self.out.read_text().count("works on") >= self.begun + count, f"{count} requests")

    def close_door(self) -> None:
        """Have it drain, and wait until it takes nothing new."""
        self.terminate()
        self.wait(lambda: "no new requests are accepted" in self.log.read_text(), "a closed door")

    def over(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if not self.over():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def ask(self, body: dict, path: str = "/generate") -> tuple[int, str]:
        """Status and answer; 0 and the error where there is none."""
        try:
            reply = requests.post(self.url + path, json=body, timeout=30)
        except requests.RequestException as e:
            return 0, str(e)
        return reply.status_code, reply.text

    def end(self) -> tuple[int, str, str]:
        """Its exit status, output and log."""
        until(lambda: self.over() and not child_lives(self.child), "its end", self.told)
        return self.status, self.out.read_text(), self.log.read_text()


def child_lives(pid: int) -> bool:
    """Whether a process goes on: one that was killed ends when it is next given a core, maybe after who killed it.

    Whether somebody has waited for it is nobody's business here.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def worker(tmp_path):
    worker = Worker(tmp_path, 20)
    yield worker
    worker.kill()


def test_what_it_has_ends_and_then_the_process(worker, tmp_path):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(worker.ask, {"seconds": 0, "busy": 2, "file": str(tmp_path / "end")})
        stream = pool.submit(worker.ask, {"seconds": 0, "file": str(tmp_path / "end")}, "/v1/completions")
        worker.works_on(2)
        worker.close_door()
        # What comes in the meantime.
        status, said = worker.ask({"seconds": 0, "bootstrap_room": 7})
        assert status == 503 and drain.REASON in said
        assert worker.ask({}, "/abort_request") == (200, '"heard"')
        began = time.monotonic()
        (tmp_path / "end").touch()
        assert running.result() == (200, '"done"')
        assert stream.result() == (200, "begun\ndone\nover\n")
        status, out, log = worker.end()
    assert status == 0, log
    # What the request leaves behind, and quiet. Had it waited for the end of its time, the status would be 1.
    assert time.monotonic() - began >= 2 + drain.QUIET_S
    assert "told [7]" in out and "everything has ended" in log


def half_sent(worker: Worker, body: dict) -> tuple[socket.socket, bytes]:
    """A connection over which a part of a request has come, and the rest of it."""
    said = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    asked = worker.out.read_text().count("asked /generate")
    connection = socket.create_connection(("127.0.0.1", worker.port), timeout=30)
    connection.sendall(head % len(said) + said[:5])
    worker.wait(lambda: worker.out.read_text().count("asked /generate") > asked, "the head of a request")
    return connection, said[5:]


def test_a_request_whose_body_is_still_coming_is_one(worker):
    """An image, over a slow way. Its scheduler does not know of it, and it has passed the door."""
    connection, rest = half_sent(worker, {"seconds": 2})
    worker.close_door()
    # Longer than there must have been nothing.
    time.sleep(2 * drain.QUIET_S)
    connection.sendall(rest)
    answer = b""
    while part := connection.recv(4096):
        answer += part
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'"done"')
    status, _, log = worker.end()
    assert status == 0, log


def test_what_is_refused_is_not_waited_for(monkeypatch, tmp_path):
    """A gateway that asks again and again, with bodies that take their time, would keep a worker from ending."""
    monkeypatch.setattr(drain, "CLOSE_S", 1.0)
    worker = Worker(tmp_path, 15)
    try:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(worker.ask, {"seconds": 0, "file": str(tmp_path / "end")})
            worker.works_on(1)
            worker.close_door()
            connection, _ = half_sent(worker, {"seconds": 2})
            (tmp_path / "end").touch()
            assert running.result() == (200, '"done"')
            status, _, log = worker.end()
            connection.close()
    finally:
        worker.kill()
    # It would have been cut off when the time was up, with status 1.
    assert status == 0 and "everything has ended" in log, log


def test_a_request_whose_body_does_not_come_is_cut_off(monkeypatch, tmp_path):
    for wait in ("ABORT_S", "CLOSE_S"):
        monkeypatch.setattr(drain, wait, 1.0)
    worker = Worker(tmp_path, 1)
    try:
        connection, _ = half_sent(worker, {"seconds": 2})
        worker.terminate()
        status, _, log = worker.end()
        connection.close()
    finally:
        worker.kill()
    assert status == 1 and "1 requests are still arriving" in log, log


def test_what_does_not_end_in_time_is_cut_off(monkeypatch, tmp_path):
    # It goes on when all have been told, long before that.
    monkeypatch.setattr(drain, "ABORT_S", 600.0)
    worker = Worker(tmp_path, 1)
    try:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(worker.ask, {"seconds": 600})
            worker.works_on(1)
            began = time.monotonic()
            worker.terminate()
            assert running.result() == (200, '"aborted"') and time.monotonic() - began >= 1
            status, out, log = worker.end()
    finally:
        worker.kill()
    assert status == 1 and "aborted 1" in out and "1 requests are left" in log


def test_a_gateway_lets_go_before_anything_is_refused(tmp_path):
    with workers(1) as (gateway,):
        worker = Worker(tmp_path, 20, SGLANG_DISAGGREGATION_GATEWAYS=f"http://{gateway.address}")
        try:
            listed = {"id": "x", "url": worker.url, "worker_type": "prefill", "is_healthy": True}
            gateway.answers["/workers"], begun = {"workers": [listed]}, []
            # Its own and the workers' are one.
            gateway.key = "of the workers"

            def let_go(path: str) -> int:
                begun.append(worker.ask({"seconds": 0}))
                return 202

            gateway.on_delete = let_go
            worker.terminate()
            worker.wait(lambda: begun, "a word to the gateway")
            # It has not let go yet.
            assert worker.ask({"seconds": 0}) == (200, '"done"')
            listed["status"] = "draining"
            status, _, log = worker.end()
        finally:
            worker.kill()
        assert begun == [(200, '"done"')] and status == 0
        assert log.index("no longer sends requests") < log.index("no new requests are accepted")


def test_a_scheduler_that_does_not_answer_is_not_waited_for_where_the_engine_would_not():
    """Its health check has failed, and no request is here."""
    asked = []

    async def never() -> list[dict]:
        asked.append(time.monotonic())
        manager.server_status.name = "UnHealthy"
        await asyncio.sleep(600)
        return []

    manager: Any = SimpleNamespace(rid_to_state={}, server_status=SimpleNamespace(name="Up"), get_internal_state=never)
    server: Any = SimpleNamespace(server_state=SimpleNamespace(connections=[]))

    async def left() -> str:
        return await drain.Drain(server, None, 60).wait_empty(manager, time.monotonic() + 60)

    began = time.monotonic()
    assert asyncio.run(left()) == "the scheduler does not answer"
    assert time.monotonic() - began < 30 and len(asked) == 1
