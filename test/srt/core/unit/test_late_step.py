"""What a decode step in flight still uses, slot by slot: I8 stands on these figures."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.decode_radix.overlap_guard import OPEN, OverlapGuard, make_guard
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, ScheduleBatch

# Of three requests in rows 2, 0 and 3, the slots of each position; a page has four.
TABLE = torch.tensor(
    [
        [20, 21, 22, 23, 40, 41, 42, 43, 8, 9, 10, 11],
        [0] * 12,
        [4, 5, 6, 7, 28, 29, 30, 31, 16, 17, 18, 19],
        [12, 13, 14, 15, 32, 33, 34, 35, 36, 37, 38, 39],
    ]
)
ROWS = [2, 0, 3]
# Tokens committed when the step was launched, and allocated.
COMMITTED, ALLOCATED = [3, 8, 5], [9, 10, 8]


def batch(speculates: bool = False) -> ScheduleBatch:
    lengths = zip(COMMITTED, ALLOCATED, strict=True)
    return ScheduleBatch(
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculates),
        out_cache_loc=torch.tensor([30, 9, 34]),
        req_pool_indices=torch.tensor(ROWS),
        req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
        reqs=[
            SimpleNamespace(kv_committed_len=c, kv_allocated_len=a, finished_reason=None, freed_row=row)
            for row, (c, a) in zip(ROWS, lengths, strict=True)
        ],
    )


@pytest.mark.parametrize(
    ("page_size", "ended", "pages"),
    [
        (4, [0, 2], [7, 8]),
        (1, [1], [9]),
    ],
)
def test_pages(page_size, ended, pages):
    found = OverlapGuard(batch(), ended, page_size).pages
    assert found.dtype == np.int64 and sorted(found.tolist()) == pages


def test_rows_are_those_of_the_requests_that_have_ended():
    assert OverlapGuard(batch(), [0, 2], 4).rows_read == {2, 3}


def test_the_step_that_counts_is_the_last_whose_result_is_not_processed():
    scheduler, rows = SimpleNamespace(), SimpleNamespace(give_last=sorted)
    assert make_guard(scheduler, rows, 4) is OPEN, "steps do not overlap"
    scheduler.result_queue = []
    assert make_guard(scheduler, rows, 4) is OPEN
    first, last = batch(), batch()
    scheduler.result_queue = [(first, None), (last, None)]
    first.reqs[0].finished_reason = FINISH_LENGTH(1)
    assert make_guard(scheduler, rows, 4) is OPEN, "who has ended was in an earlier step"
    last.reqs[1].finished_reason = FINISH_LENGTH(1)
    late = make_guard(scheduler, rows, 4)
    assert (late.batch, late.ended, late.page_size, late.rows) == (last, [1], 4, [0])
