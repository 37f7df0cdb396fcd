"""n > 1 with the flag: each sample is answered as a request of its own, and a prompt's KV is sent once (trap 30)."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import FLAG, Pair, counter, generate_body, log_of, wait_idle, words

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

PAGE = 16
PROMPTS = [words(random.Random(seed), length) for seed, length in ((1, 150), (2, 64), (3, 5), (4, 200))]


@pytest.fixture(scope="module")
def pair(clusters, model, backend):
    options = ["--page-size", str(PAGE), "--constrained-json-disable-any-whitespace", "--served-model-name", "m"]
    pair = Pair(clusters.get(model, decode_args=[FLAG], common_args=options, backend=backend))
    yield pair
    pair.check_idle()


@pytest.fixture(autouse=True)
def empty(pair):
    pair.flush()


@pytest.fixture(scope="module")
def truth(pair):
    """What the pair says to each prompt alone; it is compared with the engine elsewhere."""
    return [pair(prompt, 12)["output_ids"] for prompt in PROMPTS]


def post(pair: Pair, path: str, body: dict, prompts: int = 1, **more):
    """Both workers are given the request, with a room for each prompt, as the router gives it; decode's reply."""
    port = pair.cluster.processes[0].bootstrap_port
    rooms = [random.randrange(1, 2**63) for _ in range(prompts)]
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": rooms[0]}
    if prompts > 1:
        at = {name: [value] * prompts for name, value in at.items()} | {"bootstrap_room": rooms}
    body = {**at, **body}
    pair._workers.submit(requests.post, pair.prefill_url + path, json=body, timeout=120)
    return requests.post(pair.decode_url + path, json=body, timeout=120, **more)


def sampled(ids, n: int, max_new: int = 12, **more) -> dict:
    body = generate_body(ids, max_new, **more)
    body["sampling_params"]["n"] = n
    return body


def test_samples_are_as_requests_of_their_own_and_kv_comes_once(pair, truth):
    before = counter(pair.prefill_url, "sglang:kv_transfer_sent_bytes_total")
    answers = post(pair, "/generate", sampled(PROMPTS[0], 5)).json()
    assert [answer["output_ids"] for answer in answers] == [truth[0]] * 5
    assert len({answer["meta_info"]["id"] for answer in answers}) == 5
    details = [answer["meta_info"]["cached_tokens_details"] for answer in answers]
    whole, rest = len(PROMPTS[0]), len(PROMPTS[0]) % PAGE
    # One had all of it sent; the others only what is on no whole page.
    assert sorted(d["transferred"] for d in details) == [rest] * 4 + [whole]
    sent = counter(pair.prefill_url, "sglang:kv_transfer_sent_bytes_total") - before
    assert sent == sum(d["transferred_bytes"] for d in details)


FAILURES = ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total", "kv_transfer_failures_total")


def failures(pair: Pair) -> list[float]:
    return [counter(pair.prefill_url, f"sglang:{name}") for name in FAILURES]


def test_a_request_that_is_served_has_failed_nobody(pair, truth):
    """Prefill may get it before decode has announced its samples, and gives up what it has begun for it."""
    before, logged = failures(pair), log_of(pair.cluster, pair.prefill_url).count("failed for request")
    for prompt, ids in zip(PROMPTS * 3, truth * 3, strict=True):
        body = {**sampled(prompt, 3), "bootstrap_host": "127.0.0.1", "bootstrap_room": random.randrange(1, 2**62)}
        body["bootstrap_port"] = pair.cluster.processes[0].bootstrap_port
        prefill = pair._workers.submit(requests.post, pair.prefill_url + "/generate", json=body, timeout=120)
        time.sleep(0.2)
        answers = requests.post(pair.decode_url + "/generate", json=body, timeout=120).json()
        assert [answer["output_ids"] for answer in answers] == [ids] * 3
        assert len(prefill.result().json()) == 3
    assert failures(pair) == before
    assert log_of(pair.cluster, pair.prefill_url).count("failed for request") == logged


def test_a_batch_of_prompts_is_answered_prompt_by_prompt(pair, truth):
    answers = post(pair, "/generate", sampled(PROMPTS, 3), prompts=len(PROMPTS)).json()
    assert [answer["output_ids"] for answer in answers] == [ids for ids in truth for _ in range(3)]


def test_one_room_for_a_batch(pair, truth):
    """The room of the second prompt is then the next number, as in the engine."""
    body = {**sampled(PROMPTS[:2], 2), "bootstrap_room": random.randrange(1, 2**62)}
    answers = post(pair, "/generate", body).json()
    assert [answer["output_ids"] for answer in answers] == [truth[0]] * 2 + [truth[1]] * 2


def test_samples_differ_where_they_are_drawn(pair):
    body = sampled(PROMPTS[0], 4)
    body["sampling_params"]["temperature"] = 1
    answers = post(pair, "/generate", body).json()
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


def events(reply) -> list[dict]:
    lines = [line[6:] for line in reply.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]", lines[-3:]
    return [json.loads(line) for line in lines[:-1]]


def test_streams(pair, truth):
    reply = post(pair, "/generate", sampled(PROMPTS[:2], 2, stream=True), prompts=2, stream=True)
    last: dict[int, list[int]] = {}
    for event in events(reply):
        last[event["index"]] = event["output_ids"]
    assert last == {0: truth[0], 1: truth[0], 2: truth[1], 3: truth[1]}


def test_logprobs_and_grammars(pair):
    body = sampled(PROMPTS[0], 3, return_logprob=True, top_logprobs_num=2)
    body["sampling_params"] |= {"regex": "[0-9]{3}", "ignore_eos": False}
    answers = post(pair, "/generate", body).json()
    assert len({answer["text"] for answer in answers}) == 1 and answers[0]["text"].isdecimal()
    assert all(len(answer["meta_info"]["output_top_logprobs"][0]) == 2 for answer in answers)


