"""Host memory below the trees of decode workers of several ranks, and of other models. With `make test-all`."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import mooncake_master
import pytest
import requests
from e2e_fixtures import BACKENDS
from pd import FLAG, TP2, Pair, ask, conversations, counter, pools, wait_idle, words
from test_dp_attention import DP2

from sglang_pd_radix.tools.cluster import Cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

SMALL = ["--max-total-tokens", "1024", "--num-reserved-decode-tokens", "16", FLAG]
HOST = ["--enable-hierarchical-cache", "--hicache-ratio", "16"]
LOADED = "sglang:decode_host_loaded_tokens_total"
LIMITS = ["--hicache-storage-backend-extra-config", '{"prefetch_threshold": 1, "prefetch_timeout_base": 20}']
DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


def check(pair: Pair, truth: dict) -> None:
    for _ in range(2):
        assert conversations(pair, 6, 1, 5, 96) == truth["long"]
        assert conversations(pair) == truth["conversations"]
    pair.check_idle()
    assert counter(pair.decode_url, LOADED) > 0


@pytest.mark.parametrize("selective", [False, True])
def test_two_ranks(clusters, model, truth, backend, selective):
    policy = ["--hicache-write-policy", "write_through_selective"] if selective else []
    cluster = clusters.get(
        model,
        decode=1,
        prefill_args=[TP2],
        decode_args=[[*SMALL, *HOST, *TP2, *policy]],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
    )
    check(Pair(cluster), truth)


@pytest.mark.parametrize("page", ["1", "64"])
def test_other_models(clusters, mla_model, mla_truth, backend, page):
    cluster = clusters.get(
        mla_model,
        decode=1,
        decode_args=[[*SMALL, *HOST]],
        backend=backend,
        common_args=["--page-size", page, "--chunked-prefill-size", "64"],
    )
    check(Pair(cluster), mla_truth)


def test_flushes_and_aborts_between_saves_and_loads(clusters, model, truth, backend):
    """Whatever comes between, nobody reads anything else and nothing is left behind."""
    cluster = clusters.get(
        model,
        decode=1,
        decode_args=[[*SMALL, *HOST]],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64"],
    )
    pair, rnd = Pair(cluster), random.Random(1)
    stop = threading.Event()

    def ask_and_leave(rid: str) -> None:
        body = pair.body(words(rnd, 200), 64, rid=rid)
        leaving = pair.ask_prefill(body), pair.ask_decode(body)
        stop.wait(0.05)
        for url in (pair.decode_url, pair.prefill_url):
            requests.post(url + "/abort_request", json={"rid": rid}, timeout=10)
        for one in leaving:
            one.result()

    def disturb() -> None:
        while not stop.wait(0.3):
            ask_and_leave(f"gone{rnd.random()}")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(3):
            assert conversations(pair) == truth["conversations"]
    finally:
        stop.set()
        thread.join()
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    pair.check_idle()


def wait_written(url: str) -> None:
    """Wait until a decode worker has written what is in its host memory."""
    end = time.monotonic() + 30
    while any(pool["host"]["storage"]["waiting"] for pool in wait_idle(url)):
        assert time.monotonic() < end
        time.sleep(0.05)


class ByTurns:
    """Asks two decode workers with one storage by turns, each when the other has written what it has."""

    def __init__(self, cluster: Cluster, page: int):
        self.pairs, self.page = [Pair(cluster, decode=i) for i in range(2)], page
        self.told: list[dict] = []
        self._turn = threading.Lock()
        # By what a conversation begins with: how many turns it has had, and what is known of it then.
        self._turns: dict[tuple[int, ...], tuple[int, int]] = {}

    def __call__(self, ids: list[int], max_new: int) -> dict:
        with self._turn:
            turn, known = self._turns.get(tuple(ids[:20]), (0, 0))
            pair = self.pairs[turn % 2]
            reply = pair(ids, max_new)
            wait_written(pair.decode_url)
            # Of the last token of an answer there is no KV.
            self._turns[tuple(ids[:20])] = turn + 1, (len(ids) + max_new - 1) // self.page * self.page
            details = reply["meta_info"]["cached_tokens_details"]
            assert details["decode_prefix"] == min(known, len(ids) // self.page * self.page), (turn, details)
            assert details["transferred"] == len(ids) - details["decode_prefix"]
            assert details["decode_storage"] <= details["decode_host"] <= details["decode_prefix"]
            # The first turn of a conversation is new; of a later one, this worker lacks what the other one has done.
            assert (details["decode_storage"] > 0) == (turn > 0)
            self.told.append(details)
            return reply


# By what differs: options of prefill and decode; what decode has besides; and of all workers.
KINDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "one rank": ([], [], []),
    "two ranks": (TP2, [], []),
    # One writes what all have.
    "mla of two ranks": (TP2, [], []),
    "fp8_e4m3": ([], [], ["--kv-cache-dtype", "fp8_e4m3"]),
    "fp8_e5m2": ([], [], ["--kv-cache-dtype", "fp8_e5m2"]),
    # Each has a tree of its own, and one folder.
    "dp attention": (TP2, DP2, []),
    "mla with dp attention": (TP2, DP2, []),
}


STORAGES = ["file", "mooncake"]
# Each kind with each storage over NIXL. What a storage is given has been copied to host memory before: over Mooncake's
# wire all kinds with one storage, and one kind with all.
CELLS = [
    (kind, storage, backend)
    for backend in BACKENDS
    for storage in STORAGES
    for kind in KINDS
    if storage == "file" or backend == "nixl" or kind == "one rank"
]


def storing(request, storage: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Options and environment of decode workers that share a storage of this name, new where it is in files."""
    environment = {DIRECTORY: str(folder)}
    if storage == "mooncake":
        # Of one cluster: for 10 s or more a master offers the memory of workers that were killed.
        held = ExitStack()
        request.addfinalizer(held.close)
        address = held.enter_context(mooncake_master.running(folder)).address
        environment = {"MOONCAKE_MASTER": address, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
        environment["MOONCAKE_GLOBAL_SEGMENT_SIZE"] = str(256 * 1024**2)
    return ["--hicache-storage-backend", storage, *LIMITS], environment


@pytest.fixture
def kind(request):
    return request.param


@pytest.fixture
def stored(request, tmp_path):
    return storing(request, request.param, tmp_path)


@pytest.fixture
def answers(request, clusters, kind):
    """The model, and what conversations with it are answered by the engine alone."""
    prefix = "mla_" if kind.startswith("mla") else ""
    model = request.getfixturevalue(f"{prefix}model")
    if not kind.startswith("fp8"):
        return model, request.getfixturevalue(f"{prefix}truth")["conversations"]
    cluster = clusters.get(model, aggregated=True, common_args=["--page-size", "16", *KINDS[kind][2]])
    return model, conversations(ask(cluster.router_url))


@pytest.mark.parametrize("kind, stored, backend", CELLS, indirect=True)
def test_two_workers_share_a_storage(clusters, answers, backend, kind, stored):
    """A conversation goes on at the other one, as if it had been there all the time."""
    model, expected = answers
    ranks, more, common = KINDS[kind]
    cluster = clusters.get(
        model,
        decode=2,
        prefill_args=[ranks],
        decode_args=[FLAG, *HOST, *ranks, *more, *stored[0]],
        decode_env=stored[1],
        backend=backend,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64", "--max-total-tokens", "4096", *common],
    )
    send = ByTurns(cluster, page=16)
    assert conversations(send) == expected
    sent = sum(one["transferred"] for one in send.told)
    print(f"{sent} tokens sent, {sum(one['decode_storage'] for one in send.told)} fetched")
    for pair in send.pairs:
        pair.check_idle()
        assert all(pool["host"]["storage"]["late"] == 0 for pool in pools(pair.decode_url))
        assert any(pool["host"]["storage"]["fetched"] for pool in pools(pair.decode_url))
    # After a flush it is all there.
    first = send.pairs[0]
    prompt = words(random.Random(7), 100)
    answer = first(prompt, 4)["output_ids"]
    forget(first)
    again = first(prompt, 4)
    assert again["output_ids"] == answer and again["meta_info"]["cached_tokens_details"]["decode_storage"] == 96
    forget(first)
    check_read_once(first, prompt, answer)
    first.check_idle()


def forget(pair: Pair) -> None:
    """All but what is stored."""
    wait_written(pair.decode_url)
    pair.flush(pair.decode_url)


def fetched(pair: Pair) -> int:
    """Tokens, over all ranks, which tell of themselves in any order."""
    return sum(pool["host"]["storage"]["fetched"] for pool in pools(pair.decode_url))


def check_read_once(pair: Pair, prompt: list[int], answer: list[int]) -> None:
    """Of requests that want one prompt at once, each rank with a tree of its own reads it for one."""
    before = fetched(pair)
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: pair(prompt, 4), range(8)))
    assert [one["output_ids"] for one in told] == [answer] * 8
    assert all(one["meta_info"]["cached_tokens_details"]["decode_prefix"] == 96 for one in told)
    # Once for each that answered, of one or two DP ranks.
    assert fetched(pair) - before in {96 * n for n in range(1, len(pools(pair.decode_url)) + 1)}
