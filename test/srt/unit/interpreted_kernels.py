"""Runs each of the engine's Triton kernels that CPU hosts replace, in Triton's interpreter, beside its torch form.

Started by `test_cpu_speculation.py` with ``TRITON_INTERPRET=1`` in a process of its own: Triton looks at it once.
Prints the names of what agreed.
"""

import torch

from sglang_pd_radix.supplied.cpu_host import speculative

# The engine's kernels stay where they are in this process.
speculative.HOOKS.clear()

from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention  # noqa: E402
from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton  # noqa: E402
from sglang.srt.speculative import eagle_info_v2, spec_utils  # noqa: E402

from sglang_pd_radix.supplied.cpu_host.allocator import TorchKernel  # noqa: E402
from sglang_pd_radix.supplied.cpu_host.speculative import attention, tables  # noqa: E402

STEPS, DRAFT, BATCH, WIDTH = 3, 4, 3, 64
ROWS = torch.tensor([4, 1, 2])
LENS = torch.tensor([9, 30, 17])
torch.manual_seed(0)


def table() -> torch.Tensor:
    return torch.randperm(6 * WIDTH).view(6, WIDTH).int()


def same(name: str, kernel, form, grid, make, *outputs: int) -> None:
    """Run both on what ``make`` returns and compare the arguments at ``outputs``."""
    torch.manual_seed(1)
    expected = make()
    kernel[grid](*expected)
    torch.manual_seed(1)
    got = make()
    form[grid](*got)
    for i in outputs:
        torch.testing.assert_close(got[i], expected[i], msg=lambda text: f"{name}, argument {i}: {text}")  # noqa: B023
    print(name)


def tables_agree() -> None:
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), LENS.cumsum(0).int()))
    for begins in (None, torch.tensor([1, 0, 5])):
        same(
            "create_flashinfer_kv_indices_triton",
            create_flashinfer_kv_indices_triton,
            TorchKernel(tables.kv_indices_of),
            (BATCH,),
            lambda begins=begins: [table(), ROWS, LENS, indptr, begins, torch.zeros(LENS.sum()), WIDTH],
            5,
        )
    slots = torch.arange(100, 100 + BATCH * DRAFT)
    same(
        "assign_req_to_token_pool",
        spec_utils.assign_req_to_token_pool,
        TorchKernel(tables.table_from_flat),
        (BATCH,),
        lambda: [ROWS, table(), LENS, LENS + torch.tensor([4, 1, 3]), slots, WIDTH, 4],
        1,
    )
    same(
        "assign_extend_cache_locs",
        eagle_info_v2.assign_extend_cache_locs,
        TorchKernel(tables.extend_slots),
        (BATCH,),
        lambda: [ROWS, table(), LENS, LENS + DRAFT, torch.zeros(BATCH * DRAFT, dtype=torch.int64), WIDTH, 4],
        4,
    )
    for page in (1, 4):
        same(
            "assign_draft_cache_locs",
            spec_utils.assign_draft_cache_locs,
            TorchKernel(tables.draft_slots_to_table),
            (BATCH,),
            lambda page=page: [
                *(ROWS, table(), LENS, torch.empty(0), torch.empty(0), slots, None, None, None),
                *(0, WIDTH, 1, STEPS, page, 4, 8),
            ],
            1,
        )
    same(
        "assign_draft_cache_locs_page_size_1",
        eagle_info_v2.assign_draft_cache_locs_page_size_1,
        TorchKernel(tables.draft_slots_from_table),
        (BATCH,),
        lambda: [ROWS, table(), LENS, torch.zeros(BATCH * STEPS, dtype=torch.int64), WIDTH, 1, STEPS],
        3,
    )
    same(
        "generate_draft_decode_kv_indices",
        spec_utils.generate_draft_decode_kv_indices,
        tables.DraftDecodeIndices(),
        (STEPS, BATCH, 1),
        lambda: [
            *(ROWS, table(), LENS, torch.zeros((STEPS, 128), dtype=torch.int64)),
            # The kernel takes the lengths from the positions of the drafts' first tokens.
            *(torch.zeros((STEPS, BATCH + 1), dtype=torch.int32), LENS.clone()),
            *(WIDTH, 128, BATCH + 1, 4, 4, 4, 1),
        ],
        3,
        4,
    )
    accepted = torch.tensor([2, 1, 4], dtype=torch.int32)
    same(
        "create_extend_after_decode_spec_info",
        spec_utils.create_extend_after_decode_spec_info,
        TorchKernel(tables.extend_after_decode),
        (BATCH,),
        lambda: [
            *(torch.arange(50, 57), LENS, accepted),
            *(torch.zeros(7, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int32), 4),
        ],
        3,
        4,
    )
    same(
        "fill_new_verified_id",
        eagle_info_v2.fill_new_verified_id,
        TorchKernel(tables.last_verified),
        (BATCH,),
        lambda: [
            torch.arange(70, 70 + BATCH * DRAFT).view(BATCH, DRAFT),
            accepted,
            torch.zeros(BATCH, dtype=torch.int32),
            DRAFT,
        ],
        2,
    )
    for page in (4, 16):
        rejected = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
        for shift in range(4):
            same(
                "align_evict_mask_to_page_size",
                spec_utils.align_evict_mask_to_page_size,
                TorchKernel(tables.keep_page_in_use),
                (BATCH,),
                lambda page=page, shift=shift, rejected=rejected: [
                    LENS + shift,
                    rejected.flatten().clone(),
                    page,
                    DRAFT,
                    4,
                ],
                1,
            )


