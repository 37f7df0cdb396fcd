"""What the end-to-end tests share: requests to a chosen prefill/decode pair, workloads, and a look into the pools."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

import requests

from sglang_pd_radix.tools.cluster import Cluster
from sglang_pd_radix.tools.workers import pool_problems, server_info, told_pools

FLAG = "--disaggregation-decode-enable-radix-cache"
LOCAL = "--disaggregation-decode-local-prefill"
# Ids of ordinary words in the vocabulary of `pd-radix make-model`.
WORDS = range(400, 1900)

Answer = list[int]
Ask = Callable[..., dict]


def generate_body(ids: list[int], max_new: int, **more) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, **more}


def ask(url: str) -> Ask:
    """Ask one address: the aggregated engine or a router."""

    def send(ids: list[int], max_new: int = 16, **more) -> dict:
        reply = requests.post(url + "/generate", json=generate_body(ids, max_new, **more), timeout=120)
        reply.raise_for_status()
        return reply.json()

    return send


@dataclass
class Pair:
    """One prefill and one decode worker of a cluster: through its gateway where there are no others, else addressed
    directly, as the gateway addresses them."""

    cluster: Cluster
    prefill: int = 0
    decode: int = 0
    # One for each request that is under way at once: what waits here for a thread has not been asked yet.
    _workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(128), repr=False)

    @property
    def prefill_url(self) -> str:
        return self.cluster.prefill_urls[self.prefill]

    @property
    def decode_url(self) -> str:
        return self.cluster.decode_urls[self.decode]

    def body(self, ids: list[int], max_new: int, **more) -> dict:
        port = [p for p in self.cluster.processes if p.role == "prefill"][self.prefill].bootstrap_port
        room = random.randrange(1, 2**62)
        more = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room, **more}
        return generate_body(ids, max_new, **more)

    def decode_body(self, body: dict) -> dict:
        """What decode is sent, where prefill is sent ``body``."""
        return body

    def ask_prefill(self, body: dict) -> Future:
        """Send one side of a request; the reply comes later."""
        return self._workers.submit(requests.post, self.prefill_url + "/generate", json=body, timeout=120)

    def ask_decode(self, body: dict) -> Future:
        return self._workers.submit(requests.post, self.decode_url + "/generate", json=body, timeout=120)

    @property
    def through_gateway(self) -> bool:
        """Whether a gateway can do nothing else than this pair does; then it is asked."""
        alone = len(self.cluster.prefill_urls) == len(self.cluster.decode_urls) == 1 == len(self.cluster.router_urls)
        return alone and type(self) is Pair

    def __call__(self, ids: list[int], max_new: int = 16, **more) -> dict:
        if self.through_gateway and not any(name.startswith("bootstrap_") for name in more):
            return ask(self.cluster.router_url)(ids, max_new, **more)
        body = self.body(ids, max_new, **more)
        first = self.ask_prefill(body)
        reply = requests.post(self.decode_url + "/generate", json=self.decode_body(body), timeout=120)
        first.result().raise_for_status()
        reply.raise_for_status()
        return reply.json()

    # ---- looking inside ----

    def pools(self) -> list[dict]:
        """The pool figures of every rank of both workers that reports them."""
        return [pool for url in (self.prefill_url, self.decode_url) for pool in pools(url)]

    def flush(self, *urls: str) -> None:
        for url in urls or (self.prefill_url, self.decode_url):
            # The router's health check is a request too, and comes when it likes: now and then, not each time.
            for _ in range(20):
                wait_idle(url)
                reply = requests.post(url + "/flush_cache", timeout=30)
                if reply.status_code == 200:
                    break
                time.sleep(0.1)
            assert reply.status_code == 200, reply.text

    def check_idle(self) -> None:
        """I1 at idle, read from the running servers, and every lock accounted for."""
        for url in (self.prefill_url, self.decode_url):
            check_idle(url)

    def tree_tokens(self) -> int:
        """Tokens in decode's tree that no request holds. One that keeps a tree must tell of it."""
        info = server_info(self.decode_url)
        found = told_pools(info)[:1]
        # A worker without a tree whose model has pools of two kinds does not say.
        assert (found and "evictable" in found[0]) or not keeps_tree(info), self.decode_url
        return sum(pool.get("evictable", 0) for pool in found)


