"""Servers that are started with --api-key, and what the tools send them."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Cluster
from sglang_pd_radix.tools.cluster.local_http import API_KEY
from sglang_pd_radix.tools.cluster.local_http import http as ask
from sglang_pd_radix.tools.cluster.options import api_key


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
