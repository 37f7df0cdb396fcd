"""The workload of the engine's PegaFlow proposal (PR #17221), scaled to a machine without a GPU.

    python benchmark/kv_server.py --model DIR --requests 100 --prompt 1024 --answer 32
    python benchmark/kv_server.py --adapter            # its cost to the scheduler thread alone, without an engine

One aggregated engine after the other: no radix cache, the radix cache alone, with PegaFlow cold and, after the device
cache has been flushed, warm; at last two engines that share one server. On a machine without a GPU the real server runs
on a stand-in for the CUDA driver (test/srt/pegaflow_host): what this shows is the adapter and the server, not a GPU.

Prints, per run: seconds for all requests, TTFT p50 and p99, prompt tokens that were in the cache, and of PegaFlow the
scheduler thread's time in the adapter per request, and the bytes in the server's pool.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

from sglang_pd_radix.tools.cluster import Cluster

HOST_DIR = Path(__file__).resolve().parents[1] / "test" / "srt" / "pegaflow_host"


def send(url: str, ids: list[int], answer: int) -> tuple[float, int]:
    """Time to the first token, seconds, and how many tokens of the prompt were cached."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
        "stream": True,
    }
    start, first, last = time.perf_counter(), 0.0, b""
    with requests.post(url + "/generate", json=body, timeout=600, stream=True) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                last = line
    return first, json.loads(last[6:])["meta_info"]["cached_tokens"]


def run(url: str, prompts: list[list[int]], args: argparse.Namespace) -> dict:
    start = time.perf_counter()
    with ThreadPoolExecutor(args.clients) as pool:
        replies = list(pool.map(lambda ids: send(url, ids, args.answer), prompts))
    seconds = time.perf_counter() - start
    times = sorted(first for first, _ in replies)
    return {
        "seconds": round(seconds, 2),
        "ttft_p50_ms": round(1000 * statistics.median(times)),
        "ttft_p99_ms": round(1000 * times[int(0.99 * (len(times) - 1))]),
        "cached_tokens": sum(cached for _, cached in replies),
    }


def adapter(url: str) -> dict:
    state = requests.get(url + "/get_server_info", timeout=60).json()["internal_states"][0]
    return state["pegaflow"]


def flush(url: str) -> None:
    end = time.monotonic() + 60
    while requests.post(url + "/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < end, "the engine is not idle"
        time.sleep(0.2)


def adapter_cost(prompt: int, rounds: int = 20) -> None:
    """What a miss, saving and loading of ``prompt`` tokens take of the scheduler thread, by page size."""
    import host_server

    with tempfile.TemporaryDirectory() as directory:
        server = host_server.HostServer(Path(directory), pool="2gb").start()
        try:
            for page in (1, 16, 64):
                spent, counters = _adapter_cost(server, prompt, page, rounds)
                per = {what: round(1000 * seconds / rounds, 3) for what, seconds in spent.items()}
                print(json.dumps({"prompt": prompt, "page": page, "ms_per_request": per, **counters}), flush=True)
        finally:
            server.kill()


def _adapter_cost(server, prompt: int, page: int, rounds: int) -> tuple[dict[str, float], dict]:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from small_engine import SmallEngine  # isort: skip

    torch.set_num_threads(1)
    rnd = random.Random(1)
    small = SmallEngine(server, size=prompt * 2, page=page, namespace=f"cost-{page}")
    tree, spent = small.tree, {"miss": 0.0, "save": 0.0, "load": 0.0}

    def since(before: float, what: str) -> None:
        assert tree.drain()
        spent[what] += tree.seconds - before
        small.flush()

    for n in range(rounds):
        tokens = rnd.choices(range(50000), k=prompt)
        for what in ("miss", "save", "load"):
            before = tree.seconds
            if what == "save":
                tree.insert(InsertParams(key=RadixKey(tokens, None), value=small.allocator.alloc(prompt)))
            else:
                small.ask(f"{what}{n}", [*tokens, 0])
                small.wait(f"{what}{n}")
            since(before, what)
    counters = tree.pegaflow_state()
    small.close()
    return spent, {name: counters[name] for name in ("saved", "saves_failed", "loaded", "loads_failed", "lost")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory, for all but --adapter")
    parser.add_argument("--adapter", action="store_true", help="only the scheduler thread's time, for 4096 tokens")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device-tokens", type=int, default=32768, help="tokens of the engine's KV pool")
    parser.add_argument("--pool", default="4gb", help="of the server")
    parser.add_argument("--only", nargs="*", choices=("none", "radix", "pegaflow", "two"), help="some of the runs")
    args = parser.parse_args()
    sys.path.insert(0, str(HOST_DIR))
    import host_server

    if args.adapter:
        adapter_cost(4096)
        return
    if not args.model:
        parser.error("--model is needed")
    rnd = random.Random(1)
    prompts = [rnd.choices(range(400, 1900), k=args.prompt) for _ in range(args.requests)]
    common = ["--page-size", str(args.page_size), "--max-total-tokens", str(args.device_tokens)]
    common += ["--max-running-requests", "32"]
    wanted = args.only or ["none", "radix", "pegaflow", "two"]

    def report(name: str, figures: dict) -> None:
        print(json.dumps({"run": name, **figures}), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        for name, options in (("none", ["--disable-radix-cache"]), ("radix", [])):
            if name in wanted:
                with Cluster(args.model, aggregated=True, common_args=[*common, *options], log_dir=logs) as cluster:
                    report(f"{name}, first round", run(cluster.router_url, prompts, args))
                    flush(cluster.router_url)
                    report(f"{name}, after a flush", run(cluster.router_url, prompts, args))
        for name in ("pegaflow", "two"):
            if name not in wanted:
                continue
            server = host_server.HostServer(logs, pool=args.pool).start()
            options = [*common, "--enable-pegaflow", "--pegaflow-endpoint", server.endpoint]
            started = [
                Cluster(args.model, aggregated=True, common_args=options, log_dir=logs / str(i), env=env)
                for i, env in enumerate([host_server.engine_env()] * (2 if name == "two" else 1))
            ]
            try:
                urls = []
                for cluster in started:
                    cluster.start()
                    urls.append(cluster.router_url)
                before = adapter(urls[0])["scheduler_seconds"]
                rounds = [("cold", urls[0]), ("warm, after a flush", urls[-1])]
                for what, url in rounds:
                    if url == urls[0] and what != "cold":
                        flush(url)
                        before = adapter(url)["scheduler_seconds"]
                    figures = run(url, prompts, args)
                    state = adapter(url)
                    if name == "two" and what != "cold":
                        what, before = "the other engine, whose device cache is empty", 0.0
                    spent = (state["scheduler_seconds"] - before) / args.requests
                    pool = server.metric("pegaflow_pool_used_bytes")
                    more = {"adapter_ms_per_request": round(1000 * spent, 3), "pool_mib": round(pool / 2**20)}
                    report(f"{name}, {what}", {**figures, **more, "loaded_pages": state["loaded"]})
            finally:
                for cluster in started:
                    cluster.stop()
                server.kill()


if __name__ == "__main__":
    main()
