"""What is read from workers: counters and KV pools."""

from __future__ import annotations

from typing import Any

import pytest
from chat_deployment import hold

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import workers


def test_counters_are_summed_over_their_labels() -> None:
    text = '# TYPE a_total counter\na_total{x="1"} 2.0\na_total{x="a b} 7"} 3.0\na_total_more 9\nb_total 4e+08\n'
    assert workers.parse_counters(text, {"a": "a_total", "b": "b_total", "c": "c_total"}) == {"a": 5.0, "b": 4e8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"available": 59}, "59 free and 4 evictable tokens do not make its pool of 64"),
        ({"protected": 4}, "4 tokens are locked"),
        ({"locks_released": 4}, "5 locks were taken and 4 released"),
        ({"audit": ["one KV slot stands in the tree twice"]}, "one KV slot stands in the tree twice"),
        ({"idle": False}, "not idle"),
    ],
)
def test_pool_problems(change: dict[str, Any], message: str) -> None:
    pool = {"size": 64, "available": 60, "evictable": 4, "protected": 0, "idle": True}
    pool |= {"locks_taken": 5, "locks_released": 5, "audit": []}
    assert workers.pool_problems("decode-0", pool) == []
    (problem,) = workers.pool_problems("decode-0", pool | change)
    assert problem.startswith("decode-0") and message in problem


def test_a_worker_that_does_not_count_is_named() -> None:
    with pytest.raises(PdRadixError, match="/decode/metrics does not have sglang:decode_prefix_hit_tokens_total"):
        hold(True, uncounted="reused_tokens")
