"""The columns of the live view: what each shows of a worker, and what it is sorted by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .reading import Look, Rank, totals
from .texts import printable


class Column(NamedTuple):
    """A column. key: what workers are sorted by; the largest comes first, but names."""

    title: str
    key: Callable[[Rank], Any]
    shown: Callable[[Rank], str]


def size(value: float | None, per: str = "") -> str:
    """A number of bytes or tokens in four places."""
    if value is None:
        return "–"
    power = 0
    while abs(value) >= 1000 and power < 4:
        value, power = value / 1000, power + 1
    digits = 1 if power and value < 100 else 0
    return f"{value:.{digits}f}{' kMGT'[power].strip()}{per}"


def part(value: float | None) -> str:
    """A part as a percentage."""
    return "–" if value is None else f"{100 * value:.0f}%"


def _rate(name: str) -> Column:
    title = name.removesuffix("_bytes")
    return Column(title, lambda rank: rank.rates.get(name, 0.0), lambda rank: size(rank.rates.get(name), "B/s"))


def _state(title: str, *states: str) -> Column:
    def count(rank: Rank) -> int:
        return sum(rank.requests.get(state, 0) for state in states)

    return Column(title, count, lambda rank: str(count(rank)) if rank.requests else "–")


def _free(rank: Rank) -> float | None:
    return rank.pool["available"] / rank.pool["size"] if rank.pool.get("size") else None


def _status(rank: Rank) -> str:
    # The figures after it have to be seen too; `summary` says which worker does not answer.
    if rank.error:
        return rank.error[:STATUS]
    if rank.audit:
        return f"AUDIT: {rank.audit[0]}"[:STATUS]
    if rank.in_step_s is not None:
        return f"busy {rank.in_step_s:.0f} s"
    return "idle" if rank.idle else "busy"


# Most characters of a status.
STATUS = 24

#: What the columns show, in lines that fit a terminal of 80 columns.
LEGEND = """\
status: busy 9 s: its scheduler has been in one step for 9 s, and tells nothing
run, wait, back (held back), xfer (in transfer), quar (in quarantine): requests
tree: tokens in it; free: part of the pool; held: part of prompts decode had
sent, saved: KV bytes/s; fail, lost (peers): since its start; –: not known"""


#: By the name that ``--sort`` takes.
COLUMNS = {
    "worker": Column("worker", lambda rank: rank.name, lambda rank: rank.name),
    "role": Column("role", lambda rank: rank.role, lambda rank: rank.role + ("+tree" if rank.flag else "")),
    # Before the figures: it has to be seen on a terminal of 80 columns.
    "status": Column("status", _status, _status),
    "running": _state("run", "running"),
    "waiting": _state("wait", "waiting", "handshake", "bootstrap", "retracted", "received"),
    "held_back": _state("back", "held_back"),
    "transfer": _state("xfer", "transfer", "sending", "local"),
    "quarantined": _state("quar", "quarantined"),
    "tree": Column(
        "tree",
        lambda rank: rank.pool.get("evictable", 0) + rank.pool.get("protected", 0),
        lambda rank: size(rank.pool.get("evictable", 0) + rank.pool.get("protected", 0)) if rank.pool else "–",
    ),
    "free": Column("free", lambda rank: -(_free(rank) or 0), lambda rank: part(_free(rank))),
    "held": Column("held", lambda rank: rank.held_part or 0, lambda rank: part(rank.held_part)),
    "sent": _rate("sent_bytes"),
    "saved": _rate("saved_bytes"),
    "failures": Column(
        "fail", lambda rank: rank.counters.get("failures", 0), lambda rank: size(rank.counters.get("failures"))
    ),
    "lost": Column(
        "lost", lambda rank: rank.counters.get("peers_lost", 0), lambda rank: size(rank.counters.get("peers_lost"))
    ),
}
#: Those whose smallest comes first.
NAMES = ("worker", "role", "status")


def ordered(ranks: list[Rank], column: str) -> list[Rank]:
    """The workers in the order of a column; equals by their name."""
    by_name = sorted(ranks, key=lambda rank: rank.name)
    return sorted(by_name, key=COLUMNS[column].key, reverse=column not in NAMES)


def _failed(ranks: list[Rank]) -> str:
    """Failures by role: both workers of a pair count a request that fails, if both have it."""
    by_role: dict[str, float] = {}
    for rank in ranks:
        if "failures" in rank.counters:
            by_role[rank.role] = by_role.get(rank.role, 0.0) + rank.counters["failures"]
    # Prefill is before decode, as a request is.
    return ", ".join(f"{size(by_role[role])} on {role}" for role in sorted(by_role, reverse=True)) or size(None)


def summary(look: Look) -> str:
    """The first line: the deployment as a whole."""
    sums = totals(look.ranks)
    decode, rates = sums["requests"].get("decode", {}), sums["rates"]
    tokens = rates if rates.get("prompt_tokens") else sums["counters"]
    held = tokens.get("held_tokens", 0) / tokens["prompt_tokens"] if tokens.get("prompt_tokens") else None
    waits = sum(count for state, count in decode.items() if state not in ("running", "quarantined"))
    kept = f", {decode['quarantined']} in quarantine" if decode.get("quarantined") else ""
    said = [
        f"{len(look.ranks)} ranks",
        f"{decode.get('running', 0)} running, {waits} not yet{kept}",
        f"{part(held)} of prompts held",
        f"sent {size(rates.get('sent_bytes'), 'B/s')}, saved {size(rates.get('saved_bytes'), 'B/s')}",
        f"failed: {_failed(look.ranks)}",
    ]
    if sums["unreachable"]:
        said.append("cannot be looked at: " + ", ".join(sums["unreachable"]))
    return printable(" | ".join(said))
