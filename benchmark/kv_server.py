"""The workload of the engine's PegaFlow proposal (PR #17221), scaled to a machine without a GPU.

    python benchmark/kv_server.py                      # all runs, on a made model
    python benchmark/kv_server.py --adapter            # its cost to the scheduler thread alone, without an engine

One deployment after the other, with the same prompts: PegaFlow, the engine's own hierarchical cache, the radix cache
alone, and none. All but the last have two engines, each a scheduler with its model in a process of
its own, to which requests are handed without a server. The first engine answers all prompts, which take several times
its device pool; then all of them again; with PegaFlow once more after its device cache has been flushed, which would
empty a hierarchical cache as well; then the second engine answers them, while the first does nothing. On a machine
without a GPU the real server runs on a stand-in for the CUDA driver (test/srt/pegaflow_host), and the hierarchical
cache on what `supplied/cpu_host/hicache.py` has: what this shows is the adapter and the server, not a GPU.

Prints, per round: seconds for all requests, CPU seconds of the engine's process meanwhile, TTFT p50 and the greatest,
prompt tokens that were in the cache, and of these those that came from host memory; of PegaFlow the scheduler
thread's time in the adapter per request. Per deployment: MiB of host memory of all its processes together at the end
(PSS, which counts a shared page once), the device pools included, which here lie in host memory too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from sglang_pd_radix.tools.make_model import make_model

HOST_DIR = Path(__file__).resolve().parents[1] / "test" / "srt" / "pegaflow_host"
# Ids of ordinary words in the vocabulary of `pd-radix make-model`.
WORDS = range(400, 1900)


def figures(seconds: float, cpu: float, ttfts: list[float], cached: list[tuple[int, int]]) -> dict:
    """What is told of a run. ttfts: seconds, sorted. cached: of each request the tokens it found, and those on host."""
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "ttft_p50_ms": round(1000 * statistics.median(ttfts)),
        "ttft_max_ms": round(1000 * ttfts[-1]),
        "cached_tokens": sum(tokens for tokens, _ in cached),
        "from_host": sum(tokens for _, tokens in cached),
    }


def engine() -> None:
    """A scheduler with its model in this process, without a server: it does what each line of the input says."""
    import torch
    from one_scheduler import LoopEnds, make_request, make_scheduler

    # More would wait for each other while other work has the cores, and count that as theirs.
    torch.set_num_threads(1)
    scheduler = make_scheduler(json.loads(sys.stdin.readline()))
    replies, numbers = os.fdopen(os.dup(1), "w"), itertools.count()
    started: dict[str, float] = {}
    first: dict[str, float] = {}
    cached: dict[str, tuple[int, int]] = {}

    def tell(message, req=None) -> None:
        ended = getattr(message, "finished_reasons", None) or []
        for i, rid in enumerate(getattr(message, "rids", None) or []):
            first.setdefault(rid, time.perf_counter())
            if ended[i] is not None:
                details = (message.cached_tokens_details or [None] * (i + 1))[i] or {}
                cached[rid] = message.cached_tokens[i], details.get("host", 0) + details.get("storage", 0)

    def run(prompts: list[list[int]], answer: int, clients: int) -> dict:
        for kept in (started, first, cached):
            kept.clear()
        waiting, start, cpu = prompts[::-1], time.perf_counter(), time.process_time()
        while len(cached) < len(prompts):
            received = []
            while waiting and len(started) - len(cached) < clients:
                request = make_request(f"r{next(numbers)}", waiting.pop(), answer, stream=True)
                started[request.rid] = time.perf_counter()
                received.append(request)
            yield received
        seconds = time.perf_counter() - start
        times = sorted(first[rid] - begun for rid, begun in started.items())
        return figures(seconds, time.process_time() - cpu, times, [*cached.values()])

    def script():
        answer = {"ready": True}
        while True:
            while not scheduler.is_fully_idle():
                yield []
            state = getattr(scheduler.tree_cache, "pegaflow_state", dict)()
            print(json.dumps({**answer, "pegaflow": state}), file=replies, flush=True)
            command = json.loads(sys.stdin.readline() or "{}")
            if not command:
                return
            answer = {}
            if command["do"] == "flush":
                assert scheduler.flush_cache()
            else:
                answer = yield from run(command["prompts"], command["answer"], command["clients"])

    steps = script()

    def receive():
        for received in steps:
            return received
        raise LoopEnds

    scheduler.send_to_tokenizer = scheduler.send_to_detokenizer = SimpleNamespace(send_output=tell)
    scheduler.recv_requests = receive
    try:
        scheduler.event_loop_overlap()
    except LoopEnds:
        os._exit(0)


class Engine:
    """A process that is `engine`. While it is told nothing it does nothing."""

    def __init__(self, options: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--engine"],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.ask(options)

    def ask(self, command: object) -> dict:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"an engine ended:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def resident_mib(pids: list[int]) -> int:
    """Host memory of all these processes, pages that several of them map counted once."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
    return round(sum(int(line.split()[1]) for lines in rollups for line in lines if line.startswith("Pss:")) / 1024)


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


