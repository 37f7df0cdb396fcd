"""What one layer's decode attention takes on a CPU host: the engine's loop, the batch at once, shared prefixes once.

    python benchmark/decode_attention.py [--threads N] [--runs N]      the three sides, in turns
    python benchmark/decode_attention.py --grouping                   what it costs to find out what is shared
    python benchmark/decode_attention.py --fit                        the constants of the cost model

The real backends on the real pools; no model, no server. "Limit" is the time in which the step's distinct KV can be
read once from memory, at the speed at which this machine sums 256 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import scipy.optimize
import torch
from sglang.srt.layers.attention.shared_prefix.levels import Level
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_pd_radix.supplied.cpu_host.attention import backend
from sglang_pd_radix.supplied.cpu_host.attention.backend import COSTS, TorchBatchedAttnBackend
from sglang_pd_radix.supplied.cpu_host.attention.kernel import Workspace, decode_attention
from sglang_pd_radix.supplied.cpu_host.attention.plan import Layout

backend.get_attention_tp_size = lambda: 1  # type: ignore[attr-defined]  # without the engine's process groups


@dataclass(frozen=True)
class Case:
    """A batch: ``requests`` in ``groups`` of one prefix each, and the sizes of a layer (kv_heads 0: MLA)."""

    name: str
    requests: int
    groups: int
    shared: int
    own: int
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    dtype: torch.dtype = torch.float32


CASES = (
    Case("8 heads, page 1", 24, 4, 1024, 200, 8, 8, 64, page=1),
    Case("GQA 32:8", 24, 4, 1024, 200, 32, 8, 128),
    Case("GQA 32:8, bf16", 24, 4, 1024, 200, 32, 8, 128, dtype=torch.bfloat16),
    Case("MLA, 16 heads", 24, 4, 1024, 200, 16, 0, 576),
    Case("model of `bench`", 128, 4, 1024, 200, 2, 1, 32),
    Case("model of `make-model`", 32, 4, 1024, 200, 16, 8, 64),
    Case("GQA 32:8, nothing shared", 24, 24, 0, 700, 32, 8, 128),
)


class Batch:
    """A decode step that can be run by any backend: prefixes in runs of slots, what is a request's own page by page."""

    def __init__(self, case: Case) -> None:
        self.case = case
        shared, own = case.shared // case.page * case.page, -(-(case.own + 1) // case.page) * case.page
        size = case.groups * shared + case.requests * own + case.page
        common = dict(
            size=size, page_size=case.page, dtype=case.dtype, layer_num=1, device="cpu", enable_memory_saver=False
        )
        if case.kv_heads:
            self.kv = MHATokenToKVPool(head_num=case.kv_heads, head_dim=case.dim, **common)
            buffers, value_dim = self.kv.k_buffer + self.kv.v_buffer, case.dim
        else:
            self.kv = MLATokenToKVPool(kv_lora_rank=case.dim - 64, qk_rope_head_dim=64, **common)
            buffers, value_dim = self.kv.kv_buffer, case.dim - 64
        for buffer in buffers:
            buffer.normal_()
        kv_heads = case.kv_heads or 1
        self.layer = RadixAttention(case.heads, case.dim, case.dim**-0.5, kv_heads, 0, v_head_dim=value_dim)
        self.pool = ReqToTokenPool(case.requests, shared + own, "cpu", False)
        self.runner = SimpleNamespace(
            device="cpu",
            dtype=case.dtype,
            token_to_kv_pool=self.kv,
            req_to_token_pool=self.pool,
            model_config=SimpleNamespace(num_attention_heads=case.heads),
        )
        pages = (
            case.groups * shared // case.page
            + 1
            + np.random.default_rng(0).permutation(case.requests * own // case.page)
        )
        self.rows = []
        for row, mine in enumerate(pages.reshape(case.requests, -1)):
            first = case.page + row % case.groups * shared
            slots = np.r_[first : first + shared, (mine[:, None] * case.page + np.arange(case.page)).reshape(-1)]
            self.rows.append(torch.from_numpy(slots.astype(np.int32)))
        torch.manual_seed(0)
        self.query = torch.randn(case.requests, case.heads * case.dim).to(case.dtype)
        self.length = shared + case.own
        self.kv_bytes = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)
        self.distinct = case.groups * shared + case.requests * case.own

    def backend(self, kind: type) -> TorchNativeAttnBackend:
        made = kind(self.runner)
        for row, slots in enumerate(self.rows):
            self.pool.write((row, slice(0, len(slots))), slots)
        return made

    def step(self, length: int) -> ForwardBatch:
        count = self.case.requests
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=count,
            input_ids=torch.zeros(count, dtype=torch.int64),
            req_pool_indices=torch.arange(count),
            seq_lens=torch.full((count,), length),
            out_cache_loc=torch.zeros(count, dtype=torch.int64),
            seq_lens_sum=count * length,
            req_to_token_pool=self.pool,
            token_to_kv_pool=self.kv,
        )

    def run(self, made: TorchNativeAttnBackend) -> tuple[float, torch.Tensor]:
        """Seconds of one layer, without the plan that all layers share, and its result."""
        batch = self.step(self.length)
        made.init_forward_metadata(batch)
        began = time.perf_counter()
        out = made.forward_decode(self.query, None, None, self.layer, batch, save_kv_cache=False)
        return time.perf_counter() - began, out


