"""What is read from workers: counters and KV pools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chat_deployment import hold
from code_texts import texts
from e2e import pd as e2e_pd
from sglang.srt.entrypoints import http_server

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import workers
from sglang_pd_radix.tools.cluster import Cluster
from sglang_pd_radix.tools.cluster.process import Process


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
        ({"audit": ["one KV slot stands in the tree twice"]}, "one KV slot stands in the tree twice"),
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
    assert workers.pool_problems("decode-0", pool, True) == [f"decode-0 does not tell its {missing}"]


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
    assert problem == "decode-0 does not tell its size and available and evictable and protected"
    # Half of them is none of the two.
    (problem,) = workers.pool_problems("prefill-0", pool | {"size": 64}, False)
    assert problem == "prefill-0 does not tell its available and evictable and protected"


def test_a_worker_that_does_not_count_is_named() -> None:
    with pytest.raises(PdRadixError, match="/decode/metrics does not have sglang:decode_prefix_hit_tokens_total"):
        hold(True, uncounted="reused_tokens")


@pytest.mark.parametrize("flag", [True, False])
def test_only_the_run_with_the_flag_must_tell_of_a_tree(flag: bool) -> None:
    run = hold(flag, pool={"audit": ["a fault"]} if flag else {})
    assert run.problems == (["decode-0: a fault"] if flag else [])
    assert [sorted(pool) for pool in run.pools.values()][1].count("audit") == flag


def test_a_worker_of_an_earlier_version_may_tell_of_no_pool() -> None:
    """As of a prefill worker of a hybrid model, on which the demo, the benchmark and verify ended."""
    run = hold(True, untold="prefill")
    assert list(run.pools) == ["decode-0"] and not run.problems
    # One with the flag always tells, and without that nothing would be judged.
    assert hold(True, untold="decode").problems == ["decode-0 tells nothing of its KV pool"]
    assert not hold(False, untold="decode").problems
    assert workers.problems_of("decode-0", [], True) and not workers.problems_of("decode-0", [], False)


def test_only_workers_are_asked_for_their_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway and a PegaFlow server have none, and answer with 404."""
    roles = ("pegaflow", "prefill", "decode", "router")
    processes = [Process(role, f"{role}-0", f"http://{role}", Path(), [], {}) for role in roles]
    monkeypatch.setattr(workers, "idle_pools", lambda url: [{"of": url}])
    told = workers.pools_of(cast(Cluster, SimpleNamespace(processes=processes)))
    assert told == {"prefill-0": [{"of": "http://prefill"}], "decode-0": [{"of": "http://decode"}]}


def test_dp_ranks_are_called_by_their_numbers() -> None:
    """Not by the order in which they answered."""
    run = hold(True, ranks=[{"dp_rank": 2}, {"dp_rank": 1, "audit": ["a fault"]}, {"dp_rank": 0}])
    assert list(run.pools) == ["prefill-0", *(f"decode-0 rank {rank}" for rank in range(3))]
    assert [pool.get("dp_rank") for pool in run.pools.values()] == [None, 0, 1, 2]
    assert run.problems == ["decode-0 rank 1: a fault"]


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
