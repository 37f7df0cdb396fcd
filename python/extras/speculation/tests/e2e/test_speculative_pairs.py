"""EAGLE and EAGLE3 with the decode tree: tokens as in a run that does not speculate, as many accepted as without it.

Traps 34 (hit length 0 for ever: plain tokens asked of a tree of bigrams) and 35 (tokens right, accepted length falls).
Equal tokens say nothing about the draft model's KV, so each request's accept histogram is compared too.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from e2e_fixtures import aggregated_answers
from pd import (
    FLAG,
    TP2,
    Ask,
    Pair,
    ask_among_leavers,
    base_prompt,
    conversations,
    counter,
    hit_lengths,
    log_of,
    pools,
    words,
)
from test_host_tier import HOST, LOADED, STORAGES, storing, wait_written

from sglang_pd_radix.tools.make_model import DRAFT, ModelShape, make_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

V1, V2 = {"SGLANG_ENABLE_SPEC_V2": "0"}, {"SGLANG_ENABLE_SPEC_V2": "1"}
# Decode workers: with the flag and without, of each version of the engine's speculation.
WORKERS = {"v1": (0, 1), "v2": (2, 3)}
CHAIN = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
ARCHS = ["eagle", "eagle3"]
# What a draft reads of the target has nothing to do with pages: one size is enough for the second.
CELLS = [("eagle", 1), ("eagle", 16), ("eagle3", 16)]


def pytest_generate_tests(metafunc):
    # Not by marks: test_hybrid_speculation.py takes the tests without them.
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("arch, page", CELLS, indirect=True)
    elif "arch" in metafunc.fixturenames:
        metafunc.parametrize("arch", ARCHS, indirect=True)


@pytest.fixture(scope="session")
def arch(request):
    return request.param


@pytest.fixture(scope="session")
def eagle(tmp_path_factory, arch):
    """The path of a target, whose last part is the name of the algorithm that its draft is for."""
    return str(make_model(tmp_path_factory.mktemp("model") / arch, ModelShape(arch=arch)))


@pytest.fixture(scope="session")
def plain(clusters, eagle):
    """The truth: what the engine says that neither disaggregates nor speculates."""
    return aggregated_answers(clusters, eagle)


def speculating(eagle: str, *more: str) -> list[str]:
    algorithm = Path(eagle).name.upper()
    draft = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", f"{eagle}/{DRAFT}"]
    # Only `test_chunked_prefill` has prompts, or batches of them, that are longer than that.
    return [*draft, *CHAIN, "--chunked-prefill-size", "4096", *more]


@pytest.fixture(scope="module")
def page(request):
    return request.param


@pytest.fixture(scope="module")
def cluster(clusters, eagle, plain, backend, page):
    return clusters.get(
        eagle,
        decode=4,
        decode_args=[[FLAG], [], [FLAG], []],
        decode_env=[V1, V1, V2, V2],
        prefill_env=V1,
        common_args=speculating(eagle, "--page-size", str(page)),
        backend=backend,
    )


@pytest.fixture(params=WORKERS)
def pairs(cluster, request):
    """One pair with the flag, one without."""
    on, off = (Pair(cluster, decode=i) for i in WORKERS[request.param])
    for pair in (on, off):
        pair.flush()
    yield on, off
    for pair in (on, off):
        pair.check_idle()


class Watched:
    """Asks for another, and keeps what was drafted and accepted for each prompt."""

    def __init__(self, send: Ask):
        self.send, self.accepted, self.hits = send, {}, 0

    def __call__(self, ids: list[int], max_new: int = 16, **more) -> dict:
        reply = self.send(ids, max_new, **more)
        meta = reply["meta_info"]
        self.accepted[tuple(ids)] = meta["spec_accept_histogram"]
        self.hits += (meta.get("cached_tokens_details") or {}).get("decode_prefix", 0)
        return reply

    def length(self) -> float:
        """Tokens a step, over all requests: what was accepted and the target's own."""
        steps = sum(sum(h) for h in self.accepted.values())
        return 1 + sum(n * count for h in self.accepted.values() for n, count in enumerate(h)) / steps


