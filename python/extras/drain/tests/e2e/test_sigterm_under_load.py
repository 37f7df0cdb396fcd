"""SIGTERM alone: a worker has its gateway let go of it, ends what it has, and exits with 0; no request is lost."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest
from pd import FLAG, ask, check_idle, words
from rolling import Load, join, named, wait
from sglang.srt.managers import drain, gateway_notice

from sglang_pd_radix.tools import cli, trace
from sglang_pd_radix.tools.cluster.ports import free_ports

pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]

# What each of the two workers has to tell.
LIFE = {
    "prefill": ["received", "tokenized", "handshake_begun", "waiting", "running", "prefilled", "answered"],
    "decode": [
        "received",
        "tokenized",
        "handshake_begun",
        "admitted",
        "waiting",
        "running",
        "first_output",
        "answered",
    ],
}
# Seconds that a worker has for what it has; and what it may take beside them, as docs/upgrade.md says.
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
        env={
            drain.VARIABLE: str(TIMEOUT_S),
            gateway_notice.VARIABLE: f"http://127.0.0.1:{port}",
            trace.VARIABLE: "100",
        },
    )
    clusters.stop()


def test_the_life_of_a_request(cluster, capsys):
    """Both of its workers tell it, in the order in which it happens."""
    send, prompt = ask(cluster.router_url), words(random.Random(3), 100)
    send(prompt, 4)
    rid = send(prompt, 4)["meta_info"]["id"]
    workers = [*cluster.prefill_urls, *cluster.decode_urls]
    assert cli.main(["trace", rid, *workers]) == 0
    said = capsys.readouterr().out
    with capsys.disabled():
        print(said)
    assert cli.main(["trace", rid, *workers, "--json"]) == 0
    records = {record["role"]: record for record in json.loads(capsys.readouterr().out)}
    assert set(records) == {"prefill", "decode"}
    times = {(role, stage): at for role, record in records.items() for stage, at in record["times"].items()}
    for role, stages in LIFE.items():
        assert [stage for stage in stages if (role, stage) not in times] == []
        assert sorted(stages, key=lambda stage: times[role, stage]) == stages
    # Of two processes on one machine; clocks of the engine are calibrated when a request begins.
    assert times["decode", "admitted"] <= times["prefill", "prefilled"] + 0.05
    assert times["prefill", "prefilled"] <= times["decode", "waiting"] + 0.05
    assert records["decode"]["cached_tokens_details"]["decode_prefix"] == 96
    assert records["decode"]["room"] == records["prefill"]["room"]


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
