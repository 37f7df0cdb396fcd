"""Decode computes short remainders of prompts itself: the aggregated engine's answers, and nothing of prefill's."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import (
    Pair,
    ask_among_leavers,
    base_prompt,
    conversations,
    counter,
    hit_lengths,
    one_prefill,
    words,
)

from sglang_pd_radix.tools.cluster import free_ports

pytestmark = pytest.mark.timeout(600)

COMPUTED, REQUESTS = "sglang:decode_computed_tokens_total", "sglang:decode_local_prefills_total"
SENT = "sglang:kv_transfer_sent_bytes_total"


@pytest.fixture(scope="module", params=[1, 16])
def page(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page):
    return one_prefill(clusters, model, backend, page, computes=True)


@pytest.fixture(params=[3, 4], ids=["overlapped", "in turns"])
def local(cluster, request):
    pair = Pair(cluster, decode=request.param)
    pair.flush()
    yield pair
    pair.check_idle()


def test_conversations(local, truth):
    """From turn 2 on at the latest, prefill has nothing to do; all its clients are answered."""
    assert conversations(local) == truth["conversations"]
    assert counter(local.decode_url, REQUESTS) >= 8
    assert counter(local.decode_url, COMPUTED) > 0


def test_many_at_once_in_slices(local, truth):
    """Remainders of more than a slice, beside requests that decode."""
    assert conversations(local, 6, 1, seed=5, max_new=96) == truth["long"]
    # Again: all of each prompt is held, but for the token that a step needs.
    assert conversations(local, 6, 1, seed=5, max_new=96) == truth["long"]


def test_every_hit_length(local, truth, page):
    for name, prompt, _ in hit_lengths(page):
        local.flush()
        assert local(base_prompt(page))["output_ids"] == truth["base", page]
        before = counter(local.prefill_url, SENT), counter(local.decode_url, REQUESTS)
        reply = local(prompt)
        assert reply["output_ids"] == truth[name, page], name
        details = reply["meta_info"]["cached_tokens_details"]
        assert details["transferred"] == 0 and details["decode_prefix"] + details["decode_computed"] == len(prompt)
        assert counter(local.prefill_url, SENT) == before[0], name
        assert counter(local.decode_url, REQUESTS) == before[1] + 1, name


def test_prefill_answers_at_once(local, page):
    """And with nothing: what it is asked for is computed elsewhere."""
    prompt = base_prompt(page)
    local(prompt)
    body = local.body([*prompt, 500], 32)
    first, second = local.ask_prefill(body), local.ask_decode(body)
    meta = first.result().json()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["completion_tokens"] == 0
    assert meta["prompt_tokens"] == len(prompt) + 1
    assert len(second.result().json()["output_ids"]) == 32


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_whoever_is_asked_first(local, page, first):
    prompt = base_prompt(page)
    answer = local(prompt, 4)["output_ids"]
    body = local.body([*prompt, *answer], 4)
    asks = [local.ask_prefill, local.ask_decode]
    futures = []
    for send in asks if first == "prefill" else reversed(asks):
        futures.append(send(body))
        time.sleep(0.7)
    for future in futures:
        assert future.result().status_code == 200


def test_no_prefill_at_all(local, page):
    """Nobody listens where it should: all fail at once, whether or not decode would have computed them."""
    prompt = base_prompt(page)
    local(prompt)
    asked = [[*prompt, *words(random.Random(seed), length)] for seed, length in enumerate((9, 300))]
    (port,) = free_ports(1)
    before, began = counter(local.decode_url, REQUESTS), time.monotonic()
    asking = [local.ask_decode(local.body(ids, 16) | {"bootstrap_port": port}) for ids in asked]
    replies = [one.result() for one in asking]
    assert time.monotonic() - began < 10
    assert all(reply.status_code == 500 and "is gone" in reply.text for reply in replies), replies
    assert counter(local.decode_url, REQUESTS) == before


def test_logprobs_and_single_tokens(local, cluster, page):
    remote = Pair(cluster, decode=0)
    prompt = [*base_prompt(page), *words(random.Random(4), 9)]
    for more in ({"return_logprob": True, "top_logprobs_num": 2}, {"return_logprob": True, "logprob_start_len": 20}):
        said = []
        for pair in (local, remote):
            pair.flush()
            pair(base_prompt(page))
            meta = pair(prompt, 6, **more)["meta_info"]
            said.append([token for _, token, *_ in meta["output_token_logprobs"]])
            assert len(meta["output_token_logprobs"]) == 6
        assert said[0] == said[1]
    local.flush()
    assert len(local(base_prompt(page), 1)["output_ids"]) == 1
    assert len(local(prompt, 1)["output_ids"]) == 1


def test_samples_of_a_prompt(local, cluster, page):
    """Each has a room of its own, and prefill's one answer has as many choices."""
    remote = Pair(cluster, decode=0)
    prompt = [*base_prompt(page), *words(random.Random(6), 40)]
    said = []
    for pair in (local, remote):
        pair(base_prompt(page))
        body = pair.body(prompt, 8)
        body["sampling_params"]["n"] = 3
        before, first = counter(pair.decode_url, REQUESTS), pair.ask_prefill(body)
        answers = pair.ask_decode(body).result()
        assert answers.status_code == first.result().status_code == 200, (answers.text, first.result().text)
        said.append([answer["output_ids"] for answer in answers.json()])
        assert len(said[-1]) == len(first.result().json()) == 3
        assert counter(pair.decode_url, REQUESTS) - before == (3 if pair is local else 0)
    assert said[0] == said[1]


