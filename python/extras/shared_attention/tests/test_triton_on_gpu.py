"""The triton backend that reads shared prefixes once, on a GPU: its kernels, the copies of rows, captured graphs."""

from __future__ import annotations

import time

import pytest
import torch
from all_pays import all_sharing_pays
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_triton_shared_attention import TOLERANCE, Worker, check_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

#: The engine's kernel, which reads what is not shared, multiplies float32 in TF32.
OF_THE_ENGINE = {**TOLERANCE, torch.float32: 3e-3}


@pytest.fixture(autouse=True, scope="module")
def _all_levels_pay():
    with all_sharing_pays():
        yield


class OnGpu(Worker):
    """Steps of real kernels; what is shared is known when the copies of the rows have come to the host."""

    tolerance = OF_THE_ENGINE

    def check_until(self, together: int, rows: list[int] | None = None) -> None:
        """Check each of some steps, until one has read this many tokens for others."""
        until = time.monotonic() + 20
        while True:
            self.check_step(rows)
            if self.read_together() == together:
                return
            assert time.monotonic() < until, f"{self.read_together()} tokens read together, not {together}"


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([(1, 2), (2, 1), (3, 1), (4, 2), (8, 1)]),
    st.sampled_from([(16, 16), (24, 32), (64, 64), (128, 128), (256, 256)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_the_kernels_equal_the_unshared_result(data, heads, dims, dtype):
    check_kernels(data, heads, dims, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, kv_heads, dim, page", [(2, 2, 64, 1), (8, 2, 128, 16), (3, 1, 32, 64)])
def test_levels_of_sharing_equal_exact_attention(heads, kv_heads, dim, page, dtype):
    worker = OnGpu(heads, kv_heads, dim, page, dtype, device="cuda")
    system = worker.new_pages(64)
    documents = [worker.new_pages(64 * n) for n in (1, 2)]
    for row in range(4):
        worker.enter(row, torch.cat([system, documents[row % 2]]), own=1 + 5 * row)
    worker.enter(4, system, own=40)
    worker.check_until(4 * 64 + 64 + 128)
    worker.leave(0, 64 + 64)
    worker.check_until(3 * 64 + 128)
    worker.check_step([4])
    assert worker.read_together() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_captured_graph_serves_every_plan(dtype):
    worker, size = OnGpu(4, 2, 64, 16, dtype, device="cuda"), 4
    shared = worker.shared
    q = torch.zeros(size, 4 * 64, dtype=dtype, device="cuda")
    rows, lens = (torch.full((size,), fill, dtype=torch.int64, device="cuda") for fill in (0, 1))
    shared.init_cuda_graph_state(size, size)
    shared.init_forward_metadata_capture_cuda_graph(size, size, rows, lens, None, ForwardMode.DECODE, None)
    batch = type("Batch", (), {"token_to_kv_pool": worker.kv})
    attend = [q, None, None, worker.layer, batch]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        shared.forward_decode(*attend, save_kv_cache=False)  # the kernels are compiled outside of the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = shared.forward_decode(*attend, save_kv_cache=False)
    torch.cuda.synchronize()

    def replay(members: list[int]) -> None:
        step = worker.next_batch(members)
        worker.tell(step)
        count = len(members)
        q[:count], _, _ = worker.inputs(count)
        rows.copy_(torch.tensor(members + [0] * (size - count)))
        on_host = torch.tensor(step.seq_lens.tolist() + [1] * (size - count))
        lens.copy_(on_host)
        shared.init_forward_metadata_replay_cuda_graph(
            size, rows, lens, int(on_host.sum()), None, ForwardMode.DECODE, None, seq_lens_cpu=on_host
        )
        graph.replay()
        assert (out[:count] - worker.exact(q[:count], members)).abs().max() < OF_THE_ENGINE[dtype]

    prompts = [worker.new_pages(32), worker.new_pages(48)]
    for row in range(6):
        worker.enter(row, prompts[row % 2], own=2 + row)
    # Several groups, then nothing shared, then one group and a batch that is filled up.
    for members, together in (([0, 1, 2, 3], 80), ([0, 1], 0), ([1, 3, 5], 96), ([0, 1, 2, 3], 80)):
        until = time.monotonic() + 20
        replay(members)
        while worker.read_together() != together:
            assert time.monotonic() < until
            replay(members)
        replay(members)
    worker.check_until(32, [0, 2])


def test_a_row_that_is_written_while_its_copy_is_under_way_is_copied_again():
    worker = OnGpu(2, 1, 64, 16, torch.bfloat16, device="cuda")
    prompts = [worker.new_pages(64) for _ in range(2)]
    for row in range(3):
        worker.enter(row, prompts[0], own=200)
    own = worker.slots(1)[64:]
    worker.check_until(2 * 64)

    def row_of(prompt: torch.Tensor) -> torch.Tensor:
        return torch.cat([prompt, own]).to("cuda", torch.int32)

    late = 0
    for turn in range(11):
        # Row 1 comes anew, its prompt now in these pages, now in those.
        now, then = row_of(prompts[1 - turn % 2]), row_of(prompts[turn % 2])
        worker.pool.write((1, slice(0, len(now))), now)
        batch = worker.next_batch()
        q, k, v = worker.inputs(3)
        worker.kv.set_kv_buffer(worker.layer, batch.out_cache_loc, k, v)
        expected = worker.exact(q, [0, 1, 2])
        worker.tell(batch)
        # Nothing waits from here until the row is written again: the copy of it is behind these products.
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 4096
        worker.shared.init_forward_metadata(batch)
        found = worker.shared.forward_decode(q, k, v, worker.layer, batch)
        worker.pool.write((1, slice(0, len(then))), then)
        late += any(not copies.arrived() for copies in worker.shared.groups._coming)
        assert (found - expected).abs().max() < OF_THE_ENGINE[torch.bfloat16]
        worker.check_step()
    assert late, "no copy was late: nothing was tried"
    worker.check_until(2 * 64)
