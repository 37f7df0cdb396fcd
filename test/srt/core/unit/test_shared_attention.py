"""The batched decode attention of CPU hosts against the engine's loop: the same pools, tables, layers and batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_requests import PagedRequests
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_pd_radix.supplied.cpu_host.attention import backend as batched
from sglang_pd_radix.supplied.cpu_host.attention import extend
from sglang_pd_radix.supplied.shared_prefix.prefixes import RunningPrefixes

MAX_LEN, ROWS, SLOTS = 4096, 24, 16384
# So that every level of the small cases is read together; what the real ones choose has a test of its own.
ANYTHING_PAYS = replace(batched.COSTS, piece=0, query=0)
SHAPES = {"mha": (4, 4, 32), "gqa": (8, 2, 32), "mqa": (4, 1, 16), "mla": (4, 1, 48)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class Worker(PagedRequests):
    """A pool, a table, one layer and both backends; requests come with slots that others have too."""

    kind: str
    page: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        heads, kv_heads, dim = SHAPES[self.kind]
        common = dict(
            size=SLOTS, page_size=self.page, dtype=self.dtype, layer_num=1, device="cpu", enable_memory_saver=False
        )
        if self.kind == "mla":
            self.kv = MLATokenToKVPool(kv_lora_rank=dim - 16, qk_rope_head_dim=16, **common)
            buffers, value_dim = self.kv.kv_buffer, dim - 16
        else:
            self.kv = MHATokenToKVPool(head_num=kv_heads, head_dim=dim, **common)
            buffers, value_dim = self.kv.k_buffer + self.kv.v_buffer, dim
        for buffer in buffers:
            buffer.fill_(float("nan"))  # what nobody has written must not be read
        self.buffers = buffers
        self.pool = ReqToTokenPool(ROWS, MAX_LEN, "cpu", False)
        self.layer = RadixAttention(heads, dim, dim**-0.5, kv_heads, 0, v_head_dim=value_dim)
        self.free_pages = self.random.permutation(np.arange(1, SLOTS // self.page)).tolist()
        runner = SimpleNamespace(
            device="cpu",
            dtype=self.dtype,
            token_to_kv_pool=self.kv,
            req_to_token_pool=self.pool,
            model_config=SimpleNamespace(num_attention_heads=heads),
        )
        self.batched, self.native = batched.TorchBatchedAttnBackend(runner), TorchNativeAttnBackend(runner)

    def enter(self, row: int, shared: torch.Tensor, own: int) -> None:
        super().enter(row, shared, own)
        slots = self.slots(row)
        for buffer in self.buffers:
            fresh = slots[buffer[slots].isnan().flatten(1).any(1)]
            buffer[fresh] = torch.randn(len(fresh), *buffer.shape[1:]).to(self.dtype)

    def leave(self, row: int, shared: int) -> None:
        """Adds that its own pages hold NaNs until they are written."""
        own = set((self.slots(row)[shared:] // self.page).tolist())
        for buffer in self.buffers:
            for page in own:
                buffer[page * self.page : (page + 1) * self.page] = float("nan")
        super().leave(row, shared)

    def step(self, rows: list[int] | None = None, padded: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode one token of each request with both backends: [requests, heads * value dim] each.

        padded: rows that the engine adds to a batch with DP attention, to the size of another rank's.
        """
        batch = self.next_batch(rows)
        rows, index, lens, where = list(rows or self.lens), batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc
        if padded:
            batch._original_batch_size, batch.batch_size = len(rows), len(rows) + padded
            batch.req_pool_indices = torch.cat([index, index.new_zeros(padded)])
            batch.out_cache_loc = torch.cat([where, where.new_zeros(padded)])
            batch.seq_lens = torch.cat(
                [lens, lens.new_full((padded,), self.native.get_cuda_graph_seq_len_fill_value())]
            )
        heads, kv_heads, dim = SHAPES[self.kind]
        q = torch.randn(len(rows) + padded, heads * dim).to(self.dtype)
        k = torch.randn(len(rows) + padded, kv_heads, dim).to(self.dtype)
        v = k[..., : self.layer.v_head_dim]
        if self.kind != "mla":
            v = torch.randn(len(rows) + padded, kv_heads, dim).to(self.dtype)
        found = []
        for one in (self.native, self.batched):
            one.init_forward_metadata(batch)
            out = one.forward(q, k, v, self.layer, batch).float()
            assert len(out) == len(q)
            found.append(out[: len(rows)])
        return found[0], found[1]

    def check_step(self, rows: list[int] | None = None, padded: int = 0) -> None:
        expected, found = self.step(rows, padded)
        assert (expected - found).abs().max() < TOLERANCE[self.dtype]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(batched, "get_attention_tp_size", lambda: 1)


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch):
    monkeypatch.setattr(batched, "COSTS", ANYTHING_PAYS)


