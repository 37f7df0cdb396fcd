"""``--breakdown``: stages of the time to first token, from time stamps of workers and clients.

Workers remember a run's requests and are asked for all of them after it. Requests are matched by rid. All processes run
on one machine, so their clocks agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.trace import VARIABLE, ask

from .stats import p99, percentile

if TYPE_CHECKING:
    from .asked import Asked
    from .deploy import Deployment, Variant
    from .measure import Run
    from .workload import Workload

# For all servers: more than the requests of any run here. A worker needs a few KB for each that it remembers.
ENV = {VARIABLE: "20000"}

SENT, COMPUTED, AGGREGATED = "KV from prefill", "computed on decode", "aggregated"
KINDS = (SENT, COMPUTED, AGGREGATED)
# Why a request has no stages.
LOST, RETRACTED = "workers remember no record of it", "it was retracted"
FIRST, LATER, ALL = "first turns", "turns 2 and later", "all requests"
TURNS = (FIRST, LATER, ALL)


@dataclass(frozen=True)
class Stage:
    """The time between two moments of a request: ``role.stage`` of a worker's record, or ``client.sent, first``.

    kinds: the kinds of requests that have it.
    """

    name: str
    begin: str
    end: str
    kinds: tuple[str, ...] = KINDS


def _of_role(role: str, kinds: tuple[str, ...], *stages: tuple[str, str, str]) -> list[Stage]:
    return [Stage(f"{role}: {name}", f"{role}.{begin}", f"{role}.{end}", kinds) for name, begin, end in stages]


def _arriving(role: str) -> list[Stage]:
    return [
        Stage(f"gateway in: client → {role}", "client.sent", f"{role}.received"),
        *_of_role(role, KINDS, ("tokenized", "received", "tokenized"), ("to its scheduler", "tokenized", "scheduled")),
    ]


_COMPUTE = (
    ("queue, until a step", "waiting", "running"),
    ("prepared, and earlier steps", "running", "launched"),
    ("compute, last step", "launched", "prefilled"),
)
_OUT = "computed → first token ready", "prefilled", "first_output"

STAGES = (
    *_arriving("decode"),
    *_of_role(
        "decode",
        KINDS,
        ("handshake", "scheduled", "handshake_done"),
        ("queue, until admitted", "handshake_done", "admitted"),
    ),
    *_of_role(
        "decode",
        (SENT,),
        ("admitted → its KV has arrived", "admitted", "waiting"),
        ("KV arrived → in a batch", "waiting", "running"),
        ("in a batch → first token ready", "running", "first_output"),
    ),
    *_of_role("decode", (COMPUTED,), ("admitted → may be computed", "admitted", "waiting"), *_COMPUTE, _OUT),
    *_arriving("prefill"),
    *_of_role(
        "prefill",
        (SENT,),
        # The engine's handshake ends with decode's request for KV.
        ("handshake, until decode has asked", "scheduled", "handshake_done"),
        ("asked → in its queue", "handshake_done", "waiting"),
        *_COMPUTE,
        ("computed → KV sent", "prefilled", "sent"),
        ("KV sent → response", "sent", "answered"),
        ("computed → response", "prefilled", "answered"),
    ),
    Stage("decode admits it → prefill knows", "decode.admitted", "prefill.handshake_done", (SENT,)),
    Stage("prefill has computed it → decode has its KV", "prefill.prefilled", "decode.waiting", (SENT,)),
    Stage("decode admits it → prefill's response", "decode.admitted", "prefill.answered", (COMPUTED,)),
    *_arriving("aggregated"),
    *_of_role("aggregated", KINDS, ("scheduler takes it in", "scheduled", "waiting"), *_COMPUTE, _OUT),
    Stage("prefill's response after decode's first token", "decode.first_output", "prefill.answered"),
    Stage("gateway out: first token ready → client", "decode.first_output", "client.first"),
    Stage("gateway out: first token ready → client", "aggregated.first_output", "client.first"),
    Stage("of that, until its HTTP server sends it", "decode.first_output", "decode.handed_out"),
    Stage("of that, until its HTTP server sends it", "aggregated.first_output", "aggregated.handed_out"),
    Stage("of that, after both workers' answers", "both.ready", "client.first"),
    Stage("total (TTFT)", "client.sent", "client.first"),
)


# ---------------------------------------------------------------------------------------------------------- one run


def collect(
    deployment: Deployment, variant: Variant, workload: Workload, asked: Sequence[Asked], beside: int = 0
) -> list[dict]:
    """The records of a run's measured requests that have a rid; asks the workers.

    beside: number of other requests answered meanwhile.
    """
    if not any(one.rid for one in asked):
        return []
    most = workload.requests + sum(map(len, workload.warm)) + beside
    try:
        records, _ = ask(deployment.worker_urls(variant), {"last": most})
    except PdRadixError:
        records = []
    return join(asked, records, turns_of(workload))


def turns_of(workload: Workload) -> list[int | None]:
    """Each request's turn of its chat, from 1; None without turns."""
    turned = workload.chat and len(workload.rounds) > 1
    return [number if turned else None for number, one in enumerate(workload.rounds, 1) for _ in one]