def keeps_tree(info: dict) -> bool:
    """Whether a worker that says this of itself is one of decode with the flag."""
    # An engine without the patch set does not know the flag.
    return info["disaggregation_mode"] == "decode" and info.get("disaggregation_decode_enable_radix_cache", False)


def pools(url: str) -> list[dict]:
    return told_pools(server_info(url))


def check_idle(url: str) -> None:
    """I1 of one worker. One that keeps a tree of its own must tell of it; nothing told is not nothing wrong."""
    found = wait_idle(url)
    info = server_info(url)
    has_tree = keeps_tree(info)
    assert found or not has_tree, url
    # An engine by itself has none.
    buffers = {"metadata_buffers": 0, "free_metadata_buffers": 0} if info["disaggregation_mode"] == "null" else {}
    for pool in found:
        assert ("audit" in pool) == ("locks_taken" in pool) == has_tree, (url, pool)
        assert pool_problems(url, pool | buffers, has_tree) == [], pool


def wait_idle(url: str, seconds: float = 30) -> list[dict]:
    end = time.monotonic() + seconds
    while True:
        found = pools(url)
        if all(pool["idle"] for pool in found):
            return found
        assert time.monotonic() < end, f"{url} is not idle after {seconds} s: {found}"
        time.sleep(0.1)


def queues(url: str) -> tuple[int, int]:
    """How many requests wait on a decode worker for admission, and how many have been admitted; one rank only."""
    (pool,) = pools(url)
    admitted = pool["req_slots"] - pool["free_req_slots"]
    return pool["rooms"]["request_status"] - admitted, admitted


def counter(url: str, name: str) -> float:
    """The sum of a Prometheus counter or gauge of one worker over its labels; 0 while it has none."""
    lines = requests.get(url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def log_of(cluster: Cluster, url: str) -> str:
    return next(p.log_path for p in cluster.processes if p.url == url).read_text(errors="replace")


# ---- workloads: each yields a name and a function from an `Ask` to answers; the same everywhere, token for token ----


def words(rnd: random.Random, count: int) -> list[int]:
    return [rnd.choice(WORDS) for _ in range(count)]


def conversations(send: Ask, clients: int = 4, turns: int = 3, seed: int = 1, max_new: int = 12) -> list[list[Answer]]:
    """Several clients at once, each with a growing history."""

    def talk(client: int) -> list[Answer]:
        rnd = random.Random(1000 * seed + client)
        history = words(rnd, rnd.randrange(30, 260))
        answers = []
        for _ in range(turns):
            answers.append(send(history, max_new)["output_ids"])
            history = history + answers[-1] + words(rnd, rnd.randrange(3, 90))
        return answers

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(talk, range(clients)))


# Prefill chunks below and above the prefixes in play.
CHUNK = {1: "48", 16: "64", 64: "512"}


def one_prefill(clusters, model, backend: str, page: int, computes: bool) -> Cluster:
    """One prefill; decode 0 has the flag, decode 1 does not. ``computes``: decode 2 computes short remainders of
    prompts as by default, decode 3 those of up to 200 tokens, decode 4 these without overlapped steps."""
    workers = [[FLAG], []]
    if computes:
        on = [FLAG, LOCAL, "200"]
        workers += [[FLAG, LOCAL, "auto"], on, [*on, "--disable-overlap-schedule"]]
    # The name is what smg tells workers apart by.
    args = ["--page-size", str(page), "--chunked-prefill-size", CHUNK[page], "--served-model-name", "m"]
    return clusters.get(model, decode=len(workers), decode_args=workers, common_args=args, backend=backend)


TP2 = ["--tp-size", "2"]


def tp_cluster(clusters, model, backend, *more: str, **options) -> Cluster:
    """Prefill 0 and decode 0 have one rank, prefill 1 and decode 1 have two; prompts go in chunks of 64 tokens.

    ``more``: options of all workers.
    """
    options = {"prefill_args": [[], TP2], "decode_args": [[FLAG], [FLAG, *TP2]], **options}
    return clusters.get(
        model,
        prefill=2,
        decode=2,
        common_args=["--page-size", "16", "--chunked-prefill-size", "64", *more],
        backend=backend,
        **options,
    )