def read_together(worker: Worker) -> int:
    """How many tokens the last step did not read again because another request read them."""
    blocks = worker.batched._plan.blocks
    return sum(worker.lens.values()) - sum(int(block_tokens(block)) for block in blocks)


def block_tokens(block) -> int:
    return block.count * block.length if block.mask is None else int((block.mask == 0).sum())


@pytest.mark.parametrize(
    ("kind", "page", "dtype"),
    [("mha", 1, torch.float32), ("gqa", 16, torch.bfloat16), ("mqa", 16, torch.float32), ("mla", 1, torch.bfloat16)],
)
def test_levels_of_sharing_equal_the_engines_loop(kind, page, dtype):
    worker = Worker(kind, page, dtype)
    system = worker.new_pages(320, contiguous=True)  # a run of slots, read where it is
    documents = [worker.new_pages(16 * n) for n in (3, 5)]
    for row in range(6):
        worker.enter(row, torch.cat([system, documents[row % 2]]), own=1 + 7 * row)
    worker.enter(6, system, own=30)
    worker.enter(7, system[:0], own=1500)  # longer than a piece
    for _ in range(40):  # over the ends of pages, and of the room behind a piece
        worker.check_step()
    assert read_together(worker) >= 6 * len(system) + 2 * sum(map(len, documents)) - 8 * page
    worker.leave(0, len(system) + len(documents[0]))
    worker.check_step()
    worker.check_step([7])


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_rows_that_only_fill_a_batch_up_change_nothing(kind):
    """They name row 0, which another request may have; here one of the batch itself, and then one that is not."""
    worker = Worker(kind, 16)
    system = worker.new_pages(64)
    for row in range(3):
        worker.enter(row, system, own=5 + row)
    for padded in (2, 0, 1, 1, 3):
        worker.check_step(padded=padded)
        assert read_together(worker) == 2 * len(system)
    for padded in (1, 2, 0):
        worker.check_step([1, 2], padded=padded)


def test_slots_that_the_cache_has_replaced():
    worker = Worker("mha", 16)
    held = worker.new_pages(64)
    worker.enter(0, held, own=5)
    worker.enter(1, held[:0], own=69)
    worker.check_step()
    assert read_together(worker) == 0
    # Row 1 had computed the same prompt itself; its copy goes back to the pool.
    copy = worker.slots(1)[:64]
    for buffer in worker.buffers:
        buffer[copy] = float("nan")
    worker.pool.write((1, slice(0, 64)), held.to(torch.int32))
    worker.check_step()
    assert read_together(worker) == 64
    worker.check_step()


SHARE = "SGLANG_CPU_SHARED_PREFIX_ATTENTION"


@pytest.mark.parametrize("no", ["0", "0 ", "False"])
def test_sharing_can_be_switched_off(monkeypatch, no):
    monkeypatch.setenv(SHARE, no)
    worker = Worker("gqa", 16)
    prompt = worker.new_pages(64)
    for row in range(3):
        worker.enter(row, prompt, own=4)
    worker.check_step()
    assert read_together(worker) == 0


# Within its window a layer says what one without says; beyond it: test_torch_forms.py.
@pytest.mark.parametrize("change", [{"logit_cap": 30.0}, {"sliding_window_size": 64}])
def test_other_layers_have_no_plan(change, monkeypatch):
    worker = Worker("mha", 1)
    worker.enter(0, worker.new_pages(8), own=3)
    for name, value in change.items():
        setattr(worker.layer, name, value)
    monkeypatch.setattr(batched, "decode_attention", lambda *a: pytest.fail("not for this layer"))
    worker.check_step()


def extends(worker: Worker, cached: list[int], mode: ForwardMode = ForwardMode.EXTEND, padded: int = 0):
    """What both backends say of prompts of which so much is cached; padded: tokens that fill the batch up."""
    lens = [worker.lens[row] for row in range(len(cached))]
    new = [n - c for n, c in zip(lens, cached, strict=True)]
    where = torch.cat([worker.slots(row)[c:] for row, c in enumerate(cached)])
    tokens = sum(new) + padded
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(cached),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(len(cached)),
        seq_lens=torch.tensor(lens),
        out_cache_loc=torch.cat([where, where.new_zeros(padded)]),
        seq_lens_sum=sum(lens),
        req_to_token_pool=worker.pool,
        token_to_kv_pool=worker.kv,
        extend_prefix_lens=torch.tensor(cached),
        extend_seq_lens=torch.tensor(new),
    )
    heads, kv_heads, dim = SHAPES[worker.kind]
    q, k = torch.randn(tokens, heads * dim).to(worker.dtype), torch.randn(tokens, kv_heads, dim).to(worker.dtype)
    v = k[..., : worker.layer.v_head_dim] if worker.kind == "mla" else torch.randn_like(k)
    found = [one.forward(q, k, v, worker.layer, batch).float() for one in (worker.native, worker.batched)]
    assert len(found[0]) == len(found[1]) == tokens and not found[1][sum(new) :].any()
    return [out[: sum(new)] for out in found]


