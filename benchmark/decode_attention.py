"""What one layer's decode attention takes: the engine's, the batch at once, shared prefixes once.

    python benchmark/decode_attention.py [--threads N] [--runs N]      the three sides on a CPU host, in turns
    python benchmark/decode_attention.py --triton                     on a GPU: the engine's triton backend and ours

The real backends on the real pools; no model, no server. "Limit" is the time in which the step's distinct KV can be
read once from memory, at the speed at which this machine sums 256 MiB (a GPU: 4 GiB). On a GPU layers run from a CUDA
graph, as in serving, and there are so many of them that none finds its KV in the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.shared_prefix import triton_shared
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_pd_radix.supplied.cpu_host.attention import backend
from sglang_pd_radix.supplied.cpu_host.attention.backend import TorchBatchedAttnBackend

# Without the engine's process groups.
backend.get_attention_tp_size = lambda: 1  # type: ignore[attr-defined]
triton_backend.get_attention_tp_size = lambda: 1


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


GPU_CASES = (
    Case("GQA 32:8, bf16", 32, 4, 1024, 200, 32, 8, 128, dtype=torch.bfloat16),
    Case("GQA 32:8, bf16", 128, 4, 8192, 500, 32, 8, 128, dtype=torch.bfloat16),
    Case("GQA 32:8, bf16, page 1", 128, 4, 8192, 500, 32, 8, 128, page=1, dtype=torch.bfloat16),
    Case("GQA 32:8, bf16", 256, 64, 2048, 500, 32, 8, 128, dtype=torch.bfloat16),
    Case("16 heads, bf16", 64, 4, 4096, 500, 16, 16, 128, dtype=torch.bfloat16),
    Case("GQA 32:8, float32", 32, 4, 1024, 200, 32, 8, 128),
    Case("GQA 32:8, bf16, nothing shared", 128, 128, 0, 2048, 32, 8, 128, dtype=torch.bfloat16),
)


class Batch:
    """A decode step that can be run by any backend: prefixes in runs of slots, what is a request's own page by page."""

    def __init__(self, case: Case, device: str = "cpu", least_bytes: int = 0) -> None:
        """``least_bytes``: as many layers as have so much KV."""
        self.case, self.device = case, device
        shared, own = case.shared // case.page * case.page, -(-(case.own + 1) // case.page) * case.page
        size = case.groups * shared + case.requests * own + case.page
        token_bytes = (2 * case.kv_heads or 1) * case.dim * case.dtype.itemsize
        layers = max(1, -(-least_bytes // (size * token_bytes)))
        common = dict(
            size=size, page_size=case.page, dtype=case.dtype, layer_num=layers, device=device, enable_memory_saver=False
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
        self.layers = [
            RadixAttention(case.heads, case.dim, case.dim**-0.5, kv_heads, number, v_head_dim=value_dim)
            for number in range(layers)
        ]
        self.layer = self.layers[0]
        self.pool = ReqToTokenPool(case.requests, shared + own, device, False)
        self.runner = SimpleNamespace(
            device=device,
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
        self.query = torch.randn(case.requests, case.heads * case.dim).to(device, case.dtype)
        self.length = shared + case.own
        self.kv_bytes = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers) // layers
        self.distinct = case.groups * shared + case.requests * case.own

    def fill_table(self) -> None:
        for row, slots in enumerate(self.rows):
            self.pool.write((row, slice(0, len(slots))), slots)

    def backend(self, kind: type) -> TorchNativeAttnBackend:
        made = kind(self.runner)
        self.fill_table()
        return made

    def triton_backends(self) -> dict[str, Any]:
        """The engine's triton backend, and the one that shares, on what both need of a model runner."""
        case = self.case
        self.runner.__dict__.update(
            gpu_id=0,
            model=torch.nn.ModuleList(self.layers),
            token_to_kv_pool_allocator=None,
            sliding_window_size=None,
            hybrid_gdn_config=None,
            kimi_linear_config=None,
            server_args=SimpleNamespace(
                speculative_num_draft_tokens=None,
                speculative_num_steps=None,
                triton_attention_num_kv_splits=8,
                triton_attention_split_tile_size=None,
                disable_cuda_graph=True,
                chunked_prefill_size=-1,
                enable_deterministic_inference=False,
            ),
        )
        self.runner.model_config.__dict__.update(
            attention_arch=AttentionArch.MHA,
            get_num_kv_heads=lambda size: case.kv_heads,
            context_len=self.length,
            is_encoder_decoder=False,
        )
        made = {
            "engine": triton_backend.TritonAttnBackend(self.runner),
            "shared": triton_shared.SharedPrefixTritonBackend(self.runner, self.layers),
        }
        self.fill_table()
        return made

    def step(self, length: int) -> ForwardBatch:
        count = self.case.requests
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=count,
            input_ids=torch.zeros(count, dtype=torch.int64),
            req_pool_indices=torch.arange(count, device=self.device),
            seq_lens=torch.full((count,), length, device=self.device),
            out_cache_loc=torch.zeros(count, dtype=torch.int64, device=self.device),
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


def memory_speed(device: str = "cpu") -> float:
    """Bytes a second, read."""
    data = torch.ones((64 if device == "cpu" else 1024) << 20, device=device)
    size = data.numel() * data.element_size()
    if device != "cpu":
        return size / gpu_seconds(data.sum, 9)

    def read() -> float:
        began = time.perf_counter()
        data.sum()
        return time.perf_counter() - began

    return size / in_turns({"read": read}, 9)["read"]


def gpu_seconds(run: Callable[[], object], runs: int) -> float:
    """Seconds on the device, from a CUDA graph: the median of ``runs``, each of several replays in a row."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()  # kernels are compiled outside of it
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    took = []
    for _ in range(runs + 1):
        began.record()
        for _ in range(REPLAYS):
            graph.replay()
        ended.record()
        ended.synchronize()
        took.append(began.elapsed_time(ended) / 1e3 / REPLAYS)
    return statistics.median(took[1:])


REPLAYS = 5
#: Several times a GPU's cache, so that a layer does not find its KV there.
BEYOND_CACHE = 400 << 20


class OnGpu:
    """Both sides of a GPU on one batch, which has been told to them until every row has come to the host."""

    def __init__(self, case: Case) -> None:
        self.batch = batch = Batch(case, "cuda", BEYOND_CACHE)
        self.sides = batch.triton_backends()
        self.step = batch.step(batch.length)
        reqs = [SimpleNamespace(req_pool_idx=row) for row in range(case.requests)]
        self._told = SimpleNamespace(
            forward_mode=self.step.forward_mode, spec_info=None, seq_lens_cpu=self.step.seq_lens.cpu(), reqs=reqs
        )
        # Rows come to the host 16 a step, and each step finds what has arrived.
        steps = case.requests // 16 + 20
        self.metadata_s = {name: statistics.median([self._prepare(name) for _ in range(steps)]) for name in self.sides}

    def _prepare(self, name: str) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if name == "shared":
            self.batch.runner.running_groups.expect(self._told)
        self.sides[name].init_forward_metadata(self.step)
        return time.perf_counter() - began

    def attend(self, name: str) -> torch.Tensor:
        """All layers, one after the other; the result of the last."""
        for layer in self.batch.layers:
            out = self.sides[name].forward_decode(self.batch.query, None, None, layer, self.step, save_kv_cache=False)
        return out

    def layer_s(self, name: str, runs: int) -> float:
        """Seconds of a layer."""
        return gpu_seconds(partial(self.attend, name), runs) / len(self.batch.layers)


def compare_triton(runs: int) -> None:
    """The table of the two sides of a GPU."""
    speed = memory_speed("cuda")
    where = torch.cuda.get_device_name()
    print(f"{where}; memory is read at {speed / 1e9:.0f} GB/s. Milliseconds of one layer; metadata: of a step.\n")
    print(
        "| layer | requests | shared | own | engine | shared once | engine / shared | limit | greatest difference |",
        end="",
    )
    print(" metadata, engine | shared |")
    print("|" + "---|" * 11)
    for case in GPU_CASES:
        here = OnGpu(case)
        batch = here.batch
        outs = {name: here.attend(name).float() for name in here.sides}
        took = {name: here.layer_s(name, runs) for name in here.sides}
        if (here.sides["shared"]._launch is None) == bool(case.shared):
            print(f"{case}: shared {'nothing' if case.shared else 'something'}")
        cells = [
            case.name,
            f"{case.requests} in {case.groups}" if case.shared else f"{case.requests}",
            f"{case.shared}",
            f"{case.own}",
            *(f"{1e3 * seconds:.3f}" for seconds in took.values()),
            f"{took['engine'] / took['shared']:.2f}",
            f"{1e3 * batch.distinct * batch.kv_bytes / speed:.3f}",
            f"{float((outs['engine'] - outs['shared']).abs().max()):.0e}",
            *(f"{1e3 * seconds:.3f}" for seconds in here.metadata_s.values()),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def compare(runs: int) -> None:
    """The table of the three sides."""
    speed = told_speed()
    print(
        "| layer | requests | shared | own | loop | batched | shared once | loop / batched | batched / shared |", end=""
    )
    print(" limit | greatest difference |")
    print("|" + "---|" * 11)
    for case in CASES:
        batch = Batch(case)
        sides, took = sides_in_turns(batch, runs)
        truth = batch.run(sides["loop"])[1].float()
        worst = max(float((batch.run(sides[name])[1].float() - truth).abs().max()) for name in ("batched", "shared"))
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


def told_speed() -> float:
    """`memory_speed` of this host, said above a table."""
    speed = memory_speed()
    print(f"{torch.get_num_threads()} threads; memory is read at {speed / 1e9:.1f} GB/s. Milliseconds of one layer.\n")
    return speed


def sides_in_turns(batch: Batch, runs: int) -> tuple[dict[str, TorchNativeAttnBackend], dict[str, float]]:
    """The three sides of a CPU host, and the seconds that each takes."""
    apart = batch.backend(TorchBatchedAttnBackend)
    assert isinstance(apart, TorchBatchedAttnBackend)
    apart._prefixes = None
    sides = {
        "loop": batch.backend(TorchNativeAttnBackend),
        "batched": apart,
        "shared": batch.backend(TorchBatchedAttnBackend),
    }
    return sides, in_turns({name: lambda side=side: batch.run(side)[0] for name, side in sides.items()}, runs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own)")
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="of each side, in turns (default: 15)")
    parser.add_argument("--triton", action="store_true", help="the triton backends, on a GPU")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    (compare_triton if args.triton else compare)(args.runs)


if __name__ == "__main__":
    main()
