"""Records of what answers were made from: what a worker writes, and how far KV is from KV.

KV here is random and of the shape of a small model; "prefill" is the same numbers, rounded otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

from sglang_pd_radix.tools.verification import kv_record
from sglang_pd_radix.tools.verification.judging import KV_CEILINGS
from sglang_pd_radix.tools.verification.kv_record import Record, Recorder, Records, kv_difference

PAGE, LAYERS, HEADS, DIM, SLOTS = 4, 3, 2, 32, 64
# What rounding does to KV in parts of its size: two passes over the same tokens differ by so much.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 0.02}


FP8 = torch.float8_e4m3fn


def pool_of(seed: int, dtype: torch.dtype = torch.float32):
    """An MHA pool full of random KV."""
    # As the engine has it: torch cannot index eight-bit floats.
    store = torch.uint8 if dtype == FP8 else dtype
    generator = torch.Generator().manual_seed(seed)

    def buffers():
        made = [torch.randn((SLOTS, HEADS, DIM), generator=generator).to(dtype) for _ in range(LAYERS)]
        return [buffer.view(store) for buffer in made]

    pool = object.__new__(MHATokenToKVPool)
    pool.k_buffer, pool.v_buffer, pool.dtype, pool.store_dtype = buffers(), buffers(), dtype, store
    return pool


class Worker:
    """As much of a scheduler as the records need: a pool, a table of one row, and a rank."""

    def __init__(self, directory: Path, pool, rank: int = 0, ranks: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        allocator = SimpleNamespace(get_kvcache=lambda: pool, page_size=PAGE)
        self.pool, self.directory = pool, directory
        row = torch.arange(PAGE, SLOTS, dtype=torch.int32)[None]
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=allocator,
            req_to_token_pool=SimpleNamespace(req_to_token=row),
            attn_tp_rank=rank,
            attn_tp_size=ranks,
        )
        self.recorder = Recorder(directory, kv_record.buffers_of(pool), rank, ranks)

    def record(self, request) -> None:
        self.recorder.write(request, self.scheduler.req_to_token_pool.req_to_token[0])


def request(prompt: int, answer: int = 3, first: int = 100):
    return SimpleNamespace(
        origin_input_ids=list(range(first, first + prompt)),
        output_ids=list(range(900, 900 + answer)),
        kv_committed_len=prompt + answer,
        req_pool_idx=0,
        decode_prefix_len=0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_a_record_has_the_tokens_whose_kv_is_there(tmp_path: Path, dtype) -> None:
    """Not of the last token: with overlapped steps its slot is there, and what will be in it is not."""
    worker = Worker(tmp_path, pool_of(1, dtype))
    worker.record(request(10, 3))
    (found,) = Records(tmp_path).take()
    assert found.tokens == (*range(100, 110), 900, 901, 902) and found.prompt == 10
    assert found.kv.shape == (12, 2 * LAYERS, kv_record.WIDTH) and (found.kinds, found.ranks) == (2, 1)
    assert Records(tmp_path).take() == [], "they are taken once"


def test_kv_of_8_bits_is_read_as_what_it_is() -> None:
    pool = pool_of(1, FP8)
    kinds = kv_record.buffers_of(pool)
    assert kinds[0][0].dtype == FP8
    slots = torch.tensor([3, 9])
    seen = Recorder(Path("."), kinds, 0, 1).sketch(slots)
    vectors = pool.v_buffer[1].view(FP8).float()[slots].flatten(1)
    assert np.allclose(seen[:, LAYERS + 1], vectors @ torch.from_numpy(kv_record.signs(HEADS * DIM)), atol=1e-4)


def test_latents_are_one_kind_and_other_pools_none() -> None:
    pool = object.__new__(MLATokenToKVPool)
    pool.kv_buffer, pool.dtype = [torch.zeros(SLOTS, 1, DIM)] * LAYERS, torch.float32
    assert [len(kind) for kind in kv_record.buffers_of(pool)] == [LAYERS]
    assert [len(kind) for kind in kv_record.buffers_of(SimpleNamespace(full_kv_pool=pool))] == [LAYERS]
    assert kv_record.buffers_of(SimpleNamespace()) == []


def test_index_keys_and_their_scales_are_of_a_token(tmp_path: Path) -> None:
    """In a page of the pool are the keys of all its tokens, and then their scales."""
    pool = object.__new__(NSATokenToKVPool)
    pool.kv_buffer, pool.dtype = [torch.ones(SLOTS, 1, DIM)] * LAYERS, torch.float32
    pool.page_size, pool.index_head_dim = PAGE, 8
    # 1 in eight bits, and with four of these a scale.
    pages = [torch.full((SLOTS // PAGE, PAGE * 12), 0x38, dtype=torch.uint8) for _ in range(LAYERS)]
    pool.index_k_with_scale_buffer = pages
    worker = Worker(tmp_path, pool)
    worker.record(request(10))
    # Of the third token of the page.
    for byte in (2 * 8, PAGE * 8 + 2 * 4 + 3):
        pages[1][3, byte] += 8
        worker.record(request(10))
        pages[1][3, byte] -= 8
    truth, *seen = Records(tmp_path).take()
    found = [kv_difference(one, truth) for one in seen]
    # A request's first slot is that of the second page.
    token = 2 * PAGE + 2
    assert [(d.token, d.layer, d.kind) for d in found] == [(token, 1, kind) for kind in kv_record.NAMES[3][1:]]


def test_records_of_all_ranks_are_waited_for_and_others_dropped(tmp_path: Path) -> None:
    for rank in (0, 1):
        worker = Worker(tmp_path, pool_of(rank), rank, 2)
        # Else its file has the name of another process's.
        worker.recorder._count = 10 * rank
        worker.record(request(10))
    worker.record(request(12, first=500))
    wanted = (*range(100, 110), 900, 901, 902)
    found = Records(tmp_path).take_all_of([wanted, (1, 2)], wait_s=0.1)
    assert set(found) == {wanted} and set(found[wanted]) == {0, 1}


def test_by_prompt_alone_as_prefill_has_it(tmp_path: Path) -> None:
    Worker(tmp_path, pool_of(1)).record(request(13, 1))
    wanted = tuple(range(100, 113))
    assert set(Records(tmp_path).take_all_of([wanted], whole=False, wait_s=0.1)) == {wanted}


def test_a_kind_of_pool_without_records_is_told_and_nothing_waited_for(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert records.unreadable is None
    (tmp_path / kv_record._UNREADABLE).write_text("OddPool")
    assert records.unreadable == "OddPool" and records.take_all_of([(1,)], wait_s=60) == {}


def same(kv: np.ndarray) -> Record:
    return Record((1,) * (len(kv) + 1), 1, kv, 2, 0, 1)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_number_that_is_none_is_infinitely_far(broken) -> None:
    truth = np.ones((6, 4, 16), dtype=np.float32)
    seen = truth.copy()
    seen[3, 2, 5] = broken
    found = kv_difference(same(seen), same(truth))
    assert (found.most, found.token, found.layer, found.kind) == (np.inf, 3, 0, "V")
    assert kv_difference(same(truth), same(truth)).most == 0
    assert kv_difference(same(np.zeros_like(truth)), same(np.zeros_like(truth))).most == 0


@pytest.mark.parametrize("cut", ["decode's", "prefill's"])
def test_an_end_that_is_missing_is_a_difference(cut: str) -> None:
    """Once the common beginning alone was compared, so a record of no token at all was right."""
    kv = np.ones((6, 4, 16), dtype=np.float32)
    for length in (0, 5):
        short = Record((1,) * 7, 1, kv[:length], 2, 0, 1)
        found = kv_difference(short, same(kv)) if cut == "decode's" else kv_difference(same(kv), short)
        assert (found.most, found.token, found.tokens) == (np.inf, length, length)
        assert str(found) == f"KV from token {length + 1} on, which is missing on rank 0,"
        # With speculation what was accepted in the last step may be missing, and no more.
        assert (kv_difference(short, same(kv), may_lack=1).most == 0) == (length == 5)
    # Prefill computes the whole answer, of whose last token decode has no KV.
    longer = Record((1,) * 8, 7, np.ones((7, 4, 16), dtype=np.float32), 2, 0, 1)
    assert kv_difference(same(kv), longer).most == 0


def test_a_vector_that_is_small_among_its_like_is_rounded_as_they_are() -> None:
    """As V of a first token, which attention rests on, often is."""
    truth = np.ones((6, 2, 16), dtype=np.float32)
    truth[0] *= 1e-3
    seen = truth.copy()
    seen[0] *= 2
    assert kv_difference(same(seen), same(truth)).most == pytest.approx(1e-3, rel=1e-3)


# ---- faults


def recorded(directory: Path, pool) -> Record:
    Worker(directory, pool).record(request(20))
    return Records(directory).take()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [PAGE, 1], ids=["a page", "a token"])
@pytest.mark.parametrize("layers", [slice(0, LAYERS), slice(1, 2)], ids=["all layers", "one layer"])
def test_kv_of_other_tokens_is_far_beyond_rounding(tmp_path: Path, tokens: int, layers: slice, dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    honest, wrong = pool_of(1, dtype), pool_of(1, dtype)
    for buffer in (*honest.k_buffer, *honest.v_buffer):
        buffer += ROUNDING[dtype] * torch.randn(buffer.shape, generator=generator).to(dtype)
    # A request's first slot is that of the second page.
    for buffer in (*wrong.k_buffer[layers], *wrong.v_buffer[layers]):
        buffer[2 * PAGE : 2 * PAGE + tokens] = buffer[8 * PAGE : 8 * PAGE + tokens]
    truth, right, seen = (recorded(tmp_path, pool) for pool in (honest, pool_of(1, dtype), wrong))
    ceiling = KV_CEILINGS.get(str(dtype).removeprefix("torch."), KV_CEILINGS[""])
    found = kv_difference(seen, truth)
    assert kv_difference(right, truth).most < ceiling / 3 < ceiling < found.most
    assert PAGE <= found.token < PAGE + tokens


# ---- reach


def hooks(environment: dict[str, str]) -> str:
    """What a Python process of this environment registers for the scheduler, from its start."""
    program = (
        "import sys, wrapt.importer as w;"
        "hooks = w._post_import_hooks.get('sglang.srt.managers.scheduler') or [];"
        "print(*sorted(h.__module__ for h in hooks if 'verification' in h.__module__), sep=',')"
    )
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_nothing_of_this_is_in_a_worker_that_verify_did_not_start(tmp_path: Path) -> None:
    module = "sglang_pd_radix.tools.verification"
    recording = kv_record.environment(tmp_path, dict(os.environ))
    assert hooks({kv_record.DIRECTORY: str(tmp_path)}) == "", "not on its path"
    assert hooks(recording) == f"{module}.kv_record"


def test_the_cache_that_the_patch_set_puts_in_place_is_watched_whichever_comes_first() -> None:
    """Once it was wrapped within the engine's own step, and the cache that was wrapped was then replaced."""

    class Engine:
        def __init__(self) -> None:
            self.init_cache()

        def init_cache(self) -> None:
            self.tree_cache = "engine's"

    watched: list[str] = []
    kv_record.when_made(Engine, lambda scheduler: watched.append(scheduler.tree_cache))

    class Patched(Engine):
        def init_cache(self) -> None:
            super().init_cache()
            self.tree_cache = "decode's"

    Patched()
    kv_record.when_made(Patched, lambda scheduler: watched.append(scheduler.tree_cache))
    Patched()
    assert watched == ["decode's"] * 3


def test_a_sitecustomize_of_the_environment_is_run_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own_site = True\n")
    inherited = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    env = {**os.environ, **kv_record.environment(tmp_path, inherited)}
    done = subprocess.run([sys.executable, "-c", "import sys; print(sys.own_site)"], env=env, capture_output=True)
    assert done.stdout.strip() == b"True"