def test_conversations(pairs, plain):
    """Traps 34 and 35, turn after turn: each takes up what decode computed of the turns before, and its drafts'."""
    on, off = map(Watched, pairs)
    assert conversations(off, turns=4) == conversations(on, turns=4)
    assert on.hits > 0 and off.hits == 0
    assert on.accepted == off.accepted
    assert on.length() > 1.3, "the draft must be good enough to show when it gets worse"
    for pair in pairs:
        pair.flush()
        assert conversations(pair) == plain["conversations"]


def test_every_hit_length(pairs, plain, page):
    """The tree has one token less than it holds KV of: what the last one's draft is depends on the next."""
    on, off = map(Watched, pairs)
    for name, prompt, expected in hit_lengths(page):
        for pair in pairs:
            pair.flush()
        assert on(base_prompt(page))["output_ids"] == off(base_prompt(page))["output_ids"] == plain["base", page]
        reply = on(prompt)
        assert reply["output_ids"] == off(prompt)["output_ids"] == plain[name, page], name
        details = reply["meta_info"]["cached_tokens_details"]
        # What ends with the base ends with a token whose successor differs, or is not there yet.
        least = min(expected, len(prompt) - 1) // page * page
        assert least - page <= details["decode_prefix"] <= least, name
        assert details["decode_prefix"] + details["transferred"] == len(prompt)
    assert on.accepted == off.accepted


def test_what_the_tree_holds_of_an_answer(pairs, page):
    """All that its drafts have KV of, one token less."""
    on, _ = pairs
    prompt = base_prompt(page)
    answer = on(prompt, 24)["output_ids"]
    again = on(prompt + answer + [500], 1)
    held = again["meta_info"]["cached_tokens_details"]["decode_prefix"]
    # Without overlap, the last step of an answer is not taken in by the draft model.
    assert len(prompt) + 24 - 1 - 4 - page <= held < len(prompt) + 24


def test_chunked_prefill(pairs, plain):
    """The engine drafts at the end of a chunk with a token that does not come. The tree is not worse for it."""
    on, off = map(Watched, pairs)
    rnd = random.Random(4)
    history = words(rnd, 4300)
    for _ in range(3):
        answers = [send(history, 32)["output_ids"] for send in (on, off)]
        assert answers[0] == answers[1]
        history = history + answers[0] + words(rnd, 700)
    assert on.length() > off.length() - 0.05


def test_aborts(pairs, plain, page):
    on, _ = pairs
    assert ask_among_leavers(on, base_prompt(page), 200, 0.05) == [plain["base", page]] * 3


def test_flush(pairs, plain, page):
    on, _ = pairs
    assert on(base_prompt(page))["output_ids"] == plain["base", page]
    on.flush()
    assert on.tree_tokens() == 0
    assert on(base_prompt(page))["output_ids"] == plain["base", page]


# ---- retraction ----


# Room for about three of the six long answers.
SMALL = ["--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16"]


@pytest.fixture(scope="module")
def small(clusters, eagle, plain, backend):
    return clusters.get(
        eagle,
        decode=4,
        decode_args=[[*SMALL, FLAG], SMALL, [*SMALL, FLAG], SMALL],
        decode_env=[V1, V1, V2, V2],
        prefill_env=V1,
        common_args=speculating(eagle, "--page-size", "16"),
        backend=backend,
    )


