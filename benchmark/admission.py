"""What admission costs the scheduler of a decode worker.

Builds decode trees of branching conversations on the real admission code (queue, tree, allocator, tables; no network
and no model) and prints, as Markdown:

1. the step that admits one request (budget, match, lock, allocation) of which the tree holds 90%, beside the engine's
   bare ``RadixCache.match_prefix`` of the same prompt on the same tree, and beside the engine's own allocation of the
   whole prompt, which it replaces ("added" is the step without that; on a CPU host that allocation is a stand-in for
   the engine's kernel at page sizes above 1). The sides take turns in one process; a row gives medians and quartiles.
   A large tree does not fit the processor's caches, which slows both sides; their ratio is what must be flat.
2. one step of the queue (``pop_preallocated``) with requests that do not fit.
3. eviction of one page from trees of all sizes.

Times are CPU times of the thread, so that other programs on the machine count little.

    python benchmark/admission.py [--quick] [--runs N]

Exits with 1 if a bound is broken: (1) the whole step takes at most 1.5 x the bare match, on a tree of any size; (2) the
step does not depend on the prompts' length; (3) eviction grows no faster than the logarithm of the tree.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from decode_worker import DecodeWorker, Queue
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

HIT = 0.9
MAX_RATIO = 1.5
# "Does not depend on": the medians of the smallest and the largest case may differ by the first factor. "Logarithm of":
# by the second.
FLAT, LOGARITHM = 1.5, 8.0


class SilentQueue(Queue):
    """What it would send is dropped."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.admission.deltas.request = lambda decode_req: None


class Peer:
    """A prefill that has shaken hands."""

    peer_takes_prefix = True
    require_staging = False
    state = KVPoll.WaitingForInput

    def poll(self) -> int:
        return self.state


