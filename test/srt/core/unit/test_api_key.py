"""Servers that are started with --api-key, and what the tools send them."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from fastapi import FastAPI
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level
from waiting import until

from sglang_pd_radix.environment import ADMIN_API_KEY
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Cluster, deployment, free_ports
from sglang_pd_radix.tools.cluster.local_http import API_KEY, freeze
from sglang_pd_radix.tools.cluster.local_http import http as ask
from sglang_pd_radix.tools.cluster.options import api_key
from sglang_pd_radix.tools.workers import empty_caches


@pytest.fixture
def guarded() -> Iterator[str]:
    """A server that answers who has the key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.headers.get("Authorization") == "Bearer the key" else 401)
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("key, status", [(None, 401), ("", 401), ("another", 401), ("the key", 200)])
def test_the_key_of_the_environment_is_sent(guarded: str, key: str | None, status: int, monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)
    if key is not None:
        monkeypatch.setenv(API_KEY, key)
    assert ask(guarded)[0] == status


def test_the_router_has_the_key_of_the_workers():
    workers = [["--api-key", "k"], ["--x", "--api-key=k"]]
    assert api_key(workers) == "k" and api_key([[], ["--x"]]) is None
    for others in ([[]], [["--api-key", "other"]]):
        with pytest.raises(PdRadixError, match="give all of them the same, or none"):
            api_key(workers + others)


def test_a_deployment_with_a_key(tmp_path: Path, monkeypatch):
    def router_of(**options: list[str]) -> list[str]:
        return Cluster("m", log_dir=tmp_path, **options).plan()[-1].command

    assert "--api-key" not in router_of()
    command = router_of(common_args=["--api-key", "k"])
    assert command[command.index("--api-key") + 1] == "k"
    # What a user says of the router goes.
    command = router_of(common_args=["--api-key", "k"], router_args=["--api-key", "of the router"])
    assert command.count("--api-key") == 1 and command[command.index("--api-key") + 1] == "of the router"
    with pytest.raises(PdRadixError, match="--api-key"):
        router_of(prefill_args=["--api-key", "k"])
    assert API_KEY not in os.environ


@pytest.fixture(params=["the admin's"])
def worker(request) -> Iterator[Any]:
    """A server behind the engine's authentication, with its routes of an admin; ``asked`` has those that answered."""
    asked: list[str] = []
    app = FastAPI()

    def route(path: str, level: AuthLevel) -> None:
        app.post(path)(auth_level(level)(lambda: asked.append(path)))

    for path in ("/flush_cache", "/freeze_gc"):
        route(path, AuthLevel.ADMIN_OPTIONAL)
    route("/generate", AuthLevel.NORMAL)
    add_api_key_middleware(app, api_key="the key", admin_api_key=request.param)
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "a server")
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", asked=asked)
    server.should_exit = True
    thread.join()


def test_what_an_admin_alone_may_do_is_done_with_the_admins_key(worker, monkeypatch):
    monkeypatch.setenv(API_KEY, "the key")
    monkeypatch.setenv(ADMIN_API_KEY, "the admin's")
    assert not freeze(worker.url) and ask(worker.url + "/generate", {})[0] == 200
    empty_caches(cast(Cluster, None), [worker.url])
    assert worker.asked == ["/freeze_gc", "/generate", "/flush_cache"]


@pytest.mark.parametrize("worker", [None], indirect=True)
def test_one_that_has_no_key_for_its_admin_is_asked_with_the_other(worker, monkeypatch):
    monkeypatch.setenv(API_KEY, "the key")
    monkeypatch.setenv(ADMIN_API_KEY, "the admin's")
    assert not freeze(worker.url)
    empty_caches(cast(Cluster, SimpleNamespace(check=bool)), [worker.url])
    assert worker.asked == ["/freeze_gc", "/flush_cache"]


def test_where_the_admins_key_is_missing_it_is_said(worker, monkeypatch):
    monkeypatch.setenv(API_KEY, "the key")
    monkeypatch.delenv(ADMIN_API_KEY, raising=False)
    way_out = f"HTTP 401 (it asks for a key, which {API_KEY}, or with --admin-api-key {ADMIN_API_KEY}, has to have)"
    assert freeze(worker.url) == f"garbage collections will pause it: /freeze_gc answers {way_out}"
    with pytest.raises(PdRadixError) as raised:
        empty_caches(cast(Cluster, SimpleNamespace(check=bool)), [worker.url])
    assert str(raised.value) == f"{worker.url}/flush_cache answers {way_out}"
    said: list[str] = []
    startup: Any = SimpleNamespace(report=lambda process, phase: said.append(phase))
    deployment.Cluster._freeze(cast(Any, worker), startup)
    assert said == [f"ready, but {freeze(worker.url)}"] and not worker.asked
    assert freeze("http://127.0.0.1:9") == "garbage collections will pause it: /freeze_gc does not answer"


@pytest.mark.parametrize(
    "of_prefill, of_decode, key", [("a", "a", "a"), ("a", "b", None), ("a", None, None), (None, None, None)]
)
def test_the_admins_key_of_a_deployment_is_that_of_all(tmp_path: Path, of_prefill, of_decode, key):
    def args(of_role: str | None) -> list[str]:
        return [] if of_role is None else ["--admin-api-key", of_role]

    made = Cluster("m", log_dir=tmp_path, prefill_args=args(of_prefill), decode_args=args(of_decode))
    assert made.spec.admin_api_key == key
