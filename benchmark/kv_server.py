"""The workload of the engine's PegaFlow proposal (PR #17221), scaled to a machine without a GPU.

    python benchmark/kv_server.py                      # all runs, on a made model
    python benchmark/kv_server.py --adapter            # its cost to the scheduler thread alone, without an engine

All deployments are started, and get the same prompts one after the other: no radix cache, the radix cache alone,
PegaFlow, and the engine's own hierarchical cache. All but the first have two engines. The first engine answers all
prompts, which take several times its device pool; then all of them again; with PegaFlow once more after its device
cache has been flushed, which would empty a hierarchical cache as well; then the second engine answers them. On a
machine without a GPU the real server runs on a stand-in for the CUDA driver (test/srt/pegaflow_host), and the
hierarchical cache on what `supplied/cpu_host/hicache.py` has: what this shows is the adapter and the server, not a
GPU.

Prints, per round: seconds for all requests, TTFT p50 and p99, prompt tokens that were in the cache, and of these those
that came from host memory; of PegaFlow the scheduler thread's time in the adapter per request. Per deployment: MiB of
host memory of all its processes together at the end (PSS, which counts a shared page once), the device pools included,
which here lie in host memory too.
"""

from __future__ import annotations

import argparse
import contextlib
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
from sglang_pd_radix.tools.make_model import make_model
from sglang_pd_radix.tools.process_group import members

HOST_DIR = Path(__file__).resolve().parents[1] / "test" / "srt" / "pegaflow_host"
# Ids of ordinary words in the vocabulary of `pd-radix make-model`.
WORDS = range(400, 1900)


def send(url: str, ids: list[int], answer: int) -> tuple[float, int, int]:
    """Time to the first token, seconds; how many tokens of the prompt were cached, and of these on the host."""
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
    meta = json.loads(last[6:])["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return first, meta["cached_tokens"], details.get("host", 0) + details.get("storage", 0)


def run(url: str, prompts: list[list[int]], args: argparse.Namespace) -> dict:
    start = time.perf_counter()
    with ThreadPoolExecutor(args.clients) as pool:
        replies = list(pool.map(lambda ids: send(url, ids, args.answer), prompts))
    seconds = time.perf_counter() - start
    times = sorted(reply[0] for reply in replies)
    return {
        "seconds": round(seconds, 2),
        "ttft_p50_ms": round(1000 * statistics.median(times)),
        "ttft_p99_ms": round(1000 * times[int(0.99 * (len(times) - 1))]),
        "cached_tokens": sum(reply[1] for reply in replies),
        "from_host": sum(reply[2] for reply in replies),
    }


def adapter(url: str) -> dict:
    """What PegaFlow's part of an engine says of itself; nothing without."""
    state = requests.get(url + "/get_server_info", timeout=60).json()["internal_states"][0]
    return state.get("pegaflow", {})


def resident_mib(clusters: list[Cluster], server) -> int:
    """Host memory of all processes, pages that several of them map counted once."""
    pids = {pid for cluster in clusters for process in cluster.processes for pid in members(process.pid)}
    pids |= {server.process.pid} if server else set()
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return round(total / 1024)


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


class Deployment:
    """One engine, or two, and with PegaFlow its server."""

    def __init__(self, name: str, options: list[str], args: argparse.Namespace, logs: Path) -> None:
        import host_server

        self.name, self.server, env = name, None, {}
        logs.mkdir()
        if name == "pegaflow":
            self.server, env = host_server.HostServer(logs, pool=args.pool).start(), host_server.engine_env()
            options = [*options, "--pegaflow-endpoint", self.server.endpoint]
        self.clusters = [
            Cluster(args.model, aggregated=True, common_args=options, log_dir=logs / str(i), env=env, timeout_s=600)
            for i in range(1 if name == "none" else 2)
        ]

    def stop(self) -> None:
        for cluster in self.clusters:
            cluster.stop()
        if self.server:
            self.server.kill()


def measure(deployed: Deployment, prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Have the engines answer, and print how that went."""
    name, server, clusters = deployed.name, deployed.server, deployed.clusters
    urls = [cluster.router_url for cluster in clusters]
    rnd = random.Random(2)
    warm_up = [rnd.choices(WORDS, k=args.prompt) for _ in range(args.clients)]
    rounds = [("cold", 0), ("again", 0), ("after a flush", 0), ("the second engine", 1)]
    if name != "pegaflow":
        # Nothing would be left: a flush empties the hierarchical cache too.
        del rounds[2]
    for what, engine in rounds[: 1 if name == "none" else None]:
        url = urls[engine]
        if what in ("cold", "the second engine"):
            run(url, warm_up, args)
        if what != "again":
            flush(url)
        before = adapter(url)
        figures = run(url, prompts, args)
        after = adapter(url)
        if after:
            spent = (after["scheduler_seconds"] - before["scheduler_seconds"]) / args.requests
            figures["adapter_ms_per_request"] = round(1000 * spent, 3)
            figures |= {key: after[key] - before[key] for key in ("saved", "loaded", "saves_failed", "loads_failed")}
        print(json.dumps({"run": f"{name}, {what}", **figures}), flush=True)
    figures = {"engines": len(clusters), "host_mib": resident_mib(clusters, server)}
    if server:
        figures["pool_mib"] = round(server.metric("pegaflow_pool_used_bytes") / 2**20)
    print(json.dumps({"run": f"{name}, host memory", **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; without, one is made as by `pd-radix make-model`")
    parser.add_argument("--adapter", action="store_true", help="only the scheduler thread's time, for 4096 tokens")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device-tokens", type=int, default=8192, help="tokens of an engine's KV pool")
    parser.add_argument("--pool", default="1gb", help="of the PegaFlow server")
    parser.add_argument("--hicache-gb", type=int, default=1, help="of each engine's hierarchical cache")
    parser.add_argument("--only", nargs="*", choices=("none", "radix", "pegaflow", "hicache"), help="some of the runs")
    args = parser.parse_args()
    sys.path.insert(0, str(HOST_DIR))

    if args.adapter:
        adapter_cost(4096)
        return
    rnd = random.Random(1)
    prompts = [rnd.choices(WORDS, k=args.prompt) for _ in range(args.requests)]
    common = ["--page-size", str(args.page_size), "--max-total-tokens", str(args.device_tokens)]
    # An idle engine leaves the cores to the other one.
    common += ["--max-running-requests", str(2 * args.clients), "--sleep-on-idle"]
    deployments = {
        "none": ["--disable-radix-cache"],
        "radix": [],
        "pegaflow": ["--enable-pegaflow"],
        "hicache": ["--enable-hierarchical-cache", "--hicache-size", str(args.hicache_gb)],
    }
    with tempfile.TemporaryDirectory() as directory:
        args.model = args.model or str(make_model(Path(directory) / "model"))
        with contextlib.ExitStack() as running:
            deployed = []
            for name in args.only or deployments:
                options = [*common, *deployments[name]]
                print(json.dumps({"deployment": name, "options": options}), flush=True)
                deployed.append(Deployment(name, options, args, Path(directory) / name))
                running.callback(deployed[-1].stop)
            # All at once: what takes time when an engine starts is one thread's work.
            clusters = [cluster for one in deployed for cluster in one.clusters]
            with ThreadPoolExecutor(len(clusters)) as starters:
                list(starters.map(Cluster.start, clusters))
            for one in deployed:
                measure(one, prompts, args)


if __name__ == "__main__":
    main()
