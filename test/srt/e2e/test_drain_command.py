"""Workers of a deployment are drained, ended and started anew, one after the other, under load through the gateway:
no client is told of it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time

import pytest
import requests
from pd import FLAG, check_idle, generate_body, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(scope="module")
def cluster(clusters, model):
    yield clusters.get(
        model, prefill=2, decode=2, decode_args=[FLAG], common_args=["--page-size", "16"], backend="nixl"
    )
    clusters.stop()


class Load:
    """Clients that ask the gateway one request after the other, half of them as streams."""

    def __init__(self, url: str, clients: int = 4):
        self.url, self.over = url, threading.Event()
        self.answered, self.failed = 0, []
        self.threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(clients)]

    def ask(self, n: int) -> None:
        rnd = random.Random(n)
        while not self.over.is_set():
            body = generate_body(words(rnd, 100), 40, stream=bool(n % 2))
            try:
                reply = requests.post(self.url + "/generate", json=body, timeout=60)
                text = reply.text
                lines = [line for line in text.splitlines() if line.startswith("data: {")]
                last = json.loads(lines[-1][6:]) if n % 2 else reply.json()
                ok = reply.ok and last["meta_info"]["finish_reason"]["type"] == "length"
            except Exception as e:
                ok, text = False, repr(e)
            if ok:
                self.answered += 1
            else:
                self.failed.append(text[-300:])

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def known(cluster) -> dict[str, dict]:
    return {w["url"]: w for w in requests.get(cluster.router_url + "/workers", timeout=30).json()["workers"]}


def wait(what, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_rolling_restart_loses_no_request(cluster):
    with Load(cluster.router_url) as load:
        time.sleep(5)
        for name in ("decode-1", "prefill-1"):
            process = next(process for process in cluster.processes if process.name == name)
            before = load.answered
            command = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "drain", process.url]
            command += ["--gateway", cluster.router_url, "--pid", str(process.pid), "--timeout", "60"]
            began = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            print(f"{name}: drained and ended in {time.monotonic() - began:.1f} s, exit status {process.returncode()}")
            assert done.returncode == 0, done.stderr
            assert load.answered > before and not load.failed
            wait(lambda process=process: process.returncode() is not None)
            wait(lambda process=process: process.url not in known(cluster))
            cluster.restart(name)
            worker = {"url": process.url, "worker_type": process.role}
            if process.bootstrap_port is not None:
                worker["bootstrap_port"] = process.bootstrap_port
            assert requests.post(cluster.router_url + "/workers", json=worker, timeout=30).ok
            wait(lambda process=process: known(cluster).get(process.url, {}).get("is_healthy"))
            asked = requests.get(process.url + "/metrics", timeout=30).text
            assert "sglang:pd_requests" in asked
            before = load.answered
            wait(lambda before=before: load.answered > before + 8)
            print(f"{name}: {load.answered} answered, {len(load.failed)} failed")
        time.sleep(3)
    assert not load.failed, load.failed[:3]
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        check_idle(url)