def in_turns(sides: dict[str, Callable[[], float]], runs: int) -> dict[str, float]:
    """The median seconds of each side; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(runs + 1):
        for name, side in sides.items():
            took = side()
            if turn:
                times[name].append(took)
    return {name: statistics.median(taken) for name, taken in times.items()}


def memory_speed() -> float:
    """Bytes a second, read."""
    data = torch.ones(64 << 20)

    def read() -> float:
        began = time.perf_counter()
        data.sum()
        return time.perf_counter() - began

    return data.numel() * data.element_size() / in_turns({"read": read}, 9)["read"]


def compare(runs: int) -> None:
    """The table of the three sides."""
    speed = memory_speed()
    print(f"{torch.get_num_threads()} threads; memory is read at {speed / 1e9:.1f} GB/s. Milliseconds of one layer.\n")
    print(
        "| layer | requests | shared | own | loop | batched | shared once | loop / batched | batched / shared |", end=""
    )
    print(" limit | greatest difference |")
    print("|" + "---|" * 11)
    for case in CASES:
        batch = Batch(case)
        loop = batch.backend(TorchNativeAttnBackend)
        shared, apart = batch.backend(TorchBatchedAttnBackend), batch.backend(TorchBatchedAttnBackend)
        assert isinstance(apart, TorchBatchedAttnBackend)
        apart._prefixes = None
        sides = {"loop": loop, "batched": apart, "shared": shared}
        took = in_turns({name: lambda batch=batch, side=side: batch.run(side)[0] for name, side in sides.items()}, runs)
        truth = batch.run(loop)[1].float()
        worst = max(float((batch.run(side)[1].float() - truth).abs().max()) for side in (apart, shared))
        cells = [
            f"{case.name}",
            f"{case.requests} in {case.groups}" if case.shared else f"{case.requests}",
            f"{case.shared}",
            f"{case.own}",
            *(f"{1e3 * took[name]:.2f}" for name in sides),
            f"{took['loop'] / took['batched']:.1f}",
            f"{took['batched'] / took['shared']:.1f}",
            f"{1e3 * batch.distinct * batch.kv_bytes / speed:.2f}",
            f"{worst:.0e}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def grouping(runs: int) -> None:
    """What the plan of a step takes for 256 requests, beside one layer of it."""
    print("256 requests in 8 groups, of 1024 shared and 200 own tokens; milliseconds, median.\n")
    print("| page | layer | attention, a layer | plan, same batch | plan, one request changed | of it, grouping |")
    print("|" + "---|" * 6)
    for page in (1, 16):
        for name, heads, kv_heads, dim in (("model of `bench`", 2, 1, 32), ("model of `make-model`", 16, 8, 64)):
            batch = Batch(Case(name, 256, 8, 1024, 200 + 2 * runs, heads, kv_heads, dim, page=page))
            batch.length = 1024 + 200
            made = batch.backend(TorchBatchedAttnBackend)
            assert isinstance(made, TorchBatchedAttnBackend)
            attention = in_turns({"": lambda batch=batch, made=made: batch.run(made)[0]}, 5)[""]
            times: dict[str, list[float]] = {"same": [], "changed": [], "levels": []}
            inner = made._levels

            def timed(*args, inner=inner, levels=times["levels"]):
                began = time.perf_counter()
                found = inner(*args)
                levels.append(time.perf_counter() - began)
                return found

            made._levels = timed  # type: ignore[method-assign]
            for turn in range(2 * runs):
                if turn % 2:
                    batch.pool.write((turn, slice(0, len(batch.rows[turn]))), batch.rows[turn])
                step = batch.step(batch.length + turn + 1)
                began = time.perf_counter()
                made.init_forward_metadata(step)
                times["changed" if turn % 2 else "same"].append(time.perf_counter() - began)
            cells = [f"{1e3 * statistics.median(taken):.3f}" for taken in times.values()]
            print(f"| {page} | {name} | {1e3 * attention:.2f} | " + " | ".join(cells) + " |", flush=True)


def fit(runs: int) -> None:
    """Print the constants of the cost model: least squares of relative errors over layers, lengths and batches."""
    rows = []
    for heads, kv_heads, dim in ((2, 1, 32), (16, 8, 64), (8, 8, 64), (32, 8, 128), (16, 0, 576)):
        for requests, shared, own in itertools.product((4, 16, 48), (0, 256, 1024), (32, 256)):
            case = Case("", requests, 1, shared, own, heads, kv_heads, dim)
            batch = Batch(case)
            batch.backend(TorchNativeAttnBackend)  # fills the table
            levels = [Level(0, shared, range(requests))] if shared else []
            lens = np.full(requests, batch.length)
            index = np.arange(requests)
            layout = Layout(batch.pool.req_to_token.numpy(), index, lens, levels, case.page, batch.kv_bytes)
            plan, workspace = layout.plan(), Workspace()
            query = batch.query.view(requests, heads, dim)

            def step(batch=batch, plan=plan, workspace=workspace, query=query) -> float:
                keys, values = batch.kv.get_key_buffer(0), batch.kv.get_value_buffer(0)
                began = time.perf_counter()
                decode_attention(query, keys, values, plan, batch.case.page, batch.layer.scaling, workspace)
                return time.perf_counter() - began

            took = 1e9 * min(step() for _ in range(runs))  # what others do on the machine only adds
            scores = requests * heads * (shared + own)
            read = (shared + requests * own) * batch.kv_bytes
            row = [read, scores * 2 * dim, scores, 1 if shared else 0, requests * (2 if shared else 1), 1]
            rows.append([value / took for value in row])
    found, _ = scipy.optimize.nnls(np.array(rows), np.ones(len(rows)))
    errors = np.abs(np.array(rows) @ found - 1)
    names = ("byte", "product", "score", "piece", "query", "a call")
    print("nanoseconds: " + ", ".join(f"{name}={value:.3g}" for name, value in zip(names, found, strict=True)))
    print(f"relative error of the fit: median {np.median(errors):.2f}, at most {errors.max():.2f}; in use: {COSTS}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own)")
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="of each side, in turns (default: 15)")
    parser.add_argument("--grouping", action="store_true", help="what the plan of a step costs")
    parser.add_argument("--fit", action="store_true", help="the constants of the cost model")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = grouping if args.grouping else fit if args.fit else compare
    chosen(args.runs)


if __name__ == "__main__":
    main()