# ---- through the router, which knows nothing of this ----


def test_generate_through_the_router(pair, truth):
    url = pair.cluster.router_url + "/generate"
    answers = requests.post(url, json=sampled(PROMPTS[0], 3), timeout=120).json()
    assert [answer["output_ids"] for answer in answers] == [truth[0]] * 3
    answers = requests.post(url, json=sampled(PROMPTS, 2), timeout=120).json()
    assert [answer["output_ids"] for answer in answers] == [ids for ids in truth for _ in range(2)]
    with requests.post(url, json=sampled(PROMPTS[0], 3, stream=True), timeout=120, stream=True) as reply:
        last = {event["index"]: event["output_ids"] for event in events(reply)}
    assert last == {i: truth[0] for i in range(3)}


CHAT = {"model": "m", "messages": [{"role": "user", "content": "ready " * 60}], "max_tokens": 8, "temperature": 0}


def test_chat_through_the_router(pair):
    url = pair.cluster.router_url + "/v1/chat/completions"
    one = requests.post(url, json=CHAT, timeout=120).json()["choices"][0]["message"]["content"]
    reply = requests.post(url, json={**CHAT, "n": 3}, timeout=120).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in reply["choices"]] == [one] * 3
    with requests.post(url, json={**CHAT, "n": 3, "stream": True}, timeout=120, stream=True) as stream:
        texts = ["", "", ""]
        for event in events(stream):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [one] * 3


def test_completions_through_the_router(pair):
    url = pair.cluster.router_url + "/v1/completions"
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    prompts = ["ready " * 60, "hello " * 30]
    alone = [
        requests.post(url, json={**body, "prompt": prompt}, timeout=120).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    reply = requests.post(url, json={**body, "prompt": prompts, "n": 2}, timeout=120).json()
    assert [choice["text"] for choice in reply["choices"]] == [alone[0]] * 2 + [alone[1]] * 2
    reply = requests.post(url, json={**body, "prompt": prompts[0], "n": 2}, timeout=120).json()
    assert [choice["text"] for choice in reply["choices"]] == [alone[0]] * 2


# ---- aborts ----


def abort(pair: Pair, rid: str) -> None:
    for url in (pair.prefill_url, pair.decode_url):
        requests.post(url + "/abort_request", json={"rid": rid}, timeout=30)


def reasons(answers: list[dict]) -> list[str]:
    return [answer["meta_info"]["finish_reason"]["type"] for answer in answers]


def first_of_each(lines, n: int) -> None:
    """Read a stream until all samples run on decode."""
    seen: set[int] = set()
    while len(seen) < n:
        line = next(lines)
        if line.startswith(b"data: "):
            seen.add(json.loads(line[6:])["index"])


def last_of_each(lines) -> dict[int, dict]:
    last = {}
    for line in lines:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            last[event["index"]] = event
    return last


def test_abort_of_one_sample(pair):
    reply = post(pair, "/generate", sampled(PROMPTS[0], 12, 400, rid="many", stream=True), stream=True)
    lines = reply.iter_lines()
    first_of_each(lines, 12)
    # Not many_10 and many_11.
    abort(pair, "many_01")
    last = last_of_each(lines)
    ends = [last[i]["meta_info"]["finish_reason"]["type"] for i in range(12)]
    assert ends == ["length", "abort"] + ["length"] * 10
    assert {len(last[i]["output_ids"]) for i in range(12) if i != 1} == {400}
    assert len(last[1]["output_ids"]) < 400


def test_abort_of_the_whole(pair):
    reply = post(pair, "/generate", sampled(PROMPTS[0], 3, 3000, rid="all", stream=True), stream=True)
    lines = reply.iter_lines()
    first_of_each(lines, 3)
    abort(pair, "all")
    last = last_of_each(lines)
    assert [last[i]["meta_info"]["finish_reason"]["type"] for i in range(3)] == ["abort"] * 3


def test_a_client_that_leaves_ends_all_samples(pair):
    reply = post(pair, "/generate", sampled(PROMPTS[0], 3, 4000, stream=True), stream=True)
    first_of_each(reply.iter_lines(), 3)
    reply.close()
    # 3 * 4000 tokens would take longer.
    wait_idle(pair.decode_url, 15)


# ---- many at once, and what one cannot be served ----


def test_many_at_once(pair, truth):
    asks = [(i % 4, 1 + i % 3) for i in range(24)]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda ask: post(pair, "/generate", sampled(PROMPTS[ask[0]], ask[1])).json(), asks))
    for (prompt, n), answers in zip(asks, replies, strict=True):
        answers = answers if isinstance(answers, list) else [answers]
        assert [answer["output_ids"] for answer in answers] == [truth[prompt]] * n


@pytest.mark.parametrize("wrong", [{"regex": "("}, {"n": 0}, {"n": 5000}, {"top_p": 2}])
def test_a_request_with_samples_that_is_refused(pair, truth, wrong):
    body = sampled(PROMPTS[0], 3)
    body["sampling_params"] |= wrong
    port = pair.cluster.processes[0].bootstrap_port
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": random.randrange(1, 2**63)}
    urls = [url + "/generate" for url in (pair.prefill_url, pair.decode_url)]
    replies = list(pair._workers.map(lambda url: requests.post(url, json=body, timeout=60), urls))
    assert [reply.status_code for reply in replies] == [400, 400], [reply.text for reply in replies]
    answers = post(pair, "/generate", sampled(PROMPTS[0], 2)).json()
    assert [answer["output_ids"] for answer in answers] == [truth[0]] * 2
