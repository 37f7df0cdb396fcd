"""The oracle for sliding windows: answers are the aggregated engine's though decode keeps windows of no prefix.

Most tests are those of test_oracle.py, with another model. What decode may hold of a prompt ends where its last window
begins, so the window is sent with every prompt, in the full layers and in those that have one.
"""

from __future__ import annotations

import random

import pytest
from e2e_fixtures import aggregated_answers
from oracle_of_all import *  # noqa: F403
from pd import CHUNK, FLAG, TP2, Pair, ask, base_prompt, conversations, counter, log_of, words
from test_oracle import (  # noqa: F401
    test_extra_key_keeps_prefixes_apart,
    test_flush_forgets_everything,
    test_health_checks_leave_nothing,
    test_pause_and_continue,
    test_weight_update_leaves_no_stale_kv,
)

from sglang_pd_radix.tools.make_model import ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

SHAPE = ModelShape(arch="step3p5")
# 1632 tokens in the full pool, 400 in the other.
RATIO = ["--swa-full-tokens-ratio", "0.25"]
# What `make-model` gives this layout.
WINDOW = 128


def start(num_tokens: int, page: int) -> int:
    """Where the window behind so many tokens begins."""
    return max(0, num_tokens - WINDOW) // page * page


def long_conversation(send, turns: int = 5) -> list[dict]:
    """One client whose history grows to several windows; of each turn the prompt's length and the answer."""
    rnd = random.Random(23)
    history, answers = words(rnd, 200), []
    for _ in range(turns):
        answer = send(history, 24)
        answers.append({"prompt": len(history), **answer})
        history = history + answer["output_ids"] + words(rnd, 150)
    return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "windows", SHAPE))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "other-windows", SHAPE, seed=1))


@pytest.fixture(scope="module")
def truth(clusters, model):
    answers = aggregated_answers(clusters, model)
    send = ask(clusters.cluster.router_url)
    answers["far"] = [answer["output_ids"] for answer in long_conversation(send)]
    return answers


@pytest.fixture(scope="module", params=[1, 16])
def page(request):
    return request.param


@pytest.fixture
def shareable(page):
    """Of so many tokens that decode holds of a prompt of a length, those that are of use to it."""
    return lambda held, length: min(held, start(length, page))


@pytest.fixture(scope="module")
def cluster(clusters, model, truth, backend, page):
    args = ["--page-size", str(page), "--chunked-prefill-size", CHUNK[page]]
    return clusters.get(model, common_args=args, backend=backend, decode=2, decode_args=[[FLAG], []])


def sent(pair: Pair) -> list[float]:
    return [counter(pair.prefill_url, f"sglang:kv_transfer_{kind}_bytes_total") for kind in ("sent", "state")]


def test_turns_far_beyond_the_window(on, truth, page):  # noqa: F811
    """Each turn is sent what it lacks and one window, however long the conversation is; the same when all is held."""
    on.flush()
    asked: list[tuple[int, int, float, float]] = []

    def ask_and_count(ids: list[int], max_new: int) -> dict:
        before = sent(on)
        answer = on(ids, max_new)
        details = answer["meta_info"]["cached_tokens_details"]
        kv, window = (now - was for now, was in zip(sent(on), before, strict=True))
        assert details["decode_prefix"] + details["transferred"] == len(ids)
        assert kv == details["transferred_bytes"]
        asked.append((len(ids), details["decode_prefix"], kv, window))
        return answer

    for _ in range(2):
        assert [answer["output_ids"] for answer in long_conversation(ask_and_count)] == truth["far"]
        on.check_idle()
    lengths = [length for length, *_ in asked]
    assert lengths[-1] > 6 * WINDOW
    # Half of the layers are of each kind, and alike: a page has the same bytes in both pools.
    page_bytes = asked[0][2] / -(-lengths[0] // page)
    rounds = len(asked) // 2
    for n, (length, prefix, kv, window) in enumerate(asked):
        first = start(length, page)
        # What the turn before has left, in the second round that of the first: up to the window, and no further. An
        # answer's last token may or may not be there.
        left = 0 if n == 0 else lengths[n - 1] + 24 if n < rounds else length
        assert min(left // page * page, first) - page <= prefix <= min(left // page * page, first)
        assert kv == page_bytes * (-(-length // page) - prefix // page)
        assert window == page_bytes * (-(-length // page) - first // page) <= page_bytes * (WINDOW // page + 2)


def test_a_full_hit_brings_the_window(on, truth, page):  # noqa: F811
    """Rows 5 and 33: decode holds all of it, and is sent the window in the layers of both kinds, and no more."""
    on.flush()
    base = base_prompt(page)
    assert on(base)["output_ids"] == truth["base", page]
    before = sent(on)
    again = on(base)
    assert again["output_ids"] == truth["base", page]
    window = len(base) - start(len(base), page)
    assert again["meta_info"]["cached_tokens_details"]["transferred"] == window
    kv, windows = (now - was for now, was in zip(sent(on), before, strict=True))
    assert kv == again["meta_info"]["cached_tokens_details"]["transferred_bytes"] > 0
    assert windows == kv


@pytest.mark.parametrize("short", ["full", "windows"])
def test_answers_survive_eviction_and_retraction(clusters, model, truth, backend, short):
    """Decode 0 has the flag, decode 1 not. One of the pools holds about three of the six long answers.

    The bare engine takes a whole prompt of each pool, so a short one for windows is nothing for it.
    """
    few = ["--num-reserved-decode-tokens", "16"]
    few += ["--max-total-tokens", "768"] if short == "full" else ["--max-total-tokens", "1024", *RATIO]
    common = ["--page-size", "16", "--chunked-prefill-size", "64"]
    workers = {"decode": 2, "decode_args": [[*few, FLAG], few]}
    cluster = clusters.get(model, common_args=common, backend=backend, **workers)  # noqa: F811
    for decode in (0, 1) if short == "full" else (0,):
        pair = Pair(cluster, decode=decode)
        # On a busy machine the six do not always meet.
        for _ in range(4):
            assert conversations(pair, 6, 1, 5, 96) == truth["long"]
            if short != "full" or "Retract requests" in log_of(cluster, pair.decode_url):
                break
        assert conversations(pair) == truth["conversations"]
        pair.check_idle()
        if short == "full":
            assert "Retract requests" in log_of(cluster, pair.decode_url), "the pool was not small enough"


def test_two_ranks_on_both_sides(clusters, model, truth, backend):
    """Other sizes are refused, in `test_state_wire.py`: there no worker has to be served before it is ready."""
    common = ["--page-size", "16", "--chunked-prefill-size", "64", *TP2]
    cluster = clusters.get(model, backend=backend, decode_args=[FLAG], common_args=common)  # noqa: F811
    pair = Pair(cluster)
    assert conversations(pair) == truth["conversations"]
    assert [pair(base_prompt(16))["output_ids"] for _ in range(2)] == [truth["base", 16]] * 2
    pair.check_idle()
