"""A decode worker refuses what would have its first token too late, with 503; the gateway asks another worker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import requests
from pd import FLAG, Pair, words
from rolling import wait

from sglang_pd_radix.tools.cluster import Cluster
from sglang_pd_radix.tools.workers import server_info, told_pools

pytestmark = pytest.mark.timeout(300)

TARGET = "--disaggregation-decode-ttft-target"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cluster(clusters, model) -> Iterator[Cluster]:
    # A target that nobody can meet: on that worker all are refused that come while another waits.
    yield clusters.get(
        model,
        decode=2,
        decode_args=[[FLAG, TARGET, "1,refuse"], [FLAG]],
        common_args=["--page-size", "16", "--chunked-prefill-size", "256", "--served-model-name", "m"],
        router_args=["--decode-policy", "round_robin"],
        backend="nixl",
    )
    clusters.stop()


def pool(pair: Pair) -> dict:
    return told_pools(server_info(pair.decode_url))[0]


def one_waits(pair: Pair, rnd: random.Random) -> tuple[Future, Future]:
    """Both halves of a request that waits for its first token for seconds."""
    body = pair.body(words(rnd, 3000), 1)
    halves = pair.ask_prefill(body), pair.ask_decode(body)
    wait(lambda: sum(pool(pair)["requests"].values()) == 1, 20)
    return halves


def test_one_that_would_be_late_is_refused(cluster):
    pair, rnd = Pair(cluster), random.Random(1)
    for _ in range(70):
        # Each alone, so none is refused, though none is in time.
        pair(words(rnd, 20), 1)
    assert pool(pair)["ttft_refusal"]["refused_requests"] == 0
    halves = one_waits(pair, rnd)
    for path in ("/generate", CHAT):
        for stream in (False, True):
            body = pair.body(words(rnd, 40), 4)
            if path == CHAT:
                del body["input_ids"], body["sampling_params"]
                body |= {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            body["stream"] = stream
            prefill = pair._workers.submit(requests.post, pair.prefill_url + path, json=body, timeout=60)
            answer = requests.post(pair.decode_url + path, json=body, timeout=60)
            error = answer.json()
            assert (answer.status_code, error["object"], error["code"]) == (503, "error", 503), answer.text
            assert error["message"].startswith("this worker is overloaded: a first token is expected in ")
            assert int(answer.headers["Retry-After"]) >= 1
            # Prefill has no such request any more, while it still computes the other's.
            dropped = prefill.result()
            assert error["message"] in dropped.text and (stream or dropped.status_code == 400), dropped.text
            assert not halves[1].done()

    # The gateway sends these to both decode workers in turns, and again what one refuses.
    ask = {"text": "hello there", "sampling_params": {"max_new_tokens": 4}}
    refused = pool(pair)["ttft_refusal"]["refused_requests"]
    assert refused == 4
    through = [pair._workers.submit(requests.post, cluster.router_url + "/generate", json=ask) for _ in range(4)]
    assert [one.result().status_code for one in (*through, *halves)] == [200] * 6
    refused = pool(pair)["ttft_refusal"]["refused_requests"]
    assert 4 < refused <= 4 + 4 * 5

    # It serves again, and nothing is left of those that it has refused.
    assert pair(words(rnd, 20), 4)["output_ids"]
    told = requests.get(pair.decode_url + "/metrics", timeout=20).text
    counted = [line for line in told.splitlines() if line.startswith("sglang:decode_ttft_refused_requests_total{")]
    assert [float(line.split()[-1]) for line in counted] == [refused]
    pair.check_idle()
