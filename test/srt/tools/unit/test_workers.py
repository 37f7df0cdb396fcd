"""What is read from workers: counters and KV pools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pd as e2e_pd
import pytest
from code_texts import texts
from sglang.srt.entrypoints import http_server

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import workers
from sglang_pd_radix.tools.cluster import Cluster


def test_counters_are_summed_over_their_labels() -> None:
    text = '# TYPE a_total counter\na_total{x="1"} 2.0\na_total{x="a b} 7"} 3.0\na_total_more 9\nb_total 4e+08\n'
    assert workers.parse_counters(text, {"a": "a_total", "b": "b_total", "c": "c_total"}) == {"a": 5.0, "b": 4e8}


PLAIN = {"size": 64, "available": 60, "evictable": 4, "protected": 0, "idle": True}
PLAIN |= {"req_slots": 8, "free_req_slots": 8, "metadata_buffers": 4, "free_metadata_buffers": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"available": 59}, "1 tokens of KV are lost"),
        ({"available": 61}, "1 tokens of KV are free twice, or free and in the tree"),
        ({"protected": 4, "available": 56}, "4 tokens of KV are locked"),
        ({"locks_released": 4}, "5 locks were taken and 4 released"),
        ({"audit": ["one KV slot is in the tree twice"]}, "one KV slot is in the tree twice"),
        ({"idle": False}, "not idle"),
        ({"free_req_slots": 7}, "1 rows of the table are lost"),
        ({"free_metadata_buffers": 2}, "2 metadata buffers are lost"),
        ({"free_req_slots": 9}, "1 rows of the table are free twice"),
        ({"free_metadata_buffers": 6}, "2 metadata buffers are free twice"),
    ],
)
def test_pool_problems(change: dict[str, Any], message: str) -> None:
    pool = PLAIN | {"locks_taken": 5, "locks_released": 5, "audit": []}
    assert workers.pool_problems("decode-0", pool, True) == []
    (problem,) = workers.pool_problems("decode-0", pool | change, True)
    assert problem.startswith("decode-0") and message in problem and "-" not in problem.removeprefix("decode-0")


@pytest.mark.parametrize("missing", ["locks_taken", "locks_released", "audit", *PLAIN])
def test_what_is_not_told_of_is_not_sound(missing: str) -> None:
    pool = PLAIN | {"locks_taken": 0, "locks_released": 0, "audit": []}
    # Prefill and a decode worker without the flag have neither locks nor an audit.
    assert workers.pool_problems("prefill-0", PLAIN, False) == []
    del pool[missing]
    assert workers.pool_problems("decode-0", pool, True) == [f"decode-0 does not report its {missing}"]


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ([PLAIN], 4),
        ([PLAIN | {"evictable": 0}], 0),
        # Told of nothing is not told of an empty tree.
        ([], None),
        ([{"idle": True}], None),
    ],
)
def test_a_tree_that_nobody_tells_of_is_not_empty(
    monkeypatch: pytest.MonkeyPatch, told: list, tokens: int | None
) -> None:
    """As the tests with servers look at it."""
    info = {"disaggregation_mode": "decode", "internal_states": [{"kv_pool": pool} for pool in told]}
    on = info | {"disaggregation_decode_enable_radix_cache": True}
    pair = e2e_pd.Pair(cast(Cluster, SimpleNamespace(decode_urls=["http://d"])))
    monkeypatch.setattr(e2e_pd, "server_info", lambda url: on)
    if tokens is None:
        with pytest.raises(AssertionError, match="http://d"):
            pair.tree_tokens()
    else:
        assert pair.tree_tokens() == tokens
    # Without the flag there is none, and of KV of several kinds the worker tells nothing.
    monkeypatch.setattr(e2e_pd, "server_info", lambda url: info)
    assert pair.tree_tokens() == (tokens or 0)


KV_FIGURES = ("size", "available", "evictable", "protected")


def test_a_pool_of_several_kinds_is_judged_by_its_rows_and_buffers() -> None:
    """As of a prefill worker of a hybrid model; a decode worker with the flag has one pool."""
    pool = {name: figure for name, figure in PLAIN.items() if name not in KV_FIGURES}
    assert workers.pool_problems("prefill-0", pool, False) == []
    (problem,) = workers.pool_problems("prefill-0", pool | {"free_req_slots": 7}, False)
    assert "1 rows of the table are lost" in problem
    (problem,) = workers.pool_problems("prefill-0", pool | {"idle": False}, False)
    assert "not idle" in problem
    (problem,) = workers.pool_problems("decode-0", pool | {"locks_taken": 0, "locks_released": 0, "audit": []}, True)
    assert problem == "decode-0 does not report its size and available and evictable and protected"
    # Half of them is none of the two.
    (problem,) = workers.pool_problems("prefill-0", pool | {"size": 64}, False)
    assert problem == "prefill-0 does not report its available and evictable and protected"


def test_a_worker_that_does_not_count_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [name for name in workers.DECODE_COUNTERS.values() if "hit" not in name]
    text = "\n".join(f'{name}{{model_name="m"}} 1.0' for name in counted)
    monkeypatch.setattr(workers, "http", lambda *args, **more: (200, text.encode()))
    with pytest.raises(PdRadixError, match="/decode/metrics does not have sglang:decode_prefix_hit_tokens_total"):
        workers.summed_counters([], ["http://w/decode"])


def test_a_worker_of_an_earlier_version_may_tell_of_no_pool() -> None:
    """As a prefill worker of a hybrid model. One with the flag always tells, or nothing would be judged."""
    assert workers.problems_of("decode-0", [], True) == ["decode-0 does not report its KV pool"]
    assert not workers.problems_of("prefill-0", [], False)


def test_dp_ranks_are_called_by_their_numbers() -> None:
    """Not by the order in which they answered."""
    pool = PLAIN | {"locks_taken": 5, "locks_released": 5, "audit": []}
    ranks = [{"dp_rank": 2}, {"dp_rank": 1, "audit": ["a fault"]}, {"dp_rank": 0}]
    pools = workers.told_pools({"internal_states": [{"kv_pool": pool | rank} for rank in ranks]})
    assert [one["dp_rank"] for one in pools] == [0, 1, 2]
    assert workers.problems_of("decode-0", pools, True) == ["decode-0 rank 1: a fault"]


def test_a_worker_that_asks_for_a_key_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "http", lambda *args, **more: (401, b"no"))
    for ask in (lambda: workers.server_info("http://w"), lambda: workers.summed_counters(["http://w"], [])):
        with pytest.raises(PdRadixError, match="HTTP 401 .it asks for a key, which SGLANG_PD_RADIX_API_KEY"):
            ask()


def test_no_tool_asks_again_and_again_where_each_answer_is_a_warning_in_a_workers_log() -> None:
    routes = {getattr(route, "path", ""): getattr(route, "endpoint", None) for route in http_server.app.routes}
    deprecated = {path for path, endpoint in routes.items() if "deprecated" in (getattr(endpoint, "__doc__", "") or "")}
    assert {"/get_server_info", "/get_load"} <= deprecated
    asked = {path for path in deprecated if any(text.endswith(path) for text in texts(Path(workers.__file__).parent))}
    # For which there is nothing else: /v1/loads fails with --enable-metrics.
    assert asked == {"/get_load"}
