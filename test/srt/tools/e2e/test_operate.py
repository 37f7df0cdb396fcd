"""What an operator looks at, over a real deployment: every panel of the dashboard shows something while requests run,
and alarms fire when what they are for is done to the workers.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
import requests
from pd import FLAG, Pair, conversations, pools, words
from prometheus_server import PROMETHEUS, prometheus

from sglang_pd_radix.tools.dashboard import DASHBOARD

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.thorough,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus: apt-get install prometheus"),
]

VERIFY = "--disaggregation-decode-verify-pages"
ENV = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1"}


@pytest.fixture(scope="module")
def cluster(clusters, model):
    """Two pairs; the second decode worker has a transport that breaks odd rooms."""
    paths = [str(Path(__file__).parent / "spoilt_pages"), os.environ.get("PYTHONPATH", "")]
    broken = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    yield clusters.get(
        model,
        prefill=2,
        decode=2,
        decode_args=[[FLAG, VERIFY], [FLAG, VERIFY]],
        decode_env=[{}, broken],
        common_args=["--page-size", "16"],
        env=ENV,
        backend="nixl",
    )
    clusters.stop()


def instance(url: str) -> str:
    return url.removeprefix("http://")


@pytest.fixture(scope="module")
def watcher(cluster, tmp_path_factory):
    workers = [instance(url) for url in (*cluster.prefill_urls, *cluster.decode_urls)]
    with prometheus(tmp_path_factory.mktemp("prometheus"), workers) as running:
        yield running


def now(expr: str) -> str:
    """A panel's query as Grafana would ask it for all workers."""
    for variable, value in (("$worker", ".*"), ("$rank", ".*"), ("$__rate_interval", "20s")):
        expr = expr.replace(variable, value)
    assert "$" not in expr
    return expr


def test_no_panel_is_empty_under_load(cluster, watcher):
    over = threading.Event()

    def load(n: int) -> None:
        # Even rooms alone: nothing breaks.
        pair, rnd = Pair(cluster, n, n), random.Random(n)

        def ask(ids: list[int], max_new: int, **more) -> dict:
            return pair(ids, max_new, bootstrap_room=rnd.randrange(2, 2**62, 2), **more)

        seed = 1000 * n
        while not over.is_set():
            seed += 1
            conversations(ask, 3, 3, seed=seed)
            # The time between tokens is only known of what is streamed.
            body = pair.body(words(rnd, 50), 8, stream=True, bootstrap_room=2 * seed)
            first = pair.ask_prefill(body)
            assert "data: [DONE]" in pair.ask_decode(body).result().text
            first.result()

    clients = [threading.Thread(target=load, args=(n,)) for n in range(2)]
    for client in clients:
        client.start()
    try:
        end = time.monotonic() + 60
        empty = ["all"]
        while empty and time.monotonic() < end:
            time.sleep(2)
            panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
            empty = [p["title"] for p in panels if not any(watcher.query(now(q["expr"])) for q in p["targets"])]
        assert not empty
        held = dict(
            (labels["instance"], value) for labels, value in watcher.query(now(panels[0]["targets"][0]["expr"]))
        )
    finally:
        over.set()
        for client in clients:
            client.join()
    # Each decode worker has its line, and conversations share their past.
    assert {*held} == {instance(url) for url in cluster.decode_urls}
    assert all(0.1 < part < 1 for part in held.values()), held
    # Nothing was wrong, and no alarm says so.
    assert watcher.firing() == set()


def test_a_page_that_did_not_arrive_as_it_was_sent(cluster, watcher):
    pair = Pair(cluster, 1, 1)
    body = pair.body(words(random.Random(5), 70), 8)
    body["bootstrap_room"] |= 1
    first = pair.ask_prefill(body)
    assert requests.post(pair.decode_url + "/generate", json=body, timeout=60).status_code == 500
    first.result()
    watcher.wait("PdRadixDigestMismatch", instance(pair.decode_url))
    assert ("PdRadixDigestMismatch", instance(cluster.decode_urls[0])) not in watcher.firing()
    causes = watcher.query(f'sglang:kv_transfer_failures_total{{instance="{instance(pair.decode_url)}"}} > 0')
    assert [labels["cause"] for labels, _ in causes] == ["digest"]


def test_a_pool_that_is_never_let_go_and_a_prefill_that_is_lost(cluster, watcher):
    pair = Pair(cluster, 1, 0)
    decode = instance(pair.decode_url)
    # The two have to know each other, or decode asks for nothing.
    pair(words(random.Random(7), 40), 2)
    cluster.pause(["prefill-1"])
    body = pair.body(words(random.Random(6), 900), 8, rid="held")
    answers = [pair.ask_prefill(body), pair.ask_decode(body)]
    end = time.monotonic() + 30
    while not pools(pair.decode_url)[0]["requests"]["transfer"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    # Its client goes. The prefill may still write, for all that decode knows.
    requests.post(pair.decode_url + "/abort_request", json={"rid": "held"}, timeout=30)
    watcher.wait("PdRadixPoolHeld", decode)
    (pool,) = pools(pair.decode_url)
    assert pool["requests"]["quarantined"] == 1 and pool["oldest"][0]["rid"] == "held" and not pool["idle"]

    cluster.kill("prefill-1")
    for answer in answers:
        answer.exception()
    watcher.wait("PdRadixPeerLost", decode)
    watcher.wait("PdRadixWorkerDown", instance(pair.prefill_url))
    # With its writer the quarantine ends.
    watcher.wait("PdRadixPoolHeld", decode, fires=False)
    assert "PdRadixPoolLost" not in {alarm for alarm, _ in watcher.firing()}
