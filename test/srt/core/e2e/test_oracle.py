"""The oracle: PD with the flag on and off says what the aggregated engine says, token for token (I5, I6), and the
pools of the running servers add up when they are idle (I1)."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from pd import (
    Pair,
    ask,
    ask_among_leavers,
    base_prompt,
    conversations,
    counter,
    hit_lengths,
    one_prefill,
    queues,
    wait_idle,
    words,
)

from sglang_pd_radix.patching import loader

pytestmark = pytest.mark.timeout(600)

COMPUTES = "local_prefill" in loader.extras()


@pytest.fixture(scope="module", params=[1, 16, 64])
def page(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page):
    """For one page size over one backend, whose cluster is that of test_local_prefill.py too, some decode workers
    compute prompts: that is decided before a backend takes part."""
    return one_prefill(clusters, model, backend, page, page == 16 and backend == "nixl" and COMPUTES)


@pytest.fixture
def on(cluster):
    pair = Pair(cluster, decode=0)
    yield pair
    pair.check_idle()


@pytest.fixture
def off(cluster):
    pair = Pair(cluster, decode=1)
    yield pair
    pair.check_idle()


def test_conversations_with_the_flag(on, truth):
    on.flush()
    hit = counter(on.decode_url, "sglang:decode_prefix_hit_tokens_total")
    assert conversations(on) == truth["conversations"]
    assert counter(on.decode_url, "sglang:decode_prefix_hit_tokens_total") > hit


def test_conversations_without_the_flag(off, truth):
    off.flush()
    saved = counter(off.prefill_url, "sglang:kv_transfer_saved_bytes_total")
    assert conversations(off) == truth["conversations"]
    assert counter(off.prefill_url, "sglang:kv_transfer_saved_bytes_total") == saved
    assert off.tree_tokens() == 0


def test_overlap_is_the_default_and_keeps_all_of_an_answer(on, page):
    """Without it the tree has one token less of each: that of the step in flight."""
    assert not requests.get(on.decode_url + "/get_server_info", timeout=30).json()["disable_overlap_schedule"]
    on.flush()
    # With the 12 tokens of its answer, this prompt is whole pages.
    assert len(on(base_prompt(page)[:-12], 12)["output_ids"]) == 12
    on.check_idle()
    assert on.tree_tokens() == len(base_prompt(page))


def test_conversations_as_by_default(cluster, truth):
    """Decode computes short remainders itself."""
    if len(cluster.decode_urls) < 3:
        pytest.skip("one page size over one backend has such a worker")
    pair = Pair(cluster, decode=2)
    pair.flush()
    computed = counter(pair.decode_url, "sglang:decode_computed_tokens_total")
    assert conversations(pair) == truth["conversations"]
    assert counter(pair.decode_url, "sglang:decode_computed_tokens_total") > computed
    pair.check_idle()


def test_conversations_through_the_router(cluster, truth):
    assert conversations(ask(cluster.router_url)) == truth["conversations"]


def test_a_cold_herd_is_computed_and_sent_once(on, off, page):
    """Requests with one new prefix, at once: one brings it, the others wait for that and need only their own ends."""

    def herd(pair: Pair, asked: list[list[int]]) -> list[dict]:
        pair.flush()
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(pair, asked))

    names = ("sglang:decode_followed_requests_total", "sglang:decode_followed_tokens_total")
    before = [counter(on.decode_url, name) for name in names]
    followed = 0.0
    for seed in range(5):
        rnd = random.Random(100 * page + seed)
        shared = words(rnd, 192)
        asked = [shared + words(rnd, 20) for _ in range(8)]
        answers = herd(on, asked)
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in herd(off, asked)]
        details = sorted((a["meta_info"]["cached_tokens_details"] for a in answers), key=lambda d: d["decode_prefix"])
        assert [d["decode_prefix"] for d in details] == [0] + [192] * 7
        assert sum(d["transferred"] for d in details) == 192 + 8 * 20
        # Prefill, whatever its schedule policy, has the prefix in its own tree when the followers come.
        assert sorted(a["meta_info"]["cached_tokens"] for a in answers) == [0] + [192] * 7
        followed, tokens = (counter(on.decode_url, name) - was for name, was in zip(names, before, strict=True))
        # Who waited had none of the prefix when it came, and all of it when it was admitted.
        assert tokens == 192 * followed
        # On a machine that is busy with other work, all may come only when the first copy has arrived: another herd.
        if followed:
            break
    assert followed > 0


@pytest.mark.parametrize("prefill_hit", ["shorter", "same", "longer"])
def test_every_hit_length(on, truth, page, shareable, prefill_hit):
    """Decode holds none, part, whole pages and all of the prompt; prefill holds less, as much or more."""
    base = base_prompt(page)
    page_bytes = None
    for name, prompt, expected in hit_lengths(page):
        on.flush()
        assert on(base)["output_ids"] == truth["base", page]
        if prefill_hit == "shorter":
            on.flush(on.prefill_url)
        if prefill_hit == "longer":
            on.flush(on.decode_url)
            on(prompt[: len(prompt) // 2], 1)
            expected = len(prompt) // 2 // page * page
        expected = shareable(expected, len(prompt))
        sent = counter(on.prefill_url, "sglang:kv_transfer_sent_bytes_total")
        answer = on(prompt)
        assert answer["output_ids"] == truth[name, page], name
        details = answer["meta_info"]["cached_tokens_details"]
        assert details["decode_prefix"] == expected, name
        assert details["decode_prefix"] + details["transferred"] == len(prompt)
        # Trap 2: never more than the prompt, and never less than decode had.
        assert expected <= answer["meta_info"]["cached_tokens"] <= answer["meta_info"]["prompt_tokens"] == len(prompt)
        # What the request says was sent is what the prefill counted.
        now = counter(on.prefill_url, "sglang:kv_transfer_sent_bytes_total")
        assert now - sent == details["transferred_bytes"], name
        num_pages = -(-details["transferred"] // page)
        if num_pages:
            page_bytes = page_bytes or details["transferred_bytes"] // num_pages
            assert details["transferred_bytes"] == num_pages * page_bytes


def test_many_clients_with_one_new_prefix(on, truth, page):
    """A herd: nobody's KV is in the tree when all are admitted; the duplicates are freed at commit."""
    on.flush()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: on(base_prompt(page))["output_ids"], range(6)))
    assert answers == [truth["base", page]] * 6