def deployment(name: str, options: list[str], prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Start the engines of ``name``, have them answer, and print how that went."""
    import host_server

    with contextlib.ExitStack() as running:
        logs = Path(running.enter_context(tempfile.TemporaryDirectory()))
        server, env = None, {}
        if name == "pegaflow":
            server, env = host_server.HostServer(logs, pool=args.pool).start(), host_server.engine_env()
            running.callback(server.kill)
            options = [*options, "--pegaflow-endpoint", server.endpoint]
        engines: list[Engine] = []
        after: dict[str, float] = {}
        rnd = random.Random(2)
        warm_up = [rnd.choices(WORDS, k=args.prompt) for _ in range(args.clients)]
        rounds = ["cold", "again", "after a flush", "the second engine"]
        if name != "pegaflow":
            # Nothing would be left: a flush empties the hierarchical cache too.
            rounds.remove("after a flush")

        def run(prompts: list[list[int]]) -> dict:
            command = {"do": "run", "prompts": prompts, "answer": args.answer, "clients": args.clients}
            return engines[-1].ask(command)

        for what in rounds[: 1 if name == "none" else None]:
            if what in ("cold", "the second engine"):
                engines.append(Engine(options, env, logs / f"{len(engines)}.log"))
                running.callback(engines[-1].stop)
                run(warm_up)
            before = after if what == "again" else engines[-1].ask({"do": "flush"})["pegaflow"]
            shown = run(prompts)
            after = shown.pop("pegaflow")
            if after:
                spent = (after["scheduler_seconds"] - before["scheduler_seconds"]) / args.requests
                shown["adapter_ms_per_request"] = round(1000 * spent, 3)
                shown |= {key: after[key] - before[key] for key in ("saved", "loaded", "saves_failed", "loads_failed")}
            print(json.dumps({"run": f"{name}, {what}", **shown}), flush=True)
        pids = [engine.process.pid for engine in engines] + ([server.process.pid] if server else [])
        memory = {"engines": len(engines), "host_mib": resident_mib(pids)}
        if server:
            memory["pool_mib"] = round(server.metric("pegaflow_pool_used_bytes") / 2**20)
        print(json.dumps({"run": f"{name}, host memory", **memory}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; without, one is made as by `pd-radix make-model`")
    parser.add_argument("--adapter", action="store_true", help="only the scheduler thread's time, for 4096 tokens")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device-tokens", type=int, default=3072, help="tokens of an engine's KV pool")
    parser.add_argument("--pool", default="1gb", help="of the PegaFlow server")
    parser.add_argument("--hicache-gb", type=int, default=1, help="of each engine's hierarchical cache")
    parser.add_argument("--only", nargs="*", choices=("pegaflow", "hicache", "radix", "none"), help="some of the runs")
    args = parser.parse_args()
    sys.path.insert(0, str(HOST_DIR))

    if args.engine:
        engine()
        return
    if args.adapter:
        adapter_cost(4096)
        return
    rnd = random.Random(1)
    prompts = [rnd.choices(WORDS, k=args.prompt) for _ in range(args.requests)]
    common = ["--page-size", str(args.page_size), "--max-total-tokens", str(args.device_tokens)]
    common += ["--max-running-requests", str(2 * args.clients)]
    deployments = {
        "pegaflow": ["--enable-pegaflow"],
        "hicache": ["--enable-hierarchical-cache", "--hicache-size", str(args.hicache_gb)],
        "radix": [],
        "none": ["--disable-radix-cache"],
    }
    with tempfile.TemporaryDirectory() as directory:
        args.model = args.model or str(make_model(Path(directory) / "model"))
        for name in args.only or deployments:
            deployment(name, ["--model-path", args.model, *common, *deployments[name]], prompts, args)


if __name__ == "__main__":
    main()