@pytest.mark.thorough
def test_leavers(local, page):
    """Clients go away before, while and after their prompts are computed."""
    local(base_prompt(page))
    answers = ask_among_leavers(local, base_prompt(page), 150, 0.03)
    assert answers[0] == answers[1] == answers[2]


def test_streamed_chat(local):
    """Both workers stream: prefill an answer of nothing that ends well, decode the answer."""

    def ask(url: str, body: dict) -> str:
        with requests.post(url + "/v1/chat/completions", json=body, stream=True, timeout=60) as reply:
            assert reply.status_code == 200
            lines = [line[6:] for line in reply.iter_lines() if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert not any("error" in one for one in chunks), chunks
        return "".join(c["delta"].get("content") or "" for one in chunks for c in one["choices"])

    before = counter(local.decode_url, REQUESTS)
    history = [{"role": "user", "content": "tell me of the sea and of the ships that cross it " * 40}]
    with ThreadPoolExecutor(1) as pool:
        for turn in range(4):
            pair = local.body([], 0)
            body = {name: value for name, value in pair.items() if name.startswith("bootstrap")}
            body |= {"model": "m", "messages": history, "max_tokens": 12, "temperature": 0, "stream": True}
            first = pool.submit(ask, local.prefill_url, body)
            answer = ask(local.decode_url, body)
            assert turn == 0 or first.result() == ""
            history += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then what"}]
    assert counter(local.decode_url, REQUESTS) == before + 3


def test_a_herd(local, cluster):
    """More than run at once, of one prefix, all with remainders of their own."""
    rnd = random.Random(3)
    shared = words(rnd, 150)
    asked = [shared + words(rnd, 40) for _ in range(40)]
    remote = Pair(cluster, decode=0)
    with ThreadPoolExecutor(40) as pool:
        local(shared)
        answers = [one["output_ids"] for one in pool.map(local, asked)]
        assert answers == [one["output_ids"] for one in pool.map(remote, asked)]


@pytest.mark.parametrize("stream", [False, True])
def test_two_halves_of_one_room_are_both_answered(local, stream):
    """Prefill answered one of them and dropped both: the client of the other waited for ever."""
    prompt = words(random.Random(4), 100)
    local(prompt)
    for _ in range(4):
        body = local.body(prompt + words(random.Random(5), 9), 4, stream=stream)
        halves = [ask(body) for _ in range(2) for ask in (local.ask_prefill, local.ask_decode)]
        replies = [half.result() for half in halves]
        # The second half is rejected by whoever still has the first.
        prefill, decode = ([reply.status_code for reply in replies[first::2]] for first in (0, 1))
        assert 200 in prefill and set(prefill) <= {200, 500}, [reply.text for reply in replies]
        assert 200 in decode and set(decode) <= {200, 400}, [reply.text for reply in replies]
