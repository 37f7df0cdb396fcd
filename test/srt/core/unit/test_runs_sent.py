"""Runs of contiguous pages on both sides, of which each is one descriptor."""

from __future__ import annotations

import numpy as np
import pytest
from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
from sglang.srt.disaggregation.decode_radix.prefix import count_runs


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        ([], [], 0),
        ([3], [9], 1),
        ([3, 4, 5], [7, 8, 9], 1),
        ([3, 4, 6], [7, 8, 9], 2),
        ([3, 4, 5], [7, 9, 10], 2),
        ([3, 5, 6, 7], [1, 2, 4, 5], 3),
        ([5, 4, 3], [1, 2, 3], 3),
        ([1, 2, 3], [4, 5], 1),
    ],
)
def test_runs_are_counted_as_the_engine_groups_them(sources: list[int], targets: list[int], expected: int) -> None:
    source, target = np.array(sources, np.int32), np.array(targets, np.int32)
    assert count_runs(source, target) == expected
    length = min(len(source), len(target))
    assert len(group_concurrent_contiguous(source[:length], target[:length])[0]) == expected