def test_extra_key_keeps_prefixes_apart(on, page, shareable):
    """Trap 14: the same tokens under another key are another prefix."""
    on.flush()
    prompt = base_prompt(page)
    on(prompt, extra_key="a")
    assert on(prompt, extra_key="b")["meta_info"]["cached_tokens_details"]["decode_prefix"] == 0
    assert on(prompt)["meta_info"]["cached_tokens_details"]["decode_prefix"] == 0
    again = on(prompt, extra_key="a")["meta_info"]["cached_tokens_details"]["decode_prefix"]
    assert again == shareable(len(prompt), len(prompt)) > 0


def test_samples_of_a_prompt(on, truth, page):
    """Trap 30; more of it in python/extras/samples/tests/test_samples.py."""
    on.flush()
    prompt = base_prompt(page)
    body = on.body(prompt, 16)
    body["sampling_params"]["n"] = 3
    on._workers.submit(requests.post, on.prefill_url + "/generate", json=body, timeout=60)
    answers = requests.post(on.decode_url + "/generate", json=body, timeout=60).json()
    assert [answer["output_ids"] for answer in answers] == [truth["base", page]] * 3
    transferred = [answer["meta_info"]["cached_tokens_details"]["transferred"] for answer in answers]
    assert sorted(transferred) == [0, 0, len(prompt)]


