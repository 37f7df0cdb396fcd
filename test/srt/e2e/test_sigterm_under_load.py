"""SIGTERM alone, of which the gateway is not told: a worker ends what it has, refuses what comes, and exits with 0."""

from __future__ import annotations

import signal
import time

import pytest
from pd import FLAG, check_idle
from rolling import Load, named, wait, wait_used
from sglang.srt.managers.drain import VARIABLE

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

# Seconds that a worker has for what it has; and what it may take beside them, as deploy.md says.
TIMEOUT_S, MORE_S = 60, 20


@pytest.fixture(scope="module")
def cluster(clusters, model):
    yield clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[FLAG],
        common_args=["--page-size", "16"],
        backend="nixl",
        env={VARIABLE: str(TIMEOUT_S)},
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
        # The gateway still has it, and looks again when it likes.
        wait_used(process)
        print(f"{name}: used {time.monotonic() - began:.1f} s after it was ready; {load.answered} answers")
        load.wait_answers(20)
    assert not load.failed, load.failed[:5]
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        check_idle(url)