def attention_agrees() -> None:
    heads, kv_heads, dim, pool = 4, 2, 16, 64
    k_buffer, v_buffer = torch.randn(pool, kv_heads, dim), torch.randn(pool, kv_heads, dim)
    cached, new = torch.tensor([0, 9, 17]), torch.tensor([4, 4, 4])
    kv_indptr = torch.cat((torch.zeros(1), cached.cumsum(0))).int()
    qo_indptr = torch.cat((torch.zeros(1), new.cumsum(0))).int()
    indices = torch.randperm(pool)[: int(cached.sum())]
    mask_lens = new * (cached + new)
    mask_indptr = torch.cat((torch.zeros(1), mask_lens.cumsum(0))).long()
    mask = torch.rand(int(mask_lens.sum())) < 0.5
    # Each token sees itself.
    for at, before, count in zip(mask_indptr.tolist(), cached.tolist(), new.tolist(), strict=False):
        mask[at : at + count * (before + count)].view(count, -1)[:, before:].fill_diagonal_(True)
    q, k, v = (torch.randn(int(new.sum()), n, dim) for n in (heads, kv_heads, kv_heads))
    for custom in (None, mask):
        outs = []
        for run in (extend_attention.extend_attention_fwd, attention.extend_attention):
            out = torch.zeros_like(q)
            where = None if custom is None else mask_indptr
            run(q, k, v, out, k_buffer, v_buffer, qo_indptr, kv_indptr, indices, custom, True, where, 4, 1.0, 1.0, 0.3)
            outs.append(out)
        torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=1e-5)
        print("extend_attention_fwd" + (" with a mask" if custom is not None else ""))
    attention.ROWS = 3
    out = torch.zeros_like(q)
    attention.extend_attention(
        q, k, v, out, k_buffer, v_buffer, qo_indptr, kv_indptr, indices, mask, True, mask_indptr, 4, 1.0, 1.0, 0.3
    )
    torch.testing.assert_close(out, outs[1], atol=2e-6, rtol=1e-5)
    lens = torch.tensor([9, 17])
    indptr = torch.cat((torch.zeros(1), lens.cumsum(0))).int()
    outs = []
    for run in (decode_attention.decode_attention_fwd, attention.decode_attention):
        out, splits = torch.zeros(2, heads, dim), 2
        work = torch.zeros(2, heads, splits, dim), torch.zeros(2, heads, splits)
        counts = torch.full((2,), splits, dtype=torch.int32)
        run(q[:2], k_buffer, v_buffer, out, indptr, indices, *work, counts, splits, 0.3, 1.0, 1.0)
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=1e-5)
    print("decode_attention_fwd")


if __name__ == "__main__":
    tables_agree()
    attention_agrees()