@pytest.mark.parametrize("version", WORKERS)
def test_retraction(small, plain, version):
    """A request that comes back drafts as if it had never left, with the flag and without."""
    retracted = {}
    for which, decode in zip(("on", "off"), WORKERS[version], strict=True):
        pair = Pair(small, decode=decode)
        pair.flush()
        alone, together = Watched(pair), Watched(pair)
        # One by one, nobody is retracted.
        assert conversations(alone, 1, 1, 5, 96) == plain["long"][:1]
        assert conversations(together, 6, 1, 5, 96) == plain["long"]
        for prompt in together.accepted:
            pair.flush()
            alone(list(prompt), 96)
        assert together.accepted == alone.accepted, which
        pair.check_idle()
        retracted[which] = log_of(small, pair.decode_url).count("Retract requests")
    assert all(retracted.values()), retracted
    on = Pair(small, decode=WORKERS[version][0])
    assert counter(on.decode_url, "sglang:evicted_tokens_total") > 0


# ---- host memory ----


@pytest.fixture(scope="module")
def hosted(clusters, eagle, plain, backend):
    return clusters.get(
        eagle,
        decode=2,
        decode_args=[[*SMALL, FLAG, *HOST]] * 2,
        decode_env=[V1, V2],
        prefill_env=V1,
        common_args=speculating(eagle, "--page-size", "16"),
        backend=backend,
    )


@pytest.mark.parametrize("decode", [0, 1], ids=["v1", "v2"])
def test_drafts_come_back_from_host_memory(hosted, plain, decode):
    """With the draft's KV of other pages, or of none, fewer tokens would be accepted."""
    pair = Pair(hosted, decode=decode)
    first, again, alone = Watched(pair), Watched(pair), Watched(pair)
    for send in (first, again):
        assert conversations(send, 6, 1, 5, 96) == plain["long"]
    assert counter(pair.decode_url, LOADED) > 0
    for prompt in again.accepted:
        # Host memory forgets as well.
        pair.flush()
        alone(list(prompt), 96)
    assert first.accepted == again.accepted == alone.accepted
    assert alone.length() > 1.3
    pair.check_idle()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_drafts_come_from_another_worker(request, clusters, eagle, plain, backend, version, storage, tmp_path):
    """Through a storage that both share: the second drafts as the first, from KV that nobody has sent it."""
    options, environment = storing(request, storage, tmp_path)
    cluster = clusters.get(
        eagle,
        decode=2,
        decode_args=[FLAG, *HOST, *options],
        decode_env={**version, **environment},
        prefill_env=V1,
        common_args=speculating(eagle, "--page-size", "16", "--max-total-tokens", "4096"),
        backend=backend,
    )
    one, two = (Watched(Pair(cluster, decode=i)) for i in range(2))
    for watched in (one, two):
        assert conversations(watched) == plain["conversations"]
        wait_written(watched.send.decode_url)
        watched.send.check_idle()
    (storage,) = (pool["host"]["storage"] for pool in pools(two.send.decode_url))
    assert storage["fetched"] > 0 and storage["late"] == 0
    assert two.accepted == one.accepted and two.length() > 1.3


# ---- TP ranks ----


def test_tensor_parallel_sizes(clusters, eagle, plain, backend):
    """Each rank has its part of the draft's KV too."""
    cluster = clusters.get(
        eagle,
        prefill=2,
        prefill_args=[[], TP2],
        decode=2,
        decode_args=[[*TP2, FLAG], TP2],
        decode_env=V2,
        prefill_env=V1,
        common_args=speculating(eagle, "--page-size", "16"),
        backend=backend,
    )
    for prefill in (0, 1):
        check_tensor_parallel_pair(cluster, plain, prefill)


def check_tensor_parallel_pair(cluster, plain, prefill: int = 0) -> None:
    """Of two decode workers, the first with the flag and the second without."""
    on, off = (Watched(Pair(cluster, prefill, decode)) for decode in (0, 1))
    for watched in (on, off):
        watched.send.flush()
        assert conversations(watched) == plain["conversations"]
    assert on.hits > 0 and on.accepted == off.accepted and on.length() > 1.3
    for watched in (on, off):
        watched.send.check_idle()
