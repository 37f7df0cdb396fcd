"""The verdict on a storm: from what was told, what is held and how fast it went, what is wrong. It asks nobody."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_pd_radix.tools.workers import pool_problems, rank_name

from .books import Books
from .traffic import Ask, Told

# Descriptors and threads that a worker may have more of than before: connections that are kept alive, threads of pools
# that are made when they are first needed. A prefill over Mooncake makes eight, with 24 descriptors, after minutes as
# after ten thousand requests, and has up to 15 sockets more.
SPARE_FDS, SPARE_THREADS = 48, 24
# Memory that one process may have more of than before: what pools and allocators keep.
SPARE_RSS_KIB = 128 * 1024
# The part of what a decode worker's tree held in calm that it has to hold afterwards.
STILL_HELD = 0.5
# For each time that its peers were started anew: what is kept of a peer that is gone until its successor is used.
SPARE_FDS_PER_RESTART = 2


def late_problems(told: Sequence[Told], limit_s: float) -> list[str]:
    """Clients that were told nothing, or too late."""
    found = []
    for one in told:
        if one.error == "no word":
            found.append(f"client {one.number} ({one.manner}) was told nothing within {one.took_s:.0f} s")
        elif one.manner == "slow" and one.first_s is not None:
            # Its answer takes as long as it reads.
            if one.first_s - one.began_s > limit_s:
                found.append(f"client {one.number} (slow): no token for {one.first_s - one.began_s:.0f} s")
        elif one.took_s > limit_s:
            found.append(f"client {one.number} ({one.manner}): {one.ended_how} after {one.took_s:.0f} s: {one.error}")
    return found


def left_behind(name: str, pool: Mapping[str, Any]) -> list[str]:
    """What one rank of an idle worker holds and should not. Every decode worker here has the flag.

    Then no book mentions a room either; without the flag the engine's own may.
    """
    found = pool_problems(name, pool, keeps_tree=name.startswith("decode"))
    name = rank_name(name, pool)
    return found + [f"{name}: {count} rooms are left in {book}" for book, count in pool["rooms"].items() if count]


def held_at_rest(name: str, pools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What all ranks of an idle worker hold and should not. Every worker here tells of its pools."""
    if not pools:
        return [f"{name} does not report its KV pool"]
    return [problem for pool in pools for problem in left_behind(name, pool)]


def step_problems(name: str, pools: Sequence[Mapping[str, Any]], limit_s: float | None) -> list[str]:
    """Ranks of a worker of which a step of the decode queues has taken longer than ``limit_s`` (None: any time)."""
    longest = max((pool.get("longest_queue_step_s", 0.0) for pool in pools), default=0.0)
    if limit_s is None or longest <= limit_s:
        return []
    return [f"{name}: a step of its queues has taken {longest:.2f} s"]


def process_problems(before: Books, after: Books, restarts: int) -> list[str]:
    """Threads, sockets and descriptors that a worker has kept; ``restarts`` of its peers happened in between."""
    found = []
    if before.pid != after.pid:
        # Another process: its own beginning is not known, so that of its role is what it is held against.
        restarts += 1
    more = after.descriptors - before.descriptors
    if more > SPARE_FDS + SPARE_FDS_PER_RESTART * restarts:
        found.append(
            f"{after.name}: {more} descriptors more than before: {before.descriptors} and then {after.descriptors}"
        )
    if after.close_wait > before.close_wait + SPARE_FDS_PER_RESTART * (1 + restarts):
        found.append(f"{after.name}: {after.close_wait} sockets are open whose peer has closed them")
    if after.threads - before.threads > SPARE_THREADS:
        found.append(f"{after.name}: {before.threads} threads before and {after.threads} after")
    if before.pid == after.pid and after.rss_kib - before.rss_kib > SPARE_RSS_KIB:
        found.append(
            f"{after.name}: {before.rss_kib / 1024:.0f} MiB of memory before and {after.rss_kib / 1024:.0f} after"
        )
    return found


def held_parts(told: Sequence[Told], asks: Sequence[Ask], workers: Sequence[str]) -> dict[str, float]:
    """By decode worker, the part of the prompts it has answered that its tree held; those that answered none are not
    there."""
    found = {}
    for worker in workers:
        own = [one for one in told if one.ended_how == "whole" and one.worker == worker]
        if prompts := sum(len(asks[one.ask].ids) for one in own):
            found[worker] = sum(one.hit or 0 for one in own) / prompts
    return found


def held_problems(when: str, held: Mapping[str, float], before: Mapping[str, float]) -> list[str]:
    """Workers whose tree holds nothing, or far less than it did before; the requests are the same."""
    return [
        f"{when}: the tree of {worker} held {part:.0%} of its prompts"
        + (f", and {before[worker]:.0%} in calm" if worker in before else "")
        for worker, part in held.items()
        if part <= STILL_HELD * before.get(worker, 0.0)
    ]


def verdict(problems: Sequence[str], not_judged: Sequence[str]) -> str:
    """The last line of a report."""
    if problems:
        return f"FAILED: {len(problems)} things are wrong"
    if not_judged:
        return f"all is well as far as it was judged; {len(not_judged)} things were not"
    return "all is well"


def summary(told: Sequence[Told]) -> dict[str, Any]:
    """How many ended how, in what manner, and how long those waited who were told of a failure."""
    by_end = collections.Counter(one.ended_how for one in told)
    by_manner = collections.Counter(one.manner for one in told)
    failed = sorted(one.took_s for one in told if one.ended_how == "failed")
    return {
        "requests": len(told),
        "ended": dict(sorted(by_end.items())),
        "manners": dict(sorted(by_manner.items())),
        "failed_after_s": {
            name: round(failed[min(len(failed) - 1, int(len(failed) * part))], 2)
            for name, part in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))
            if failed
        },
        "failed_later_than_60_s": sum(seconds > 60 for seconds in failed),
        "errors": dict(collections.Counter(_kind(one.error) for one in told if one.error).most_common(12)),
    }


def _kind(error: str) -> str:
    """An error without what differs from one request to the next."""
    import re

    text = re.sub(r"0x[0-9a-f]+|[0-9a-f]{32}|\d+(?:\.\d+)*", "N", error)
    return text[:160]
