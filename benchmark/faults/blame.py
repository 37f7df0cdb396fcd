"""Which failures what was done explains: the rest have no cause, and fail the storm.

An event is given its part of the time (`HARMS`): while it lasts, and until everybody has noticed that it began and
that it is over. A request that failed must have lived in such a time. How many may fail is bounded as well: an event
on one of two workers explains what was under way when it began, and half of what was asked while it went on. What has
no entry in `HARMS` (flushes, weight updates, pauses that keep their requests, a link that is a little slow) explains
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .deploy import Done
from .schedule import Shape
from .traffic import Told

# Seconds until the router and the peers have noticed that a worker is gone or back, on a machine that is busy: the
# router looks every 2 s and believes two looks, the peers' heartbeats are those of `deploy.ENV`.
NOTICED_S = 8.0
# Seconds by which the router may find a worker that starts before its health is seen here.
EARLY_S = 5.0
# By kind and detail: seconds after the event that belong to it.
HARMS: Mapping[tuple[str, str], float] = {
    ("kill", ""): NOTICED_S,
    ("stop", ""): NOTICED_S,
    ("cut", ""): NOTICED_S,
    ("slow", "2mbit"): NOTICED_S,
    ("pause", "abort"): 2.0,
}
# Of what is asked over a slow link, the part that may come too late. It never was as much.
SLOWED = 0.25
# Requests that were asked while nothing was wrong, from which on that they were answered says something.
ENOUGH = 20
# Of the share that may fail, the bound is so many standard deviations, and so many requests, higher.
SURE, SPARE = 3.0, 2


@dataclass(frozen=True)
class Window:
    """When an event explains failures (on the clock of `Told`), and of which part of what is asked in it."""

    event: str
    aborts: bool
    from_s: float
    to_s: float
    part: float


def windows(done: Sequence[Done], shape: Shape, began_s: float) -> list[Window]:
    """Of all events that were carried out. began_s: of the storm, on the clock of `Told`."""
    found = []
    for one in done:
        event = one.event
        after = HARMS.get((event.kind, event.detail))
        if after is None or one.outcome.startswith(("left out", "was gone")):
            continue
        if event.target == "link":
            part = 1.0 if event.kind == "cut" else SLOWED
        else:
            part = 1 / len(shape.workers(event.target.partition("-")[0]))
        begin, end = began_s + one.began_s, began_s + one.ended_s
        spans = [(begin, end + after)]
        if event.kind == "kill":
            # In between the router knows.
            spans = [(begin, min(begin + after, end)), (max(begin, end - EARLY_S), end + after)]
        aborts = event.detail == "abort"
        found += [Window(str(event).strip(), aborts, *span, part) for span in spans]
    return found


@dataclass(frozen=True)
class Blame:
    """Of the requests that waited for their answer. clear: lived in no window; allowed: the most that may fail."""

    waited: int
    failed: int
    clear: int
    allowed: int
    causeless: tuple[Told, ...]

    def __str__(self) -> str:
        return (
            f"{self.waited - self.failed} whole of {self.waited} that waited for their answer, and the events explain "
            f"no less than {self.waited - self.allowed}; {self.clear} were asked while nothing was wrong"
        )


def judge(told: Sequence[Told], found: Sequence[Window]) -> Blame:
    """What of ``told`` the windows ``found`` explain. Those that left by themselves are not counted."""
    waited = [one for one in told if one.ended_how != "left"]
    chances = [_chance(one, found) for one in waited]
    expected = sum(chances)
    allowed = expected + SURE * math.sqrt(sum(p * (1 - p) for p in chances)) + (SPARE if found else 0)
    failed = [one for one in waited if one.ended_how != "whole"]
    causeless = tuple(one for one in failed if not any(_explains(window, one) for window in found))
    clear = sum(not any(_met(window, one) for window in found) for one in waited)
    return Blame(len(waited), len(failed), clear, min(len(waited), math.floor(allowed)), causeless)


def _met(window: Window, one: Told) -> bool:
    return one.began_s <= window.to_s and one.ended_s >= window.from_s


def _explains(window: Window, one: Told) -> bool:
    # What a worker calls aborted, a pause has aborted.
    return _met(window, one) and (window.aborts or one.ended_how != "aborted")


def _chance(one: Told, found: Sequence[Window]) -> float:
    """The most likely that the request could fail by what was done."""
    survives = 1.0
    for window in found:
        if _met(window, one):
            survives *= 1 - (1.0 if one.began_s < window.from_s else window.part)
    return 1 - survives


def problems(blame: Blame, began_s: float) -> list[str]:
    """Failures without a cause, and too many with one. began_s: of the storm."""
    found = [
        f"client {one.number} ({one.manner}), asked {one.began_s - began_s:.1f} s after the beginning: {one.ended_how} "
        f"after {one.took_s:.1f} s, while nothing was wrong: {one.error[:200]}"
        for one in blame.causeless[:10]
    ]
    if len(blame.causeless) > 10:
        found.append(f"and {len(blame.causeless) - 10} more that failed while nothing was wrong")
    if blame.failed > blame.allowed:
        found.append(
            f"{blame.failed} of {blame.waited} requests failed, and what was done explains {blame.allowed} at the most"
        )
    if not blame.waited:
        found.append("nobody waited for an answer")
    return found


def not_judged(blame: Blame) -> list[str]:
    """What the storm leaves open."""
    if blame.clear >= ENOUGH:
        return []
    return [
        f"whether requests fail without a cause: {blame.clear} were asked while nothing was wrong, {ENOUGH} are needed"
    ]


def never_done(done: Sequence[Done], shape: Shape) -> str:
    """What of all that can be done was done to nobody, or not to some of the workers: a few words, none if all was."""
    carried = {(one.event.kind, one.event.target) for one in done if one.carried_out}
    found = []
    for kind in dict.fromkeys(kind for kind, _, _ in shape.deck()):
        roles = {role for other, role, _ in shape.deck() if other == kind}
        targets = [t for role in sorted(roles) for t in (["link"] if role == "link" else shape.workers(role))]
        missed = [target for target in targets if (kind, target) not in carried]
        found += [f"{kind} of {', '.join(missed)}"] if missed else []
    return "; ".join(found)