def check_tp_pair(cluster: Cluster, truth: dict, prefill_tp: int, decode_tp: int) -> None:
    """The workers of a `tp_cluster` with these sizes say what the truth says, and their pools are sound."""
    pair = Pair(cluster, prefill_tp - 1, decode_tp - 1)
    pair.flush()
    assert conversations(pair) == truth["conversations"]
    # Again, now with everything in the tree: a full hit on every rank.
    base = base_prompt(16)
    assert pair(base)["output_ids"] == truth["base", 16]
    again = pair(base)
    assert again["output_ids"] == truth["base", 16]
    assert again["meta_info"]["cached_tokens_details"]["transferred"] == 0
    pair.check_idle()


# Answers that are longer than a busy machine takes to abort them.
LEAVERS, LEAVERS_MAX_NEW = 12, 400


def ask_among_leavers(pair: Pair, prompt: list[int], length: int, apart: float) -> list[Answer]:
    """What three questions are answered while 12 clients go away: each ``apart`` seconds later in its life, of 10.

    Their prompts have ``length`` tokens of their own. Every third stays until it has its first tokens. Each must be
    told that it was aborted, and none gets the answer that it no longer wants.
    """
    rnd = random.Random(3)
    bodies = [pair.body(words(rnd, length), LEAVERS_MAX_NEW, rid=f"leaver-{rnd.random()}-{i}") for i in range(LEAVERS)]

    def leave(i: int) -> tuple[str, int, str]:
        """How decode ended it, after how many tokens, and what it said of that."""
        body = pair.decode_body(bodies[i]) | {"stream": True}
        pair.ask_prefill(bodies[i])
        begun, over = Event(), Event()
        leaving = pair._workers.submit(abort, i, begun, over)
        last = {}
        with requests.post(pair.decode_url + "/generate", json=body, stream=True, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    begun.set()
        over.set()
        leaving.result()
        meta = last.get("meta_info", {})
        reason = meta.get("finish_reason") or {}
        return reason.get("type", str(last)), meta.get("completion_tokens", 0), reason.get("message", "")

    def abort(i: int, begun: Event, over: Event) -> None:
        if i % 3:
            time.sleep(apart * (i % 10))
        else:
            begun.wait(60)
        # What has not come yet is not aborted: say it until it is over.
        while not over.is_set():
            for url in (pair.prefill_url, pair.decode_url):
                requests.post(url + "/abort_request", json={"rid": bodies[i]["rid"]}, timeout=30)
            over.wait(0.05)

    with ThreadPoolExecutor(3) as pool:
        leaving = [pool.submit(leave, i) for i in range(LEAVERS)]
        answers = [pair(prompt)["output_ids"] for _ in range(3)]
        ended = [left.result() for left in leaving]
    assert [how for how, _, _ in ended] == ["abort"] * LEAVERS, ended
    assert all(0 < count < LEAVERS_MAX_NEW for _, count, _ in ended[::3]), ended
    return answers


def hit_lengths(page: int) -> Iterator[tuple[str, list[int], int]]:
    """(name, prompt, what decode must have held) after the prompt ``base`` has been answered, for one page size."""
    base = base_prompt(page)
    other = words(random.Random(9), 40)
    n = len(base)
    yield "0", other + base[:50], 0
    yield "mid-page", base[: 2 * page + page // 2] + other, 2 * page if page > 1 else 2
    yield "page edge", base[: 2 * page] + other, 2 * page
    yield "N", base, n
    # At page size 1 the tree also holds the last token; a prompt one token longer leaves exactly it to send.
    yield "N-1", base + other[:1], n
    yield "chunk edge", base[:128] + other[:70], 128


def base_prompt(page: int) -> list[int]:
    """A prompt of whole pages, so that decode can hold all of it."""
    return words(random.Random(7), 192 if page < 64 else 256)
