"""What is done to a deployment and when, and how its clients behave: plain data that follows from a seed.

The same seed and shape give the same events in the same order at the same times, on every machine. What becomes of an
event depends on the machine, and is in the report.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Seconds between two events, from and to.
PAUSE_S = (2.0, 5.0)
# Seconds for which a killed worker is taken to be out: until it is started again, and for the start.
RESTART_S = 60.0
PAUSE_MODES = ("abort", "retract", "in_place")
SLOW_RATES = ("2mbit", "20mbit")


@dataclass(frozen=True)
class Event:
    """``kind`` is done to ``target`` (a worker, or ``link``) at ``at_s`` seconds and undone ``lasts_s`` later.

    detail: the mode of a pause, also of one in which weights are updated; the rate of a slow link.
    """

    at_s: float
    kind: str
    target: str
    lasts_s: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        detail = f" {self.detail}" if self.detail else ""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.1f} s  {self.kind}{detail} {self.target}{lasts}"


@dataclass(frozen=True)
class Shape:
    """Workers of each role; whether there is a link of one's own between them, which can be cut; and what is left out.

    out_s: seconds that a worker is stopped or paused, or the link is cut or slow; dead_s: until a killed one is started
    again. Both from and to.
    """

    prefill: int = 2
    decode: int = 2
    link: bool = True
    without: frozenset[str] = frozenset()
    out_s: tuple[float, float] = (1.0, 8.0)
    dead_s: tuple[float, float] = (0.0, 5.0)
    restart_s: float = RESTART_S

    def workers(self, role: str) -> list[str]:
        return [f"{role}-{i}" for i in range(getattr(self, role))]

    def deck(self) -> list[tuple[str, str, str]]:
        """One of everything that can be done: kind, role (or ``link``), detail."""
        cards = []
        for role in ("prefill", "decode"):
            cards += [(kind, role, "") for kind in ("kill", "stop", "flush", "weights")]
            cards += [("pause", role, mode) for mode in PAUSE_MODES]
            # As training loops do it, in a pause.
            cards += [("weights", role, mode) for mode in PAUSE_MODES[1:]]
        if self.link:
            cards += [("cut", "link", ""), *(("slow", "link", rate) for rate in SLOW_RATES)]
        return [card for card in cards if card[0] not in self.without]


def events(seed: int, shape: Shape) -> Iterator[Event]:
    """Events without end. All kinds come once before any comes again, and each worker of a role before another twice.

    Nobody is dealt two at a time, at most one worker of each role is out at a time, and at most one is dead. So kills
    are what there is least time for: one comes as soon as it may.
    """
    pick = random.Random(f"chaos/{seed}")
    # Until when the worker, its role, and the one that is dead are out.
    busy: dict[str, float] = {}
    now = 0.0
    deck: list[tuple[str, str, str]] = []
    # How often each worker has been dealt each kind.
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    if not shape.deck():
        return
    while True:
        now += pick.uniform(*PAUSE_S)
        if not deck:
            deck = shape.deck()
            pick.shuffle(deck)
        may = [card for card in deck if _may(card, now, busy, shape) and _free(card, now, busy, times, shape)]
        card = next((card for card in may if card[0] == "kill"), may[0] if may else None)
        if card is None:
            continue
        deck.remove(card)
        kind, role, detail = card
        target = pick.choice(_free(card, now, busy, times, shape))
        times[kind, target] += 1
        lasts = 0.0
        if kind == "kill":
            lasts = round(pick.uniform(*shape.dead_s), 1)
        elif kind in ("stop", "pause", "cut", "slow"):
            lasts = round(pick.uniform(*shape.out_s), 1)
        until = now + lasts + (shape.restart_s if kind == "kill" else 0.0)
        busy[target] = until
        if kind not in ("flush", "weights"):
            busy[role] = until
        if kind == "kill":
            busy["dead"] = until
        yield Event(round(now, 1), kind, target, lasts, detail)


def _may(card: tuple[str, str, str], now: float, busy: dict[str, float], shape: Shape) -> bool:
    kind, role, _ = card
    if role == "link":
        return busy.get("link", 0.0) <= now
    if kind == "kill" and busy.get("dead", 0.0) > now:
        return False
    if kind not in ("flush", "weights") and busy.get(role, 0.0) > now:
        return False
    return True


def _free(
    card: tuple[str, str, str], now: float, busy: dict[str, float], times: Mapping[tuple[str, str], int], shape: Shape
) -> list[str]:
    """Those whose turn it is, and that are there."""
    kind, role, _ = card
    targets = ["link"] if role == "link" else shape.workers(role)
    fewest = min(times[kind, target] for target in targets)
    return [target for target in targets if times[kind, target] == fewest and busy.get(target, 0.0) <= now]


@dataclass(frozen=True)
class Manner:
    """How a client behaves. ``kind``: ``plain`` waits for the whole answer; ``stream`` reads it as it comes; ``abort``
    goes away after ``after_s`` seconds; ``slow`` reads a stream with a nap of ``nap_s`` before each piece."""

    kind: str
    after_s: float = 0.0
    nap_s: float = 0.0


CALM = Manner("plain")
# Of a hundred clients.
MANNERS = {"plain": 45, "stream": 30, "abort": 15, "slow": 10}


def manner(seed: int, number: int) -> Manner:
    """The manner of client ``number``."""
    pick = random.Random(f"manner/{seed}/{number}")
    kind = pick.choices(list(MANNERS), list(MANNERS.values()))[0]
    if kind == "abort":
        # Most are gone before the first token, some in the middle of the answer.
        return Manner(kind, after_s=round(pick.choice((0.02, 0.1, 0.3, 1.0)) * pick.uniform(0.5, 2), 3))
    if kind == "slow":
        return Manner(kind, nap_s=round(pick.uniform(0.05, 0.5), 3))
    return Manner(kind)
