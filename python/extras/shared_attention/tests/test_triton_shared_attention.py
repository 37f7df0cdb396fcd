"""The triton backend that reads shared prefixes once, in Triton's interpreter, against the engine's and float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from all_pays import all_sharing_pays
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from paged_requests import PagedRequests
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import attention_registry, triton_backend
from sglang.srt.layers.attention import utils as attention_utils
from sglang.srt.layers.attention.shared_prefix import option, running_groups, triton_kernels, triton_plan, triton_shared
from sglang.srt.layers.attention.triton_ops import decode_attention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from triton.runtime import interpreter

from sglang_pd_radix.supplied.shared_prefix.levels import Costs, LayerShape
from sglang_pd_radix.supplied.shared_prefix.prefixes import RunningPrefixes

MAX_LEN, ROWS, SLOTS = 1024, 16, 2048
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with (
        interpreted(triton_backend, triton_shared, decode_attention, attention_utils, triton_kernels),
        all_sharing_pays(),
    ):
        yield


@dataclass
class Worker(PagedRequests):
    """A pool, a table, layers, the engine's backend and ours; requests come with slots that others have too."""

    tolerance: ClassVar[dict[torch.dtype, float]] = TOLERANCE
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 1
    dtype: torch.dtype = torch.float32
    layer_options: dict = field(default_factory=dict)
    device: str = "cpu"
    window: int | None = None
    lens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        random = np.random.default_rng(0)
        torch.manual_seed(0)
        self.kv = MHATokenToKVPool(
            size=SLOTS,
            page_size=self.page,
            dtype=self.dtype,
            layer_num=1,
            device=self.device,
            enable_memory_saver=False,
            head_num=self.kv_heads,
            head_dim=self.dim,
        )
        for buffer in self.kv.k_buffer + self.kv.v_buffer:
            buffer.normal_()
        self.pool = ReqToTokenPool(ROWS, MAX_LEN, self.device, False)
        self.layer = RadixAttention(self.heads, self.dim, self.dim**-0.5, self.kv_heads, 0, **self.layer_options)
        self.free_pages = random.permutation(np.arange(1, SLOTS // self.page)).tolist()
        self.runner = SimpleNamespace(
            device=self.device,
            gpu_id=0,
            dtype=self.dtype,
            model=torch.nn.ModuleList([self.layer]),
            token_to_kv_pool=self.kv,
            token_to_kv_pool_allocator=None,
            req_to_token_pool=self.pool,
            sliding_window_size=self.window,
            hybrid_gdn_config=None,
            kimi_linear_config=None,
            is_draft_worker=False,
            model_config=SimpleNamespace(
                num_attention_heads=self.heads,
                get_num_kv_heads=lambda size: self.kv_heads // size,
                attention_arch=AttentionArch.MHA,
                context_len=MAX_LEN,
                is_encoder_decoder=False,
            ),
            server_args=SimpleNamespace(
                speculative_num_draft_tokens=None,
                speculative_num_steps=None,
                triton_attention_num_kv_splits=2,
                triton_attention_split_tile_size=None,
                disable_cuda_graph=True,
                chunked_prefill_size=-1,
                enable_deterministic_inference=False,
                enable_double_sparsity=False,
                disaggregation_mode="decode",
            ),
        )
        self.engine = triton_backend.TritonAttnBackend(self.runner)
        self.shared = attention_registry.ATTENTION_BACKENDS["triton"](self.runner)

    def tell(self, batch: ForwardBatch) -> None:
        """What ForwardBatch.init_new does; see test_shared_attention_model.py."""
        reqs = [SimpleNamespace(req_pool_idx=row) for row in batch.req_pool_indices.tolist()]
        self.runner.running_groups.expect(
            SimpleNamespace(forward_mode=batch.forward_mode, spec_info=None, seq_lens_cpu=batch.seq_lens_cpu, reqs=reqs)
        )

    def inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = (count, self.heads * self.dim), *[(count, self.kv_heads, self.dim)] * 2
        q, k, v = (torch.randn(shape).to(self.device, self.dtype) for shape in shapes)
        return q, k, v

    def exact(self, q: torch.Tensor, rows: list[int], sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention in float64 over the slots of each row, [requests, heads * dim]."""
        out = []
        for query, row in zip(q.double().view(len(rows), self.kv_heads, -1, self.dim), rows, strict=True):
            keys, values = (buffer[self.slots(row)].double() for buffer in (self.kv.k_buffer[0], self.kv.v_buffer[0]))
            scores = torch.einsum("hgd,lhd->hgl", query, keys) * self.layer.scaling
            if self.layer.logit_cap:
                scores = self.layer.logit_cap * torch.tanh(scores / self.layer.logit_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(self.kv_heads, -1, 1)], dim=-1)
            weights = scores.softmax(-1)[..., : len(keys)]
            out.append(torch.einsum("hgl,lhd->hgd", weights, values).reshape(-1))
        return torch.stack(out)

    def check_step(
        self, rows: list[int] | None = None, sinks: torch.Tensor | None = None, also_engine: bool = False
    ) -> None:
        """Decode one token of each request: with sharing against exact attention, and against the engine's backend."""
        batch = self.next_batch(rows)
        rows = batch.req_pool_indices.tolist()
        q, k, v = self.inputs(len(rows))
        self.tell(batch)
        self.shared.init_forward_metadata(batch)
        found = self.shared.forward_decode(q, k, v, self.layer, batch, sinks=sinks).float()
        assert (found - self.exact(q, rows, sinks)).abs().max() < self.tolerance[self.dtype]
        if also_engine:
            self.engine.init_forward_metadata(batch)
            engines = self.engine.forward_decode(q, k, v, self.layer, batch, sinks=sinks)
            assert (found - engines).abs().max() < self.tolerance[self.dtype]

    def read_together(self) -> int:
        """How many tokens the last step did not read again because another request read them."""
        return 0 if self.shared._launch is None else self.shared._plan.saved


@pytest.mark.parametrize("heads, kv_heads, dim, page", [(2, 2, 16, 1), (6, 2, 24, 16), (3, 1, 32, 1)])
def test_levels_of_sharing_equal_the_engine_and_exact_attention(heads, kv_heads, dim, page):
    worker = Worker(heads, kv_heads, dim, page)
    system = worker.new_pages(48)
    documents = [worker.new_pages(16 * n) for n in (1, 2)]
    for row in range(4):
        worker.enter(row, torch.cat([system, documents[row % 2]]), own=1 + 5 * row)
    worker.enter(4, system, own=40)
    worker.check_step(also_engine=True)
    assert worker.read_together() == 4 * 48 + 1 * 16 + 1 * 32
    worker.leave(0, 48 + 16)
    worker.check_step()
    assert worker.read_together() == 3 * 48 + 1 * 32
    worker.check_step([4], also_engine=True)
    assert worker.read_together() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    worker = Worker(dtype=dtype)
    prompt = worker.new_pages(40)
    for row in range(3):
        worker.enter(row, prompt, own=3)
    worker.check_step()
    assert worker.read_together() == 2 * 40


def test_logit_cap_and_sinks():
    worker = Worker(layer_options={"logit_cap": 0.5})
    prompt = worker.new_pages(40)
    for row in range(3):
        worker.enter(row, prompt, own=3)
    worker.check_step(sinks=torch.randn(4), also_engine=True)
    assert worker.read_together() == 2 * 40


class CapturedGraph:
    """What a CUDA graph keeps of a layer: kernels, grids and arguments as they were at capture."""

    def __init__(self, run) -> None:
        self.calls = []
        call = interpreter.GridExecutor.__call__

        def noted(executor, *args, **kwargs):
            self.calls.append((executor, args, kwargs))
            call(executor, *args, **kwargs)

        with patch.object(interpreter.GridExecutor, "__call__", noted):
            self.out = run()

    def replay(self) -> torch.Tensor:
        for executor, args, kwargs in self.calls:
            executor(*args, **kwargs)
        return self.out


def test_one_captured_graph_serves_every_plan():
    worker, size = Worker(4, 2, 16, page=16), 4
    shared = worker.shared
    q, rows, lens = torch.zeros(size, 4 * 16), torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.int64)
    shared.init_cuda_graph_state(size, size)
    shared.init_forward_metadata_capture_cuda_graph(size, size, rows, lens, None, ForwardMode.DECODE, None)
    batch = SimpleNamespace(token_to_kv_pool=worker.kv)
    graph = CapturedGraph(lambda: shared.forward_decode(q, None, None, worker.layer, batch, save_kv_cache=False))
    assert len(graph.calls) == 3

    prompts = [worker.new_pages(32), worker.new_pages(48)]
    for row in range(6):
        worker.enter(row, prompts[row % 2], own=2 + row)
    # Several groups, then nothing shared, then one group and a batch that is filled up.
    for members, together in (([0, 1, 2, 3], 80), ([0, 1], 0), ([1, 3, 5], 96), ([1, 3, 5], 96)):
        step = worker.next_batch(members)
        worker.tell(step)
        count = len(members)
        q[:count], _, _ = worker.inputs(count)
        rows[:] = torch.tensor(members + [0] * (size - count))
        lens[:] = torch.tensor(step.seq_lens.tolist() + [1] * (size - count))
        shared.init_forward_metadata_replay_cuda_graph(
            size, rows, lens, int(lens.sum()), None, ForwardMode.DECODE, None, seq_lens_cpu=lens
        )
        found = graph.replay()[:count]
        assert (found - worker.exact(q[:count], members)).abs().max() < 1e-5
        assert worker.read_together() == together
    # And a step without a graph between two with one.
    worker.check_step([0, 2])
    assert worker.read_together() == 32


def test_windowed_layers_stay_with_the_engine():
    worker = Worker(2, 1, 16, layer_options={"sliding_window_size": 7}, window=7)
    assert type(worker.shared) is triton_backend.TritonAttnBackend, "no other layers"
    full = RadixAttention(2, 16, 0.25, 1, 0)
    worker.runner.model.append(full)
    shared = attention_registry.ATTENTION_BACKENDS["triton"](worker.runner)
    prompt = worker.new_pages(40)
    for row in range(2):
        worker.enter(row, prompt, own=4)
    batch = worker.next_batch()
    q, k, v = worker.inputs(2)
    worker.tell(batch)
    for backend in (shared, worker.engine):
        backend.init_forward_metadata(batch)
    assert shared._launch is not None
    with patch.object(triton_kernels, "attend_to_pieces", lambda *a: pytest.fail("not for this layer")):
        found = shared.forward_decode(q, k, v, worker.layer, batch)
    assert torch.equal(found, worker.engine.forward_decode(q, k, v, worker.layer, batch))
    assert (shared.forward_decode(q, k, v, full, batch) - worker.exact(q, [0, 1])).abs().max() < 1e-5


def with_layer(**change):
    return lambda worker: [setattr(worker.layer, name, value) for name, value in change.items()]


@pytest.mark.parametrize(
    "reason, change",
    [
        ("latent", lambda worker: setattr(worker.runner.model_config, "attention_arch", AttentionArch.MLA)),
        ("xai temperature", with_layer(xai_temperature_len=512)),
        ("cross attention", with_layer(is_cross_attention=True)),
        ("wider than 256", with_layer(qk_head_dim=512)),
        ("head shapes", lambda worker: worker.runner.model.append(RadixAttention(8, 16, 1.0, 2, 1))),
        ("stored as torch.float32 and computed", lambda worker: setattr(worker.runner, "dtype", torch.bfloat16)),
    ],
)
def test_models_that_are_left_as_they_are(reason, change, caplog):
    worker = Worker()
    change(worker)
    assert type(attention_registry.ATTENTION_BACKENDS["triton"](worker.runner)) is triton_backend.TritonAttnBackend
    (message,) = [record.getMessage() for record in caplog.records if option.OPTION in record.getMessage()]
    assert reason in message


def test_without_the_option_the_engines_backend_is_made(monkeypatch):
    for value, mode in (("0", "decode"), ("", "null"), ("1", "prefill")):
        monkeypatch.setenv(option.OPTION, value)
        runner = Worker().runner
        runner.server_args.disaggregation_mode = mode
        runner.__dict__.pop("running_groups", None)
        runner.req_to_token_pool = ReqToTokenPool(ROWS, MAX_LEN, "cpu", False)
        made = attention_registry.ATTENTION_BACKENDS["triton"](runner)
        assert type(made) is triton_backend.TritonAttnBackend
        assert not hasattr(runner, "running_groups") and "write" not in vars(runner.req_to_token_pool)


def test_what_the_option_is_refused_with(monkeypatch):
    fine = dict(
        disaggregation_mode="decode",
        get_attention_backends=lambda: ("fa3", "triton"),
        speculative_algorithm=None,
        enable_deterministic_inference=False,
        enable_double_sparsity=False,
        enable_two_batch_overlap=False,
        enable_pdmux=False,
        enable_dp_attention=False,
        enable_streaming_session=False,
        pp_size=1,
    )
    option.check(SimpleNamespace(**fine))
    option.check(SimpleNamespace(disaggregation_mode="prefill"))
    for name, value, words in (
        (
            "get_attention_backends",
            lambda: ("triton", "fa3"),
            "decode steps use 'fa3'.*--decode-attention-backend triton",
        ),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm. Leave one"),
        ("enable_deterministic_inference", True, "sums depend on what is shared"),
        ("pp_size", 2, "--pipeline-parallel-size above 1"),
    ):
        with pytest.raises(ValueError, match=words):
            option.check(SimpleNamespace(**{**fine, name: value}))
    monkeypatch.setenv(option.OPTION, "on")
    with pytest.raises(ValueError, match="'on': give 1"):
        option.check(SimpleNamespace(**fine))
    monkeypatch.delenv(option.OPTION)
    option.check(SimpleNamespace(**{**fine, "pp_size": 2}))


@dataclass
class Late:
    """Copies of rows that arrive when the test says so."""

    rows: dict[int, torch.Tensor]
    there: bool = False

    def arrived(self) -> bool:
        return self.there


def test_no_step_waits_for_a_row(monkeypatch):
    pool = ReqToTokenPool(ROWS, MAX_LEN, "cpu", False)
    pool.req_to_token[:, :8] = torch.arange(8, dtype=torch.int32)
    pool.req_to_token[:, 8] = torch.arange(100, 100 + ROWS, dtype=torch.int32)
    made: list[Late] = []
    monkeypatch.setattr(running_groups, "MOST_COPIES", 3)
    monkeypatch.setattr(
        running_groups,
        "RowCopies",
        lambda table, lens: made.append(Late({row: table[row, :n].clone() for row, n in lens.items()})) or made[-1],
    )
    groups = running_groups.RunningGroups(pool, 1)
    rows, lens = [0, 1, 2, 3, 4], [9] * 5
    assert groups.follow(rows, lens) and list(made[0].rows) == [0, 1, 2]
    assert groups.prefixes.rows() == set()
    # The others are asked for in the next step; then there is nothing to do until something arrives.
    assert groups.follow(rows, lens) and list(made[1].rows) == [3, 4]
    assert not groups.follow(rows, lens)
    # What is written before it has arrived is copied again; who leaves is forgotten.
    pool.write((1, slice(0, 4)), torch.arange(50, 54, dtype=torch.int32))
    made[0].there = True
    rows, lens = [0, 1, 2, 3], [9] * 4
    assert groups.follow(rows, lens)
    assert groups.prefixes.rows() == {0, 2} and list(made[2].rows) == [1] and list(made[1].rows) == [3]
    made[1].there = made[2].there = True
    assert groups.follow(rows, lens)
    assert [(node.start, node.end, node.members) for node in groups.prefixes.shared()] == [(0, 8, {0, 2, 3})]
    assert not groups.follow(rows, lens)


def paths(data, page: int) -> dict[int, np.ndarray]:
    """Rows of slots that share prefixes to some depth, each with an end of its own."""
    rows = {}
    for row in range(data.draw(st.integers(2, 6), "requests")):
        path, slots = 0, []
        for choice in data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4), "path"):
            path = 2 * path + choice + 1  # a place of the tree; at most 30 of them, of 16 tokens each
            slots += range(16 * path, 16 * path + 16)
        own = data.draw(st.integers(1, 20), "own")
        rows[row] = np.array([*slots, *range(600 + 20 * row, 600 + 20 * row + own)], np.int32)
    return rows