def join(
    asked: Sequence[Asked], records: Iterable[Mapping[str, Any]], turns: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Merge client and worker records of each request: ``turn``, ``kind``, and ``times``, Unix time by ``who.what``.

    records: newest first for each request. kind: one of `KINDS`, or why there are no stages.
    """
    known: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        # A request that the gateway retried has several.
        known.setdefault(record["rid"], {}).setdefault(record["role"], record)
    return [
        {"rid": one.rid, "turn": turn, **_life(one, known.get(one.rid, {}))}
        for one, turn in zip(asked, turns, strict=True)
        if one.rid and not one.beside
    ]


def _life(one: Asked, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    sent = one.start_s + one.unix_s
    times = {"client.sent": sent, "client.first": sent + one.ttft_s}
    for role, record in records.items():
        times |= {f"{role}.{stage}": at for stage, at in record["times"].items()}
    both = [times[key] for key in ("decode.first_output", "prefill.answered") if key in times]
    if len(both) == 2:
        times["both.ready"] = max(both)
    return {"kind": _kind(records), "times": times}


def _kind(records: Mapping[str, Mapping[str, Any]]) -> str:
    if any(record["retractions"] for record in records.values()):
        # Its stamps belong to different attempts.
        return RETRACTED
    if "aggregated" in records:
        return AGGREGATED
    if "decode" not in records:
        return LOST
    details = records["decode"].get("cached_tokens_details") or {}
    return COMPUTED if details.get("decode_computed") is not None else SENT


# ---------------------------------------------------------------------------------------------------------- all runs


def of(runs: Sequence[Run]) -> dict[str, Any]:
    """The report's ``breakdown`` of a workload over all runs; {} without records."""
    if not any(run.lives for run in runs):
        return {}
    lives = [(run.variant, life) for run in runs for life in run.lives]
    sides = list(dict.fromkeys(run.variant for run in runs))
    groups = []
    for turns in TURNS:
        for side in sides:
            for kind in KINDS:
                chosen = [
                    life["times"]
                    for name, life in lives
                    if (name, life["kind"], _turns(life["turn"])) == (side, kind, turns)
                ]
                if chosen:
                    groups.append({"turns": turns, "side": side, "kind": kind, **summary(kind, chosen)})
    left_out = [
        {"side": side, "reason": reason, "requests": count, "of": sum(name == side for name, _ in lives)}
        for side in sides
        for reason in (LOST, RETRACTED)
        if (count := sum((name, life["kind"]) == (side, reason) for name, life in lives))
    ]
    return {"breakdown": {"groups": groups, "left_out": left_out}}


def _turns(turn: int | None) -> str:
    return ALL if turn is None else FIRST if turn == 1 else LATER


def summary(kind: str, lives: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Number of requests; and of each stage its number of requests, p50, p99 and mean in ms."""
    stages = {}
    for stage in STAGES:
        if kind in stage.kinds:
            ms = [
                1e3 * (life[stage.end] - life[stage.begin])
                for life in lives
                if stage.begin in life and stage.end in life
            ]
            if ms:
                figures = {"p50_ms": percentile(ms, 50), "p99_ms": p99(ms), "mean_ms": sum(ms) / len(ms)}
                stages[stage.name] = {"requests": len(ms), **{key: round(one, 3) for key, one in figures.items()}}
    return {"requests": len(lives), "stages": stages}


# ------------------------------------------------------------------------------------------------------------ tables


def tables(entry: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, heading and rows of a workload's tables: first and later turns; empty without figures.

    A cell has p50 and p99, and the number of requests if it differs from the column's.
    """
    found = []
    groups = entry.get("breakdown", {}).get("groups", ())
    for turns in TURNS:
        columns = [group for group in groups if group["turns"] == turns]
        names = [name for name in dict.fromkeys(s.name for s in STAGES) if any(name in c["stages"] for c in columns)]
        if columns:
            heading = ["stage", *(f"{c['side']}: {c['kind']} ({c['requests']})" for c in columns)]
            rows = [[name, *(_cell(column, name) for column in columns)] for name in names]
            found.append((f"Stages until the first token, {turns}: p50 / p99, ms", heading, rows))
    return found


def _cell(column: Mapping[str, Any], name: str) -> str:
    stage = column["stages"].get(name)
    if stage is None:
        return "–"
    more = f" ({stage['requests']})" if stage["requests"] != column["requests"] else ""
    tail = stage["p99_ms"]
    # None in a report read from JSON.
    return f"{stage['p50_ms']:.1f} / {'–' if tail is None or math.isnan(tail) else f'{tail:.1f}'}{more}"


def notes(entry: Mapping[str, Any]) -> list[str]:
    """Notes on requests without stages."""
    return [
        f"Stages leave out {one['requests']} of {one['of']} requests of {one['side']}: {one['reason']}."
        for one in entry.get("breakdown", {}).get("left_out", ())
    ]
