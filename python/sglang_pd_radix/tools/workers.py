"""Queries running workers: counters and KV pools, and checks the pools."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .cluster import Cluster, http
from .cluster.local_http import status_text

# Counters of workers, with the flag off or on.
PREFILL_COUNTERS = {
    "sent_bytes": "sglang:kv_transfer_sent_bytes_total",
    "saved_bytes": "sglang:kv_transfer_saved_bytes_total",
}
DECODE_COUNTERS = {
    "prompt_tokens": "sglang:decode_prompt_tokens_total",
    "reused_tokens": "sglang:decode_prefix_hit_tokens_total",
    "transferred_tokens": "sglang:decode_transferred_tokens_total",
}


def parse_counters(text: str, names: dict[str, str]) -> dict[str, float]:
    """Sums over label sets of the Prometheus counters in ``names`` (ours -> theirs). Missing ones are left out."""
    theirs = {metric: name for name, metric in names.items()}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        metric, _, rest = line.partition("{")
        name = theirs.get(metric.strip() if rest else line.split(" ", 1)[0])
        if name is not None:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


# Figures of every rank; further ones of a rank with a single KV pool; and of one whose tree is audited.
POOL_FIGURES = ("idle", "req_slots", "free_req_slots", "metadata_buffers", "free_metadata_buffers")
KV_FIGURES = ("size", "available", "evictable", "protected")
TREE_FIGURES = ("locks_taken", "locks_released", "audit")


def told_pools(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ranks' entries of a worker's ``kv_pool``, sorted by DP rank; they arrive in order of their answers.

    `KV_FIGURES` are missing if a rank's tree is the engine's for several kinds of KV, or uses host memory.
    """
    pools = [state["kv_pool"] for state in info["internal_states"] if "kv_pool" in state]
    return sorted(pools, key=lambda pool: pool.get("dp_rank", 0))


def rank_name(name: str, pool: Mapping[str, Any]) -> str:
    """The name of a pool's rank, given its worker's."""
    return f"{name} rank {pool['dp_rank']}" if "dp_rank" in pool else name


def pool_problems(name: str, pool: Mapping[str, Any], keeps_tree: bool) -> list[str]:
    """Leaks of one rank of an idle prefill or decode worker, from its ``kv_pool`` figures (tokens).

    keeps_tree: a decode worker with the flag, which counts locks and audits its tree.
    """
    name = rank_name(name, pool)
    of_kv = keeps_tree or any(key in pool for key in KV_FIGURES)
    expected = (*(KV_FIGURES if of_kv else ()), *POOL_FIGURES, *(TREE_FIGURES if keeps_tree else ()))
    missing = [key for key in expected if key not in pool]
    # A busy rank has no audit.
    if not pool.get("idle", True):
        return [f"{name} is not idle although every answer is complete: {dict(pool)}"]
    if missing:
        return [f"{name} does not report its {' and '.join(missing)}"]
    wrong = []
    lost = pool["size"] - pool["available"] - pool["evictable"] - pool["protected"] if of_kv else 0
    if lost > 0:
        wrong.append(f"{name}: {lost} tokens of KV are lost: neither free nor in the tree")
    elif lost < 0:
        wrong.append(f"{name}: {-lost} tokens of KV are free twice, or free and in the tree")
    if pool.get("protected"):
        wrong.append(f"{name}: {pool['protected']} tokens of KV are locked without a user")
    if pool.get("locks_taken") != pool.get("locks_released"):
        wrong.append(f"{name}: {pool['locks_taken']} locks were taken and {pool['locks_released']} released")
    for what, each in (("rows of the table", "req_slots"), ("metadata buffers", "metadata_buffers")):
        missing = pool[each] - pool[f"free_{each}"]
        if missing:
            wrong.append(f"{name}: {abs(missing)} {what} are {'lost' if missing > 0 else 'free twice'}")
    wrong += [f"{name}: {fault}" for fault in pool.get("audit", ())]
    return wrong


def summed_counters(
    prefill_urls: Sequence[str], decode_urls: Sequence[str], optional: dict[str, str] | None = None
) -> dict[str, int]:
    """Summed counters of these workers, with ``optional`` ones where they exist.

    Raises PdRadixError for a worker without counters.
    """
    optional = optional or {}
    sums = dict.fromkeys(optional, 0)
    for urls, names in ((prefill_urls, PREFILL_COUNTERS), (decode_urls, DECODE_COUNTERS)):
        for url in urls:
            status, content = http(url + "/metrics", timeout=30)
            found = parse_counters(content.decode(errors="replace"), {**names, **optional}) if status == 200 else {}
            missing = sorted(set(names) - set(found))
            if missing:
                raise PdRadixError(
                    f"{url}/metrics does not have {names[missing[0]]} ({status_text(status)}): see if "
                    "`pd-radix doctor` finds the patch set active, and that SGLANG_PD_RADIX is not 0"
                )
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + int(value)
    return sums


def server_info(url: str) -> dict[str, Any]:
    """A worker's server info. Raises PdRadixError without status 200."""
    status, content = http(url + "/server_info", timeout=30)
    if status != 200:
        said = content.decode(errors="replace")[:200]
        raise PdRadixError(f"{url}/server_info answered {status_text(status)}: {said}")
    return json.loads(content)


def idle_pools(url: str, seconds: float = 10) -> list[dict[str, Any]]:
    """`told_pools` of the worker at ``url``, once all ranks are idle or after ``seconds``.

    Empty without this package; also of an earlier version without a single KV pool.
    """
    deadline = time.monotonic() + seconds
    while True:
        pools = told_pools(server_info(url))
        if all(pool["idle"] for pool in pools) or time.monotonic() > deadline:
            return pools
        time.sleep(0.1)


def problems_of(name: str, pools: Sequence[dict[str, Any]], keeps_tree: bool) -> list[str]:
    """Leaks in the pools of one worker; with ``keeps_tree`` it has to report them."""
    if keeps_tree and not pools:
        return [f"{name} does not report its KV pool"]
    return [problem for pool in pools for problem in pool_problems(name, pool, keeps_tree)]


def empty_caches(cluster: Cluster, urls: Sequence[str], timeout_s: float = 10) -> None:
    """Empty the caches of the workers at ``urls``. Raises PdRadixError."""
    for url in urls:
        deadline = time.monotonic() + timeout_s
        # Refused until the last request has ended.
        while (status := http(url + "/flush_cache", {}, timeout=timeout_s)[0]) != 200:
            cluster.check()
            if status == 401:
                raise PdRadixError(f"{url}/flush_cache answers {status_text(status, '/flush_cache')}")
            if time.monotonic() > deadline:
                raise PdRadixError(f"{url}/flush_cache keeps failing: its log is in {cluster.log_dir}")
            time.sleep(0.1)
