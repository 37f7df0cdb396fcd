"""DP attention: one tree per attention-DP rank, the same tokens as ever, and ranks that cost each other nothing."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, TP2, Pair, base_prompt, check_idle, conversations, pools, wait_idle, words

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

DP2 = ["--dp-size", "2", "--enable-dp-attention"]
BY_PREFIX = ["--load-balance-method", "longest_prefix"]
COMMON = ["--page-size", "16", "--chunked-prefill-size", "128"]


@pytest.fixture(scope="module", params=["qwen3", "mla"])
def world(request, clusters, backend):
    """Prefill 0 has one DP rank of two TP ranks; prefill 1 and decode have two of one."""
    names = ("model", "truth") if request.param == "qwen3" else ("mla_model", "mla_truth")
    model, truth = (request.getfixturevalue(name) for name in names)
    cluster = clusters.get(
        model,
        prefill=2,
        prefill_args=[TP2, [*TP2, *DP2]],
        decode_args=[[FLAG, *TP2, *DP2, *BY_PREFIX]],
        common_args=COMMON,
        backend=backend,
    )
    return cluster, truth


class Ranked(Pair):
    """A pair of whose decode worker one DP rank is asked; which one of prefill's, its room says."""

    rank: int | None = None

    def decode_body(self, body: dict) -> dict:
        return body if self.rank is None else {**body, "routed_dp_rank": self.rank}

    def on(self, rank: int) -> Ranked:
        ranked = Ranked(self.cluster, self.prefill)
        ranked.rank = rank
        return ranked


def check_ranks(pair: Ranked, truth: dict) -> None:
    """Both ranks of decode answer as the truth does, from a tree of their own."""
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    base = base_prompt(16)
    for _ in range(2):
        for rank in range(2):
            answer = pair.on(rank)(base)
            assert answer["output_ids"] == truth["base", 16]
            assert answer["meta_info"]["dp_rank"] == rank
    # The second time each had it.
    assert answer["meta_info"]["cached_tokens_details"]["transferred"] == 0
    pair.check_idle()
    told = pools(pair.decode_url)
    assert sorted(pool["dp_rank"] for pool in told) == [0, 1]
    held = [pool["evictable"] for pool in told]
    assert all(tokens >= len(base) for tokens in held)
    lines = [line for line in metrics(pair.decode_url) if "decode_radix_tree_tokens{" in line and "dp_rank=" in line]
    assert len(lines) == 2, lines


@pytest.mark.parametrize("prefill", [1, 0], ids=["dp2", "tp2"])
def test_sizes(world, prefill):
    """Equal ones, and where a rank gets its KV from two TP ranks."""
    cluster, truth = world
    check_ranks(Ranked(cluster, prefill), truth)


def test_turns_find_their_history(world):
    """With longest_prefix each turn goes to the rank that has the one before, whatever the prefill's rank."""
    cluster, _ = world
    pair = Ranked(cluster, prefill=1)
    pair.flush()
    seen = set()
    rnds = [random.Random(f"talk/{client}") for client in range(4)]
    histories = [words(rnd, 160) for rnd in rnds]
    # One at a time: of several, a rank that tells late of what it has done looks too full for one more.
    for turn in range(4):
        for client, rnd in enumerate(rnds):
            history = histories[client]
            meta = (answer := pair(history, 8))["meta_info"]
            if turn:
                assert meta["cached_tokens_details"]["decode_prefix"] >= len(history) - 56, (client, turn)
            seen.add(meta["dp_rank"])
            # Eight of the answer and 32 more; what was asked before is whole pages.
            histories[client] = history + answer["output_ids"] + words(rnd, 32)
    assert seen == {0, 1}
    pair.check_idle()


def test_what_fails_on_one_rank_costs_the_other_nothing(world):
    """Lost prefills and aborts on rank 1, in the middle of long answers on rank 0."""
    cluster, truth = world
    pair = Ranked(cluster, prefill=1)
    pair.flush()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = free.getsockname()[1]
    ids, other = words(random.Random("fails"), 100), pair.on(1)

    def lost(_: int) -> None:
        body = other.decode_body(other.body(ids, 8, bootstrap_port=dead))
        reply = requests.post(pair.decode_url + "/generate", json=body, timeout=60)
        assert reply.status_code == 500 and "gone" in reply.text, reply.text

    def aborted(i: int) -> None:
        rid = f"aborted-{i}"
        # Prefill is never asked, so that this one waits for it when it is aborted.
        with ThreadPoolExecutor(1) as one:
            body = other.decode_body(other.body(ids, 8, rid=rid))
            asked = one.submit(requests.post, pair.decode_url + "/generate", json=body, timeout=60)
            wait_busy(pair.decode_url)
            while not asked.done():
                requests.post(pair.decode_url + "/abort_request", json={"rid": rid}, timeout=30)
            assert "abort" in asked.result().text.lower()

    with ThreadPoolExecutor(12) as pool:
        long = pool.submit(conversations, pair.on(0), 6, 1, seed=5, max_new=96)
        failing = [pool.submit(fail, i) for fail in (lost, aborted) for i in range(3)]
        for one in failing:
            one.result()
        assert long.result() == truth["long"]
    wait_idle(pair.decode_url)
    assert other(base_prompt(16))["output_ids"] == truth["base", 16]
    check_idle(pair.decode_url)


def metrics(url: str) -> list[str]:
    return requests.get(url + "/metrics", timeout=30).text.splitlines()


def wait_busy(url: str) -> None:
    end = time.monotonic() + 30
    while all(pool["idle"] for pool in pools(url)):
        assert time.monotonic() < end, "what was asked never came"


def test_two_ranks_of_two(clusters, model, truth):
    """Decode with two DP ranks of two TP ranks each: these two agree, and not with the other two.

    They ask prefill which of its ranks has a request, since its room does not say so.
    """
    turns = [*TP2, *DP2, "--load-balance-method", "round_robin"]
    sizes = {"prefill_args": [turns], "decode_args": [[FLAG, "--tp-size", "4", *DP2, *BY_PREFIX]]}
    check_ranks(Ranked(clusters.get(model, **sizes, common_args=COMMON, backend="nixl")), truth)


def test_ranks_without_dp_attention(clusters, model, truth):
    """``--dp-size`` alone: engines of their own behind one controller."""
    sizes = {"decode_args": [[FLAG, "--dp-size", "2", *BY_PREFIX]]}
    check_ranks(Ranked(clusters.get(model, **sizes, common_args=COMMON, backend="nixl")), truth)