def planned(data, rows: dict[int, np.ndarray], group: int, kv_heads: int):
    """(tiling, plan or None) for these rows, with every level read together."""
    prefixes = RunningPrefixes(1)
    for row, slots in rows.items():
        prefixes.add(row, slots)
    free = Costs(byte=1, product=0, score=0, piece=0, query=0)
    most = data.draw(st.sampled_from([2, 3, 4]), "parts") * len(rows)
    levels = triton_plan.levels_within(prefixes, LayerShape(group * kv_heads, kv_heads, 32, 1), free, most)
    tiling = triton_plan.Tiling(group, kv_heads, 16, 16, data.draw(st.sampled_from([1, 64]), "programs"))
    return tiling, triton_plan.make_plan(levels, list(rows), tiling, most) if levels else None, most


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_a_plan_reads_every_token_of_every_request_once(data, group):
    rows = paths(data, 16)
    with patch.object(triton_plan, "PIECE_TOKENS", 16):
        tiling, plan, most = planned(data, rows, group, 2)
    if plan is None:
        return
    assert len(plan.queries) <= most and len(plan.items) <= tiling.most_items(most)
    blocks: dict[int, list[int]] = {}
    read = {row: np.zeros(int(begin), int) for row, begin in zip(rows, plan.begins, strict=True)}
    for row, start, end, first, block, count in plan.items.tolist():
        assert start < end
        members = [list(rows)[query] for query in plan.queries[first : first + count]]
        blocks.setdefault(first, []).append(block)
        for member in members:
            assert np.array_equal(rows[member][start:end], rows[row][start:end])
            if block == 0:
                read[member][start:end] += 1
    assert all((times == 1).all() for times in read.values())
    counts = {first: count for _, _, _, first, _, count in plan.items.tolist()}
    assert all(found == list(range(-(-counts[first] * group // 16))) for first, found in blocks.items())
    ends = plan.ends.tolist()
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert (plan.queries[plan.sources[start:end]] == i).all()
    assert ends[-1] == len(plan.queries) == len(plan.sources)
    packed = plan.packed(len(rows) + 3).tolist()
    assert packed[:3] == [
        len(plan.items),
        len(packed) - 6 * len(plan.items) - ends[-1],
        len(packed) - 6 * len(plan.items),
    ]


def check_kernels(data, heads, dims, dtype, device="cpu"):
    """Shared pieces by our kernel, own parts from torch: together attention to everything."""
    (group, kv_heads), (key_dim, value_dim) = heads, dims
    rows = paths(data, 16)
    with patch.object(triton_plan, "PIECE_TOKENS", 16):
        tiling, plan, _ = planned(data, rows, group, kv_heads)
    if plan is None:
        return
    torch.manual_seed(0)
    count, capacity, parts = len(rows), len(rows) + 2, len(plan.queries)
    query = torch.randn(count, group * kv_heads, key_dim).to(dtype)
    keys, values = torch.randn(800, kv_heads, key_dim).to(dtype), torch.randn(800, kv_heads, value_dim).to(dtype)
    table = torch.zeros(count, 200, dtype=torch.int32)
    own, own_lse = torch.zeros(count, group * kv_heads, 1, value_dim), torch.zeros(count, group * kv_heads, 1)
    expected = []
    for i, slots in enumerate(rows.values()):
        table[i, : len(slots)] = torch.from_numpy(slots)
        at = torch.from_numpy(slots).long()
        q = query[i].double().view(kv_heads, group, key_dim)
        scores = torch.einsum("hgd,lhd->hgl", q, keys[at].double()) * 0.3
        expected.append(torch.einsum("hgl,lhd->hgd", scores.softmax(-1), values[at].double()).flatten(0, 1))
        mine = scores[..., int(plan.begins[i]) :]
        own_lse[i, :, 0] = mine.logsumexp(-1).flatten()
        part = torch.einsum("hgl,lhd->hgd", mine.softmax(-1), values[at[int(plan.begins[i]) :]].double())
        own[i, :, 0] = part.flatten(0, 1)
    lens = torch.tensor([len(slots) for slots in rows.values()]) - torch.from_numpy(plan.begins)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).to(torch.int32)
    memory = torch.full((parts, group * kv_heads, value_dim), float("nan")), torch.full((parts, group * kv_heads), 9e9)
    results, weights = (each.to(device) for each in memory)
    query, keys, values, table, own, own_lse, starts, packed, ones, out = (
        each.to(device)
        for each in (
            query,
            keys,
            values,
            table,
            own,
            own_lse,
            starts,
            torch.from_numpy(plan.packed(capacity)),
            torch.ones(count, dtype=torch.int32),
            torch.empty(count, group * kv_heads, value_dim, dtype=dtype),
        )
    )
    triton_kernels.attend_to_pieces(
        query,
        keys,
        values,
        table,
        packed,
        len(plan.items) + 1,
        results,
        weights,
        0.3,
        0.0,
        tiling.block_rows,
        16,
    )
    triton_kernels.merge(own, own_lse, starts, ones, 32, packed, capacity, results, weights, None, 1.0, out)
    assert (out.cpu().double() - torch.stack(expected)).abs().max() < TOLERANCE[dtype]


@settings(max_examples=15, deadline=None)
@given(
    st.data(),
    st.sampled_from([(1, 2), (2, 1), (3, 1)]),
    st.sampled_from([(16, 16), (24, 32)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_the_kernels_equal_the_unshared_result(data, heads, dims, dtype):
    check_kernels(data, heads, dims, dtype)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from sglang.srt.layers.attention.shared_prefix import triton_kernels, triton_plan
import re, subprocess, tempfile

def build(kernel, constants, pointers, floats, capability):
    signature = {n: "constexpr" if n in constants else pointers.get(n, "fp32" if n in floats else "i32")
                 for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
               if n not in constants and n not in floats}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        arch = re.search(r"[.]target (sm_[0-9a-z]+)", built.asm["ptx"])[1]
        command = [get_ptxas().path, "-v", "-arch=" + arch, file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    print(kernel.__name__, capability, built.metadata.shared, max(map(int, re.findall(r"([0-9]+) bytes spill", told))))

for capability in (80, 90):
    for kind, size, dim, group in (("bf16", 2, 128, 4), ("fp16", 2, 256, 2), ("fp32", 4, 128, 1)):
        tiling = triton_plan.make_tiling(group, 8, dim, size, 100)
        names = dict(HEADS=8 * group, GROUP=group, KEY_DIM=dim, VALUE_DIM=dim, LOGIT_CAP=0.0, BLOCK_KEY=dim)
        names |= dict(PRECISION=triton_kernels.FLOAT32_PRODUCTS, BLOCK_ROWS=tiling.block_rows)
        names |= dict(BLOCK_TOKENS=tiling.block_tokens, BLOCK_VALUE=dim)
        data = {"query": "*" + kind, "keys": "*" + kind, "values": "*" + kind, "parts": "*fp32", "weights": "*fp32"}
        data |= {"table": "*i32", "plan": "*i32"}
        build(triton_kernels._attend_to_pieces, names, data, {"scale"}, capability)
    names = dict(HEADS=32, VALUE_DIM=128, BLOCK_VALUE=128, LEAST_SPLIT=32, HAS_SINKS=True)
    data = {n: "*fp32" for n in ("own", "own_weights", "parts", "weights")}
    data |= {"out": "*bf16", "sinks": "*bf16", "own_starts": "*i32", "own_splits": "*i32", "plan": "*i32"}
    build(triton_kernels._merge, names, data, {"value_scale"}, capability)
"""


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_kernels_compile_for_gpus_without_spilling_registers(tmp_path):
    """Triton's compiler and ptxas need no GPU. In a process of its own: the interpreter changes the language."""
    (tmp_path / "compile.py").write_text(COMPILE)  # the compiler reads the source of what it compiles from files
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, tmp_path / "compile.py"], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 8
    for _, _, memory, spilled in lines:
        assert int(memory) <= 99 << 10 and int(spilled) <= 128, run.stdout
