"""How long the runs of contiguous pages stay that prefill writes and decode receives.

A transfer is issued per run of pages that are contiguous on both sides: one descriptor for each run, layer, and K or V.
Drives the real admission code of a decode worker (queue, tree, allocator, tables) and the engine's radix cache and
allocator of a prefill worker through thousands of requests of growing conversations, decode steps between them, and
prints, as Markdown, the pages per run of the deltas: until the first eviction, and in windows from there to the end. No
network and no model; what a request's KV is does not matter here, only where it is.

    python benchmark/fragmentation.py [--requests N] [--page N ...] [--engine-order | --watermark PART] [--pool TOKENS]

With a small ``--pool`` for decode, requests queue for memory; the default has room for all of them.

"Runs on decode" are those of decode's pages alone; "runs on both" is what one layer's K takes in descriptors, since the
pages of prefill, which has the engine's allocator, must be contiguous too. "us" is the thread's CPU time of the step
that admits a request: match, lock, eviction, allocation and table.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from decode_worker import DecodeWorker, make_allocator
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.utils import DisaggregationMode, kv_to_page_indices
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    alloc_paged_token_slots_decode,
    alloc_token_slots,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.free_watermark import DEFAULT_WATERMARK
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

# Tokens of each worker's pool; conversations that are open at a time, which together are about twice as much; requests
# that decode serves at a time; scheduler steps from admission to the end of the transfer.
POOL = 524_288
CONVERSATIONS = 400
RUNNING = 64
TRANSFER_STEPS = 4
SYSTEM_PROMPTS = 8


class Conversation:
    """One user: a system prompt that others have too, a document, then turns until it is long."""

    def __init__(self, rng: random.Random, system_prompts: list[list[int]]):
        self.rng = rng
        self.left = rng.randint(2, 9)
        self.history = [*rng.choice(system_prompts), *self._tokens(1200)]

    def _tokens(self, median: int) -> list[int]:
        count = min(8 * median, max(4, int(self.rng.lognormvariate(0, 0.8) * median)))
        return [self.rng.randrange(1000, 151_000) for _ in range(count)]

    def prompt(self) -> list[int]:
        """The next turn."""
        self.left -= 1
        self.history = self.history + self._tokens(80)
        return self.history

    def answer(self) -> list[int]:
        """What is answered to it."""
        return self._tokens(140)


class Prefill:
    """The engine's pool and tree of a prefill worker."""

    def __init__(self, page: int):
        self.page = page
        self.allocator = make_allocator(POOL, page)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=page
            )
        )

    def compute(self, prompt: list[int]) -> np.ndarray:
        """Compute a prompt; returns its pages in order."""
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt, None)))
        held = len(found.device_indices)
        self.tree.inc_lock_ref(found.last_device_node)
        new = -(-(len(prompt) - held) // self.page) * self.page
        evict_from_tree_cache(self.tree, new)
        slots = self.allocator.alloc(new)
        assert slots is not None
        slots = torch.cat([found.device_indices, slots])
        aligned = len(prompt) // self.page * self.page
        self.tree.insert(InsertParams(key=RadixKey(prompt[:aligned], None), value=slots[:aligned].clone()))
        self.tree.dec_lock_ref(found.last_device_node)
        if aligned < len(prompt):
            self.allocator.free(slots[aligned:])
        return kv_to_page_indices(slots[: len(prompt)].numpy(), self.page)


class Peer:
    """A prefill that has shaken hands."""

    peer_takes_prefix = True
    require_staging = False

    def poll(self) -> int:
        return KVPoll.WaitingForInput

    def send_metadata(self, page_indices, aux_index, state_indices, decode_prefix_len=None) -> None:
        self.pages, self.prefix_len = page_indices, decode_prefix_len


class Tree(DecodeRadixCache):
    """Decode's tree, which here knows whether anything has been evicted."""

    evicted = False

    def _delete_leaf(self, node) -> None:
        self.evicted = True
        super()._delete_leaf(node)


class DrivenDecode(DecodeWorker):
    """A decode worker whose requests are moved on by hand. Its options are those of `DecodeWorker`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._ids = itertools.count(1)

    def add(self, prompt: list[int], max_new: int) -> Req:
        n = next(self._ids)
        req = Req(
            f"r{n}",
            "",
            prompt,
            SamplingParams(max_new_tokens=max_new),
            bootstrap_host="10.0.0.1",
            bootstrap_port=1,
            bootstrap_room=n,
            disagg_mode=DisaggregationMode.DECODE,
        )
        decode_req = DecodeRequest(req, Peer(), waiting_for_input=True)
        self.queue.queue.append(decode_req)
        return req

    def admit(self) -> list[DecodeRequest]:
        admitted, failed = self.queue.pop_preallocated()
        assert not failed
        self.transfer.extend(admitted)
        return admitted

    def commit(self, decode_req: DecodeRequest, token: int) -> None:
        """All KV of the delta has arrived."""
        self.transfer.queue.remove(decode_req)
        self.meta_alloc.free(decode_req.metadata_buffer_index)
        req = decode_req.req
        req.output_ids.append(token)
        req.init_next_round_input(self.tree)
        self.tree.cache_unfinished_req(req)
        self.queue.policy.committed(decode_req.entry)
        self.running.append(req)

    def step(self) -> None:
        """Slots for the next token of every running request."""
        if not self.running:
            return
        rows = torch.tensor([req.req_pool_idx for req in self.running])
        lens = torch.tensor([req.kv_committed_len for req in self.running])
        if self.page_size == 1:
            slots = alloc_token_slots(self.tree, len(self.running))
        else:
            last = self.pool.req_to_token[rows, lens - 1].to(torch.int64)
            slots = alloc_paged_token_slots_decode(self.tree, lens + 1, lens + 1, last, 1)
        self.pool.write((rows, lens), slots.to(torch.int32))
        for req in self.running:
            req.kv_committed_len = req.kv_allocated_len = req.kv_committed_len + 1

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        release_kv_cache(req, self.tree)


class Decode(DrivenDecode):
    """One decode worker. ``engine_order``: it allocates as the engine does. ``watermark``: the part to keep free."""

    def __init__(self, page: int, engine_order: bool = False, watermark: float = DEFAULT_WATERMARK, pool: int = POOL):
        super().__init__(
            pool,
            page,
            max_reqs=2 * RUNNING,
            max_len=32_768,
            reserved=512,
            watermark=0 if engine_order else int(watermark * pool) // page * page,
            tree_type=Tree,
        )
        if engine_order:
            self.allocator.long_runs_last = False
            self.allocator.alloc_long_runs = self.allocator.alloc


@dataclass
class Window:
    """What some hundred requests took."""

    name: str
    pages: int = 0
    own_runs: int = 0
    runs: int = 0
    requests: int = 0
    hit: int = 0
    prompt: int = 0
    times: list[float] = field(default_factory=list)

    def row(self, first: Window) -> str:
        """One line of the table; ``first`` is what its lengths are compared to."""
        own, joint = self.pages / self.own_runs, self.pages / self.runs
        return (
            f"| {self.name} | {self.pages / self.requests:.1f} | {100 * self.hit / self.prompt:.0f}% "
            f"| {self.own_runs / self.requests:.1f} | {own:.1f} | {own * first.own_runs / first.pages:.2f} "
            f"| {self.runs / self.requests:.1f} | {joint:.1f} | {joint * first.runs / first.pages:.2f} "
            f"| {statistics.median(self.times) * 1e6:.0f} |"
        )


def run(
    page: int,
    requests: int,
    size: int,
    engine_order: bool = False,
    watermark: float = DEFAULT_WATERMARK,
    pool: int = POOL,
    seed: int = 0,
) -> Iterator[Window]:
    """Serve ``requests`` requests; yields a window up to the first eviction, then one for every ``size`` requests."""
    rng = random.Random(seed)
    system_prompts = [[rng.randrange(1000, 151_000) for _ in range(512)] for _ in range(SYSTEM_PROMPTS)]
    prefill, decode = Prefill(page), Decode(page, engine_order, watermark, pool)
    idle = [Conversation(rng, system_prompts) for _ in range(CONVERSATIONS)]
    talking: dict[str, tuple[Conversation, np.ndarray, list[int]]] = {}
    ends: dict[str, int] = {}
    arriving: list[tuple[int, DecodeRequest]] = []
    window = Window("before the first eviction")
    new = True
    now = served = started = 0
    while served < requests:
        now += 1
        while len(talking) < RUNNING and started < requests:
            talk = idle.pop(rng.randrange(len(idle)))
            prompt, answer = talk.prompt(), talk.answer()
            req = decode.add(prompt, len(answer))
            talking[req.rid] = talk, prefill.compute(prompt), answer
            started += 1
        began = time.thread_time()
        admitted = decode.admit()
        taken = time.thread_time() - began
        if new and decode.tree.evicted:
            new = False
            yield window
            window = Window(f"{served + 1} to {(served // size + 1) * size}")
        for decode_req in admitted:
            arriving.append((now + TRANSFER_STEPS, decode_req))
            peer, req = decode_req.kv_receiver, decode_req.req
            source = talking[req.rid][1][peer.prefix_len // page :]
            window.requests += 1
            window.pages += len(peer.pages)
            window.own_runs += len(group_concurrent_contiguous(peer.pages, peer.pages)[0])
            window.runs += len(group_concurrent_contiguous(source, peer.pages)[0])
            window.hit += peer.prefix_len
            window.prompt += len(req.origin_input_ids)
            window.times.append(taken / len(admitted))
            served += 1
            if served % size == 0 and not new:
                yield window
                window = Window(f"{served + 1} to {served + size}")
        for due, decode_req in arriving[:]:
            if due <= now:
                arriving.remove((due, decode_req))
                answer = talking[decode_req.req.rid][2]
                decode.commit(decode_req, answer[0])
                ends[decode_req.req.rid] = now + len(answer) - 1
        decode.step()
        for req in decode.running:
            answer = talking[req.rid][2]
            req.output_ids.append(answer[len(req.output_ids) % len(answer)])
        for req in [req for req in decode.running if ends[req.rid] <= now]:
            talk, _, _ = talking.pop(req.rid)
            decode.finish(req)
            talk.history = req.origin_input_ids + req.output_ids
            idle.append(talk if talk.left and len(talk.history) < 30_000 else Conversation(rng, system_prompts))
    if window.requests:
        yield window


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="default: 5000")
    parser.add_argument("--page", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="default: 1 16 64")
    parser.add_argument("--engine-order", action="store_true", help="allocate as the engine does, with no watermark")
    parser.add_argument(
        "--watermark",
        type=float,
        default=DEFAULT_WATERMARK,
        metavar="PART",
        help=f"part to keep free (default: {DEFAULT_WATERMARK})",
    )
    parser.add_argument("--pool", type=int, default=POOL, metavar="TOKENS", help=f"decode's pool (default: {POOL})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for page in args.page:
        print(f"\nPages of {page} tokens, pool of {args.pool:,} tokens\n")
        print("| requests | pages | hit | runs on decode | pages per run | / first ", end="")
        print("| runs on both | pages per run | / first | us |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        first = None
        for window in run(
            page, args.requests, max(1, args.requests // 10), args.engine_order, args.watermark, args.pool
        ):
            first = first or window
            print(window.row(first), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