@pytest.mark.parametrize(
    ("kind", "dtype", "block"),
    [("mha", torch.float32, 16), ("gqa", torch.bfloat16, 512), ("mqa", torch.float32, 16), ("mla", torch.float32, 512)],
)
def test_prompts_behind_what_is_cached_equal_the_engines_loop(kind, dtype, block, monkeypatch):
    """Prompts that are cached in small part, in large part, but for one token, and not at all; in a mixed batch too."""
    monkeypatch.setattr(extend, "BLOCK", block)
    worker = Worker(kind, 16, dtype)
    system = worker.new_pages(96)
    for row, own in enumerate((80, 40, 16, 7, 1, 600)):
        worker.enter(row, system if row else system[:0], own)
    monkeypatch.setattr(worker.batched, "_run_sdpa_forward_extend", lambda *a, **k: pytest.fail("computed as new"))
    for mode, padded in ((ForwardMode.EXTEND, 0), (ForwardMode.MIXED, 0), (ForwardMode.EXTEND, 5)):
        expected, found = extends(worker, [0, 96, 90, 102, 96, 16], mode, padded)
        assert not expected.isnan().any() and (expected - found).abs().max() < TOLERANCE[dtype]


def test_prompts_of_which_nothing_is_cached_are_the_engines(monkeypatch):
    worker = Worker("gqa", 16)
    worker.enter(0, worker.new_pages(16), 7)
    monkeypatch.setattr(extend, "forward", lambda *a: pytest.fail("not for this batch"))
    expected, found = extends(worker, [0])
    assert torch.equal(expected, found)


def longest_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 4]))
def test_the_tree_of_running_prefixes_is_what_the_rows_say(data, page):
    """Whoever comes and goes: below each pair's common slots, in whole pages, they are in the same nodes."""
    prefixes, rows = RunningPrefixes(page), {}
    for _ in range(data.draw(st.integers(1, 25))):
        if rows and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(sorted(rows)))
            prefixes.remove(row)
            del rows[row]
        else:
            row = max(rows, default=-1) + 1
            pages = data.draw(st.lists(st.integers(0, 2), max_size=6))
            path = [0]
            for choice in pages:  # a page belongs to one place of the tree, as in a pool
                path.append(path[-1] * 3 + choice + 1)
            slots = [p * page + i for p in path[1:] for i in range(page)]
            rows[row] = [*slots, 10**6 + row]
            prefixes.add(row, np.array(rows[row], np.int32))
        assert prefixes.rows() == rows.keys()
        nodes = list(prefixes.shared())
        for node in nodes:
            assert len(node.members) > 1 and len(node.slots) % page == 0 and len(node.slots)
            for row in node.members:
                assert rows[row][node.start : node.end] == node.slots.tolist()
            (only,) = list(node.children.values()) if len(node.children) == 1 else [None]
            assert only is None or len(only.members) < len(node.members)
        for a in rows:
            for b in rows:
                if a < b:
                    common = sum(len(n.slots) for n in nodes if {a, b} <= n.members)
                    assert common == longest_common(rows[a], rows[b])


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([1, 16]), st.sampled_from(["gqa", "mla"]))
def test_any_coming_and_going_equals_the_engines_loop(data, page, kind):
    worker = Worker(kind, page)
    stems = [worker.new_pages(0)]
    for _ in range(3):
        stem = data.draw(st.sampled_from(stems))
        stems.append(torch.cat([stem, worker.new_pages(page * data.draw(st.integers(1, 20)))]))
    shared: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["enter", "enter", "leave", "replace"]))
        row, own = len(shared), data.draw(st.integers(1, 3 * page))
        stem = data.draw(st.sampled_from(stems))
        if action != "enter" and shared:
            row = data.draw(st.sampled_from(sorted(shared)))
            own = max(1, worker.lens[row] + 1 - len(stem))  # the length that is expected of the row, if it can be had
            worker.leave(row, shared.pop(row))
        if action != "leave" and row not in shared:
            worker.enter(row, stem, own)
            shared[row] = len(stem)
        for _ in range(data.draw(st.integers(1, 3))):
            if shared:
                worker.check_step()
