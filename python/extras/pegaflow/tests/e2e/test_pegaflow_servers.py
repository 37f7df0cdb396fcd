"""Engines with a PegaFlow server: what they say is what they say without, and nothing is left in the server."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import host_server
import pytest
import requests
from e2e_fixtures import aggregated_answers
from pd import FLAG, LOCAL, TP2, Pair, ask, check_idle, conversations, counter, log_of, pools, wait_idle, words
from test_local_prefill import REQUESTS, SENT

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing())),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = host_server.HostServer(tmp_path_factory.mktemp("pegaflow")).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def dsa_model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "dsa", ModelShape(arch="dsa")))


@pytest.fixture(scope="module")
def dsa_truth(clusters, dsa_model):
    return aggregated_answers(clusters, dsa_model, "--page-size", "64")


@pytest.fixture(params=["mha", "mla", "dsa"])
def shaped(request):
    """A shape, the model of it and the truth of that."""
    kind = "" if request.param == "mha" else f"{request.param}_"
    return request.param, request.getfixturevalue(f"{kind}model"), request.getfixturevalue(f"{kind}truth")


def page_of(shape):
    """Index keys come in pages of 64 tokens."""
    return 64 if shape == "dsa" else 16


def whole(shape, length=300):
    """Tokens of a prompt that are whole pages."""
    return length // page_of(shape) * page_of(shape)


def options(server, shape="mha"):
    return ["--page-size", str(page_of(shape)), "--enable-pegaflow", "--pegaflow-endpoint", server.endpoint]


def state(url):
    """What each rank that uses PegaFlow says of it."""
    states = requests.get(url + "/get_server_info", timeout=30).json()["internal_states"]
    return [one["pegaflow"] for one in states if "pegaflow" in one]


def flush(url):
    wait_idle(url)
    # A gateway's health check is a request too, and comes when it likes.
    requests.post(url + "/flush_cache?timeout=20", timeout=30).raise_for_status()


def check_at_rest(url):
    check_idle(url)
    for rank in state(url):
        assert (rank["saving_tokens"], rank["loading_tokens"], rank["prefetches"]) == (0, 0, 0), rank


def wait_until_back(server, url, ranks):
    """Until all ranks have found a server that was started again; only the first tells of itself."""
    end = time.monotonic() + 20
    while not state(url)[0]["up"] or len(server.instances()) < ranks:
        assert time.monotonic() < end
        time.sleep(0.2)


def check_loaded(url, send, asked, first, truth, shape):
    """What was flushed comes back from the server: the same answers, all of each prompt, nothing lost or held."""
    assert conversations(send) == truth["conversations"]
    assert answers(send, asked) == first
    assert all(send(ids, 1)["meta_info"]["cached_tokens"] == whole(shape) for ids in asked)
    (rank,) = state(url)
    assert rank["loaded"] >= 4 * whole(shape) // page_of(shape) and rank["loads_failed"] == rank["lost"] == 0
    check_at_rest(url)


def check_restart(server, urls, send, asked, first, shape):
    """The engines go on without their server. All ranks find it when it is back, save what they have and load it."""
    ranks = len(server.instances())
    server.kill()
    assert answers(send, asked) == first
    server.start()
    wait_until_back(server, urls[0], ranks)
    # What a tree holds is saved again when it is asked for.
    assert answers(send, asked) == first
    new = answers(send, prompts(4))
    for url in urls:
        flush(url)
    before = [rank["loaded"] for url in urls for rank in state(url)]
    assert answers(send, asked) == first and answers(send, prompts(4)) == new
    loaded = [rank["loaded"] for url in urls for rank in state(url)]
    least = 8 * whole(shape) // page_of(shape)
    assert all(now - was >= least for now, was in zip(loaded, before, strict=True)), (before, loaded)
    for url in urls:
        check_at_rest(url)


def check_nothing_left(server):
    """The engines are gone: so are their registrations and mappings, and no lease keeps a page."""
    end = time.monotonic() + 10
    while server.instances() or server.mappings():
        assert time.monotonic() < end, (server.instances(), server.mappings())
        time.sleep(0.1)
    server.forget()
    assert server.metric("pegaflow_pool_used_bytes") == 0


def prompts(seed, count=4, length=300):
    rnd = random.Random(seed)
    return [words(rnd, length) for _ in range(count)]


def answers(send, asked, max_new=16):
    with ThreadPoolExecutor(len(asked)) as pool:
        return [reply["output_ids"] for reply in pool.map(lambda ids: send(ids, max_new), asked)]


def check_pair(server, pair, truth, where, shape="mha"):
    assert conversations(pair) == truth["conversations"]
    asked = prompts(5)
    first = answers(pair, asked)
    wait_idle(pair.prefill_url)
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    assert answers(pair, asked) == first
    assert state(pair.prefill_url)[0]["loaded"] > 0
    if where == "both":
        # What decode has from the server is not sent.
        pair.flush()
        loaded = state(pair.decode_url)[0]["loaded"]
        details = pair(asked[0], 4)["meta_info"]["cached_tokens_details"]
        assert state(pair.decode_url)[0]["loaded"] > loaded
        assert details["decode_prefix"] == whole(shape) and details["transferred"] == 300 - whole(shape), details
    check_restart(server, [pair.prefill_url, pair.decode_url], pair, asked, first, shape)


def test_aggregated(clusters, server, shaped):
    shape, model, truth = shaped
    cluster = clusters.get(model, aggregated=True, common_args=options(server, shape), env=host_server.engine_env())
    url, send = cluster.router_url, ask(cluster.router_url)
    assert conversations(send) == truth["conversations"]
    asked = prompts(3)
    first = answers(send, asked)
    flush(url)
    check_loaded(url, send, asked, first, truth, shape)

    # Aborted while they are asked for and loaded.
    flush(url)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(send, ids + [500 + i], 64) for i in range(2) for ids in asked]
        for _ in range(20):
            requests.post(url + "/abort_request", json={"abort_all": True}, timeout=30)
            time.sleep(0.01)
        for one in waiting:
            one.result()
    check_at_rest(url)

    # Another salt is another prompt.
    flush(url)
    assert send(asked[0], 4, extra_key="salt")["meta_info"]["cached_tokens"] == 0

    # Without a server it goes on, and finds it again.
    check_restart(server, [url], send, asked, first, shape)
    assert log_of(cluster, url).count("is lost") == 1
    clusters.stop()
    check_nothing_left(server)


def test_two_ranks(clusters, server, shaped):
    """Each has its own part of every page, or, with MLA, one saves what all load; what they load they agree on."""
    shape, model, truth = shaped
    cluster = clusters.get(
        model, aggregated=True, common_args=[*options(server, shape), *TP2], env=host_server.engine_env()
    )
    url, send = cluster.router_url, ask(cluster.router_url)
    assert len(server.instances()) == 2
    assert conversations(send) == truth["conversations"]
    asked = prompts(3)
    first = answers(send, asked)
    flush(url)
    (rank,) = state(url)
    # Of each page the server holds one copy: both ranks' parts, or what they have alike. It rounds up.
    model_shape = ModelShape(arch="qwen3" if shape == "mha" else shape)
    # With index keys: 128 bytes and a scale of 4 in each layer.
    index = model_shape.layers * 132 if shape == "dsa" else 0
    page_bytes = page_of(shape) * (model_shape.kv_bytes_per_token + index)
    assert server.metric("pegaflow_pool_used_bytes") == pytest.approx(rank["saved"] * page_bytes, rel=0.05)
    check_loaded(url, send, asked, first, truth, shape)

    # Without a server they go on, and find it again, each by itself.
    check_restart(server, [url], send, asked, first, shape)
    clusters.stop()
    check_nothing_left(server)


def test_pair_of_two_ranks(clusters, server, shaped):
    """Two prefill and two decode ranks, all of which use the server."""
    shape, model, truth = shaped
    args = [*options(server, shape), *TP2]
    cluster = clusters.get(model, prefill_args=args, decode_args=[FLAG, *args], env=host_server.engine_env())
    assert len(server.instances()) == 4
    check_pair(server, Pair(cluster), truth, "both", shape)
    clusters.stop()
    check_nothing_left(server)


@pytest.mark.parametrize("where", ["prefill", "both"])
def test_pair(clusters, server, model, truth, where):
    """A prefill worker alone, and with it a decode worker whose tree is kept in the server as well."""
    args = options(server)
    cluster = clusters.get(
        model,
        prefill_args=args,
        decode_args=[FLAG, *(args if where == "both" else args[:2])],
        env=host_server.engine_env(),
    )
    check_pair(server, Pair(cluster), truth, where)
    clusters.stop()
    check_nothing_left(server)


@pytest.mark.parametrize("ranks", [[], TP2], ids=["one rank", "two ranks"])
def test_decode_computes_the_rest_of_what_it_loads(clusters, server, model, truth, ranks):
    """Its tree is flushed before each turn. The first turns are prefill's; of the later ones it sends nothing."""
    args = [*options(server), *ranks]
    cluster = clusters.get(
        model,
        prefill_args=[*args[:2], *ranks],
        # All first turns have more tokens, and no later one has as many to compute.
        decode_args=[FLAG, LOCAL, "120", *args],
        env=host_server.engine_env(),
    )
    pair = Pair(cluster)
    seen = []

    def turn(ids, max_new):
        pair.flush(pair.decode_url)
        # What has been saved can be found a moment later.
        time.sleep(0.5)
        loaded, sent = state(pair.decode_url)[0]["loaded"], counter(pair.prefill_url, SENT)
        reply = pair(ids, max_new)
        loaded = state(pair.decode_url)[0]["loaded"] - loaded
        seen.append((loaded, counter(pair.prefill_url, SENT) - sent, reply["meta_info"]["cached_tokens_details"]))
        return reply

    assert conversations(turn, clients=1) == truth["conversations"][:1]
    first, *later = seen
    assert first[0] == 0 and first[1] > 0 and first[2]["transferred"] > 120, first
    for loaded, sent, details in later:
        assert loaded > 0 and sent == 0 and details["transferred"] == 0, details
        assert details["decode_prefix"] == 16 * loaded and 0 < details["decode_computed"] <= 120, details
    assert counter(pair.decode_url, REQUESTS) >= len(later)

    # Many at once, and what some have loaded others find in the tree.
    for _ in range(2):
        pair.flush(pair.decode_url)
        assert conversations(pair) == truth["conversations"]
    assert state(pair.decode_url)[0]["loads_failed"] == 0
    check_at_rest(pair.decode_url)
    pair.check_idle()
    clusters.stop()
    check_nothing_left(server)


def test_two_engines_share(clusters, server, model):
    """Two decode workers: what one has received, the other loads."""
    args = options(server)
    cluster = clusters.get(
        model, decode=2, prefill_args=args[:2], decode_args=[FLAG, *args], env=host_server.engine_env()
    )
    one, two = Pair(cluster), Pair(cluster, 0, 1)
    asked = prompts(6, 1)[0]
    first = one(asked, 24)
    wait_idle(one.decode_url)
    again = two(asked, 24)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["decode_prefix"] == 288
    for url in (one.decode_url, two.decode_url):
        check_at_rest(url)
        assert pools(url)
    clusters.stop()
    check_nothing_left(server)