def test_health_checks_leave_nothing(on):
    """Trap 13, I7."""
    on.flush()
    for _ in range(3):
        assert requests.get(on.decode_url + "/health_generate", timeout=30).status_code == 200
    wait_idle(on.decode_url)
    assert on.tree_tokens() == 0


def test_flush_forgets_everything(on, truth, page):
    on(base_prompt(page))
    wait_idle(on.decode_url)
    assert on.tree_tokens() > 0
    on.flush()
    assert on.tree_tokens() == 0
    assert on(base_prompt(page))["output_ids"] == truth["base", page]


def test_abort_at_every_stage(on, truth, page):
    """Clients that go away while queued, in transfer or in decode leave nothing behind, and harm nobody."""
    on.flush()
    assert ask_among_leavers(on, base_prompt(page), 300, 0.02) == [truth["base", page]] * 3


def test_abort_of_what_waits(on, truth, page):
    """Of requests that no prefill has been asked for, more than fit: those that wait for KV, and those that wait for a
    place, are told that they are aborted, before a token, and their places are free."""
    on.flush()
    (pool,) = wait_idle(on.decode_url)
    rows = pool["req_slots"]
    rnd = random.Random(11)
    asked = [on.ask_decode(on.body(words(rnd, 20), 16)) for _ in range(rows + 4)]
    end = time.monotonic() + 30
    while sum(found := queues(on.decode_url)) < len(asked):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    waiting, admitted = found
    assert waiting >= 4 and admitted > 0, found
    assert requests.post(on.decode_url + "/abort_request", json={"abort_all": True}, timeout=30).ok
    for reply in [one.result() for one in asked]:
        # Those in transfer have failed, to the engine.
        assert "abort" in reply.text.lower() and (not reply.ok or reply.json()["output_ids"] == []), reply.text
    (pool,) = wait_idle(on.decode_url)
    assert pool["free_req_slots"] == rows and on.tree_tokens() == 0
    assert on(base_prompt(page))["output_ids"] == truth["base", page]


def test_pause_and_continue(on, truth):
    """Trap 3: retracted by a pause, resumed from the tree and the offloaded rest, and the answers are the same."""
    on.flush()
    retractions = []

    def send(*asked) -> dict:
        answer = on(*asked)
        retractions.append(answer["meta_info"]["total_retractions"])
        return answer

    with ThreadPoolExecutor(1) as pool:
        answers, apart = pool.submit(conversations, send, 6, 1, 5, 96), 0.05
        # Longer and longer apart, so that they come to an end.
        while not answers.done():
            assert requests.post(on.decode_url + "/pause_generation", json={"mode": "retract"}, timeout=30).ok
            time.sleep(0.1)
            assert requests.post(on.decode_url + "/continue_generation", json={}, timeout=30).ok
            time.sleep(apart)
            apart *= 1.1
        assert answers.result() == truth["long"]
    # One or another may have had its 96 tokens between two pauses.
    assert len(retractions) == 6 and sum(count > 0 for count in retractions) >= 3, retractions


def test_weight_update_leaves_no_stale_kv(on, truth, page, model, other_model):
    """Trap 26: what decode holds of the old weights is neither matched nor sent around after an update."""
    base = base_prompt(page)

    def update(path: str) -> None:
        for url in (on.prefill_url, on.decode_url):
            wait_idle(url)
            reply = requests.post(url + "/update_weights_from_disk", json={"model_path": path}, timeout=120)
            assert reply.json()["success"], reply.text

    assert on(base)["output_ids"] == truth["base", page]
    try:
        update(other_model)
        first = on(base)
        assert first["meta_info"]["cached_tokens_details"]["decode_prefix"] == 0
        assert first["output_ids"] != truth["base", page]
        on.flush()
        assert on(base)["output_ids"] == first["output_ids"]
    finally:
        update(model)
    assert on(base)["output_ids"] == truth["base", page]
