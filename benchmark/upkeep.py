"""What the tree costs a request that has nothing to gain from it: the KV bookkeeping of a decode worker, off and on.

    python benchmark/upkeep.py [--requests N] [--runs N]

Prompts that share nothing go through the real admission, commit, slots for each token and finish, 16 at a time, with
the cache of a decode worker without the flag (the engine's ChunkCache) and with it, in turns. The sizes are those of
workload (e) of `pd-radix bench`: nearly every request has to evict what an earlier one left. Printed are microseconds
of thread CPU time per request. No network, no model, no other processes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from fragmentation import DrivenDecode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

POOL, PAGE, AT_ONCE, PROMPT, ANSWER = 32_768, 16, 16, 384, 32
PARTS = ("admission", "commit", "slots for tokens", "finish")


def serve(tree_type: type, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds of each part for all requests."""
    worker = DrivenDecode(POOL, PAGE, max_reqs=2 * AT_ONCE, max_len=1024, reserved=ANSWER, tree_type=tree_type)
    times = dict.fromkeys(PARTS, 0.0)
    left = list(reversed(prompts))
    live: list[Req] = []

    def timed(part: str, work: Callable, *args):
        began = time.thread_time()
        result = work(*args)
        times[part] += time.thread_time() - began
        return result

    while left or live:
        while left and len(live) < AT_ONCE:
            live.append(worker.add(left.pop(), ANSWER))
        for decode_req in timed("admission", worker.admit):
            timed("commit", worker.commit, decode_req, 1)
        timed("slots for tokens", worker.step)
        for req in list(worker.running):
            req.output_ids.append(1)
            if len(req.output_ids) == ANSWER:
                timed("finish", worker.finish, req)
                live.remove(req)
    return times


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="in each run (default: 1000)")
    parser.add_argument("--runs", type=int, default=9, metavar="N", help="of each side, in turns (default: 9)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 151_000) for _ in range(PROMPT)] for _ in range(args.requests)]
    runs: dict[type, list[dict[str, float]]] = {ChunkCache: [], DecodeRadixCache: []}
    for _ in range(args.runs):
        for tree_type, found in runs.items():
            found.append(serve(tree_type, prompts))
    print("| us per request | off | on | on - off |\n|---|---|---|---|")
    for name, parts in [*((part, [part]) for part in PARTS), ("all", list(PARTS))]:
        off, on = ([1e6 * sum(run[p] for p in parts) / args.requests for run in found] for found in runs.values())
        more = [b - a for a, b in zip(off, on, strict=True)]
        print(
            f"| {name} | {statistics.median(off):.0f} | {statistics.median(on):.0f} "
            f"| {statistics.median(more):.0f} ({min(more):.0f}–{max(more):.0f}) |"
        )


if __name__ == "__main__":
    main()
