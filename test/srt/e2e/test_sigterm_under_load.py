"""SIGTERM alone: a worker has its gateway let go of it, ends what it has, and exits with 0; no request is lost."""

from __future__ import annotations

import signal
import time

import pytest
from pd import FLAG, check_idle
from rolling import Load, join, named, wait
from sglang.srt.managers import drain, gateway_notice

from sglang_pd_radix.tools.cluster.ports import free_ports

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

# Seconds that a worker has for what it has; and what it may take beside them, as deploy.md says.
TIMEOUT_S, MORE_S = 60, 20


@pytest.fixture(scope="module")
def cluster(clusters, model):
    (port,) = free_ports(1)
    yield clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[FLAG],
        common_args=["--page-size", "16"],
        backend="nixl",
        port=port,
        env={drain.VARIABLE: str(TIMEOUT_S), gateway_notice.VARIABLE: f"http://127.0.0.1:{port}"},
    )
    clusters.stop()


@pytest.mark.parametrize("name", ["decode-1", "prefill-1"])
def test_sigterm_loses_no_request(cluster, name):
    process = named(cluster, name)
    with Load(cluster.router_url) as load:
        load.wait_answers(20)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        wait(lambda: process.returncode() is not None, TIMEOUT_S + MORE_S)
        print(f"{name}: exit status {process.returncode()} after {time.monotonic() - began:.1f} s")
        assert process.returncode() == 0, process.log_path.read_text(errors="replace")[-3000:]
        load.wait_answers(20)
        cluster.restart(name)
        began = time.monotonic()
        join(cluster, process)
        print(f"{name}: used {time.monotonic() - began:.1f} s after it was ready; {load.answered} answers")
        load.wait_answers(20)
    assert not load.failed, load.failed[:5]
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        check_idle(url)