class Decode(DecodeWorker):
    """One decode worker: a tree of about ``nodes`` nodes that holds 90% of each prompt in ``prompts``."""

    def __init__(self, nodes: int, page: int, prompt_lens: list[int], seed: int = 0):
        rng = random.Random(seed)
        self.page_size = page
        turn = max(page, 32)
        held = sum(self._held(n) for n in prompt_lens)
        # Filler: conversations of short turns. Then room for the prompts themselves and some pages of slack.
        size = (held + 2 * nodes * turn + sum(prompt_lens) + max(prompt_lens) + 64 * page) // page * page
        super().__init__(
            size,
            page,
            max_reqs=4,
            max_len=max(prompt_lens) + 64,
            reserved=512 if size > 4096 else 8,
            # A watermark would evict part of the tree before the first look at it.
            watermark=0,
            queue_type=SilentQueue,
        )
        self.prompts = {n: self._conversation(rng, n) for n in prompt_lens}
        self.nodes = self._count()
        self._fill(rng, nodes, turn)
        self._ids = itertools.count(1)

    # ---- the tree ----

    def _held(self, length: int) -> int:
        return int(length * HIT) // self.page_size * self.page_size

    def _tokens(self, rng: random.Random, n: int) -> list[int]:
        # As in a server, every prompt brings int objects of its own, one after the other in memory.
        return array("q", (rng.randrange(1000, 151_000) for _ in range(n))).tolist()

    def _insert(self, tokens: list[int]) -> int:
        """Put a conversation into the tree; returns how many of its tokens were new."""
        held = self.tree.peek(tokens, None).length
        new = len(tokens) - held
        slots = torch.cat([torch.zeros(held, dtype=torch.int64), self.allocator.alloc(new)])
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens).tolist(), None), value=slots))
        return new

    def _conversation(self, rng: random.Random, length: int) -> list[int]:
        """A prompt of ``length`` tokens: a held talk of up to 32 turns, each answered in two ways, then a new turn."""
        held = self._held(length)
        turns = min(32, max(2, held // max(self.page_size, 64)))
        prompt: list[int] = []
        for i in range(1, turns + 1):
            end = held * i // turns // self.page_size * self.page_size
            prompt += self._tokens(rng, end - len(prompt))
            self._insert(prompt)
            self._insert(prompt + self._tokens(rng, self.page_size))
        return prompt + self._tokens(rng, length - held)

    def _fill(self, rng: random.Random, nodes: int, turn: int) -> None:
        """Branching conversations until there are ``nodes`` nodes: each continues one that is there, at any turn."""
        talks = [self._tokens(rng, turn) for _ in range(8)]
        for talk in talks:
            self._insert(talk)
        self.nodes += len(talks)
        while self.nodes < nodes:
            talk = rng.choice(talks)
            talk = talk[: turn * rng.randint(1, 12)] + self._tokens(rng, turn)
            self._insert(talk)
            talks.append(talk)
            self.nodes += 1

    def _count(self) -> int:
        count, stack = 0, list(self.tree.root_node.children.values())
        while stack:
            node = stack.pop()
            count += 1
            stack.extend(node.children.values())
        return count

    # ---- what is measured ----

    def request(self, prompt: list[int]) -> DecodeRequest:
        n = next(self._ids)
        req = Req(
            f"r{n}",
            "",
            list(prompt),
            SamplingParams(max_new_tokens=64),
            bootstrap_host="10.0.0.1",
            bootstrap_port=1,
            bootstrap_room=n,
            disagg_mode=DisaggregationMode.DECODE,
        )
        return DecodeRequest(req, Peer(), waiting_for_input=True)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Leave the allocator as it was, so that each turn finds the same pool."""
        state = self.allocator.backup_state()
        yield
        self.allocator.restore_state(state)

    def admit(self, prompt: list[int]) -> float:
        """Seconds of the step that admits one request: handshake poll, budget, match, lock, allocation and table."""
        decode_req = self.request(prompt)
        req = decode_req.req
        self.queue.queue = [decode_req]
        with self.undone():
            began = time.thread_time()
            self.queue.schedule.enter(decode_req)
            admitted, _ = self.queue.pop_preallocated()
            taken = time.thread_time() - began
            assert admitted and req.decode_prefix_len == self._held(len(prompt))
            self.queue.policy.leave(decode_req.entry)
            self.tree.dec_lock_ref(req.last_node)
            self.pool.free(req)
        return taken

    def match(self, prompt: list[int]) -> float:
        """Seconds of the engine's own match and nothing else."""
        key = MatchPrefixParams(key=RadixKey(prompt, None))
        began = time.thread_time()
        result = RadixCache.match_prefix(self.tree, key)
        taken = time.thread_time() - began
        assert len(result.device_indices) == self._held(len(prompt))
        return taken

    def allocate(self, prompt: list[int]) -> float:
        """Seconds of the engine's allocation of a whole prompt, as a decode worker without a tree does it."""
        req = self.request(prompt).req
        with self.undone():
            began = time.thread_time()
            self.queue._pre_alloc(req)
            taken = time.thread_time() - began
            self.pool.free(req)
        return taken

    def step(self, requests: list[DecodeRequest]) -> float:
        """Seconds of one step of the queue with ``requests`` in it, of which none fits; the mean of 16 steps."""
        self.queue.queue = requests
        for decode_req in requests:
            if decode_req.entry is None:
                self.queue.schedule.enter(decode_req)
        began = time.thread_time()
        for _ in range(16):
            admitted, failed = self.queue.pop_preallocated()
            assert not admitted and not failed
        return (time.thread_time() - began) / 16

    def evict_page(self) -> float:
        """Seconds of evicting one page."""
        began = time.thread_time()
        freed = self.tree.evict_shortfall(self.page_size)
        taken = time.thread_time() - began
        assert freed == self.page_size
        return taken


def in_turns(sides: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Times of each side in microseconds, the sides in random order within each turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for turn in range(-3, runs):
            for name in random.sample(sorted(sides), len(sides)):
                taken = sides[name]() * 1e6
                if turn >= 0:
                    times[name].append(taken)
    finally:
        gc.enable()
    return times


def cell(times: list[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4)
    return f"{statistics.median(times):.0f} ({low:.0f} to {high:.0f})"


def kilo(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}"


def measure_admission(decode: Decode, prompt: list[int], runs: int) -> tuple[str, float]:
    """One row, and how many bare matches on the same tree an admission takes, by medians."""
    times = in_turns(
        {
            "match": lambda: decode.match(prompt),
            "allocate": lambda: decode.allocate(prompt),
            "admit": lambda: decode.admit(prompt),
        },
        runs,
    )
    match, allocate, middle = (statistics.median(times[name]) for name in ("match", "allocate", "admit"))
    cells = [cell(times[name]) for name in ("match", "allocate", "admit")]
    row = f"| {decode.page_size} | {kilo(len(prompt))} | {decode.nodes:,} | {' | '.join(cells)} "
    row += f"| {middle / match:.2f} | {(middle - allocate) / match:.2f} |"
    return row, middle / match


def measure_step(page: int, tp: int, queued: int, lengths: list[int], runs: int) -> tuple[str, list[float]]:
    """One row and the medians of a step with ``queued`` requests that do not fit, for prompts of each length.

    With ``tp`` above 1 the newest of several has not shaken hands yet. The reduction itself is left out.
    """
    sides: dict[str, Callable[[], float]] = {}
    for length in lengths:
        decode = Decode(100, page, [length])
        prompt = decode.prompts[length]
        # Somebody holds all there is.
        for leaf in list(decode.tree.evictable_leaves):
            decode.tree.inc_lock_ref(leaf)
        decode.allocator.alloc(decode.allocator.available_size())
        decode.queue.ranks.size = tp
        requests = [decode.request(prompt) for _ in range(queued)]
        if tp > 1 and queued > 1:
            requests[-1].waiting_for_input = False
            requests[-1].kv_receiver.state = KVPoll.Bootstrapping
        sides[str(length)] = partial(decode.step, requests)
    with ranks(tp):
        times = in_turns(sides, max(runs // 4, 16))
    middles = [statistics.median(times[str(length)]) for length in lengths]
    cells = [cell(times[str(length)]) for length in lengths]
    return f"| {page} | {tp} | {queued} | {' | '.join(cells)} | {middles[-1] / middles[0]:.2f} |", middles


@contextmanager
def ranks(tp: int) -> Iterator[None]:
    """What ``tp`` ranks reduce is what one says: they all say the same."""
    real = dist.all_reduce
    if tp > 1:
        dist.all_reduce = lambda tensor, op=None, group=None: None
    try:
        yield
    finally:
        dist.all_reduce = real


def measure_eviction(decode: Decode, runs: int) -> tuple[str, float]:
    """One row and the median of evicting one page, the tree shrinking by it."""
    decode.tree.evict_shortfall(decode.page_size)
    leaves = len(decode.tree.evictable_leaves)
    times = in_turns({"evict": decode.evict_page}, min(runs, 40))["evict"]
    return f"| {decode.page_size} | {decode.nodes:,} | {leaves:,} | {cell(times)} |", statistics.median(times)


def check_flat(broken: list[str], what: str, times: list[float], factor: float = FLAT) -> None:
    if max(times) > factor * min(times):
        broken.append(f"{what}: from {min(times):.3g} to {max(times):.3g}")


def main() -> int:
    """Measure, print the tables, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and runs (under a minute)")
    parser.add_argument("--runs", type=int, help="runs per side and case (default 200, 40 with --quick)")
    args = parser.parse_args()
    runs = args.runs or (40 if args.quick else 200)
    if runs < 4:
        parser.error("--runs must be at least 4")
    random.seed(1)
    torch.set_num_threads(1)
    pages = (1, 64)
    sizes = [100, 10_000] if args.quick else [100, 1_000, 10_000, 100_000]
    lengths = [1024, 8192, 65536]
    broken: list[str] = []
    admission: list[str] = []
    steps: list[str] = []
    evictions: list[str] = []
    for page in pages:
        by_tree: dict[int, list[float]] = {length: [] for length in lengths}
        eviction: list[float] = []
        for nodes in sizes:
            decode = Decode(nodes, page, lengths)
            for length, prompt in decode.prompts.items():
                row, ratio = measure_admission(decode, prompt, runs)
                admission.append(row)
                by_tree[length].append(ratio)
                if ratio > MAX_RATIO:
                    case = f"page {page}, {kilo(length)}, {decode.nodes:,} nodes"
                    broken.append(f"{case}: admission takes {ratio:.2f} x the bare match")
            row, middle = measure_eviction(decode, runs)
            evictions.append(row)
            eviction.append(middle)
        for length, ratios in by_tree.items():
            what = f"page {page}: admission of {kilo(length)} over the bare match by nodes of the tree"
            check_flat(broken, what, ratios)
        check_flat(broken, f"page {page}: eviction by nodes of the tree", eviction, LOGARITHM)
        for tp, queued in itertools.product((1, 2), (1, 64, 256)):
            row, times = measure_step(page, tp, queued, [1024, 65536], runs)
            steps.append(row)
            check_flat(broken, f"page {page}, TP {tp}: step with {queued} queued by length of the prompts", times)

    print("All times in microseconds of the scheduler's thread: median (quartiles).\n")
    print(
        "| Page | Prompt | Nodes | Engine's match | Engine's whole allocation | Admission | / match | Added / match |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(admission))
    print("\n| Page | TP | Queued, none fits | Prompts of 1K | Prompts of 64K | 64K / 1K |")
    print("|---|---|---|---|---|---|")
    print("\n".join(steps))
    print("\n| Page | Nodes | Leaves | Evicting one page |")
    print("|---|---|---|---|")
    print("\n".join(evictions))
    for line in broken:
        print(f"bound broken: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
