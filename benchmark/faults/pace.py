"""Whether a deployment is as fast as it was: short replays of the same requests before and after, and what they show.

A replay's rate is noisy, so a verdict needs several, and is given only where their own spread allows it. Of the
logarithms of the rates: the difference of the means, and its interval (Student's t, with the spread of both groups).
The pace is back if the interval lies above ``SLOW`` and the difference above ``MIDDLE``; it is lost if the interval
lies below 1 and the difference below ``MIDDLE``; otherwise there are more replays, and after the last the question is
open. `error_rates` says how often that is wrong: for any spread that is the same before and after, less than 5% each
way, since what the replays cannot tell is left open.

The spread says nothing of what was different all along: a neighbour that takes the cores before but not after. So each
replay also says which part of the machine's cores others took, and a verdict that this would favour is left open too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats

# Of the pace before: what must not pass, and where the line is drawn if the replays are exact.
SLOW, MIDDLE = 0.8, 0.9
# Replays before the storm; and after it, where the verdict is looked for after each of these.
BEFORE, LOOKS = 8, (4, 8, 12)
# Of each end of the interval at one look, so that all looks together stay below 5%.
ALPHA = 0.02
# Parts of the machine's cores that others may take more on one side.
OTHERS = 0.05


@dataclass(frozen=True)
class Replay:
    """rate: answers a second. others: the part of the machine's cores that other programs took meanwhile."""

    rate: float
    others: float = 0.0


@dataclass(frozen=True)
class Pace:
    """``verdict``: ``back``, ``lost`` or ``open``. ratio, low, high: of the pace before, and its interval. noise: the
    spread of a replay, as a part of its rate."""

    verdict: str
    ratio: float = 0.0
    low: float = 0.0
    high: float = math.inf
    noise: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f} of the pace before ({self.low:.2f} to {self.high:.2f}), of replays that differ by "
            f"{self.noise:.0%}"
        )


def judge(before: Sequence[Replay], after: Sequence[Replay]) -> Pace:
    """What the replays show. At least two on each side."""
    if not all(replay.rate > 0 for replay in [*before, *after]):
        return Pace("lost", why="a replay had no whole answer")
    x, y = (np.log([replay.rate for replay in side]) for side in (before, after))
    ratio, half, noise = _interval(x[None], y[None])
    found = float(ratio[0]), float(half[0]), float(noise[0])
    verdict, why = _VERDICTS[int(_decide(ratio, half)[0])], ""
    more_after = float(np.mean([r.others for r in after]) - np.mean([r.others for r in before]))
    if verdict == "open":
        why = "the replays differ too much from one another"
    elif (verdict == "back" and more_after < -OTHERS) or (verdict == "lost" and more_after > OTHERS):
        verdict = "open"
        taken = [f"{np.mean([r.others for r in side]):.0%}" for side in (before, after)]
        why = f"other programs took {taken[0]} of the cores before and {taken[1]} after"
    return Pace(verdict, *(math.exp(v) for v in (found[0], found[0] - found[1], found[0] + found[1])), found[2], why)


_VERDICTS = ("open", "back", "lost")


def _interval(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows are runs: the difference of the means, half of its interval, the spread of one replay; logarithms."""
    m, n = x.shape[1], y.shape[1]
    noise = np.sqrt((x.var(axis=1) * m + y.var(axis=1) * n) / (m + n - 2))
    half = scipy.stats.t.ppf(1 - ALPHA, m + n - 2) * noise * math.sqrt(1 / m + 1 / n)
    return y.mean(axis=1) - x.mean(axis=1), half, noise


def _decide(ratio: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Indices of `_VERDICTS`."""
    back = (ratio - half > math.log(SLOW)) & (ratio >= math.log(MIDDLE))
    lost = (ratio + half < 0) & (ratio < math.log(MIDDLE))
    return np.where(back, 1, np.where(lost, 2, 0))


@functools.cache
def error_rates(noise: float, heavy: bool = False, runs: int = 20_000) -> dict[str, float]:
    """How often, with replays that differ by ``noise``, a pace of 0.80 is called back, one of 1 lost, and either open.

    By simulation of whole runs with all their looks. heavy: with outliers (Student's t with three degrees of freedom).
    """
    pick = np.random.default_rng(0)

    def drawn(count: int) -> np.ndarray:
        if heavy:
            return noise / math.sqrt(3) * pick.standard_t(3, (runs, count))
        return noise * pick.standard_normal((runs, count))

    found = {}
    for name, true in (("slow", SLOW), ("same", 1.0)):
        x, y = drawn(BEFORE), math.log(true) + drawn(LOOKS[-1])
        verdict = np.zeros(runs, int)
        for count in LOOKS:
            ratio, half, _ = _interval(x, y[:, :count])
            verdict = np.where(verdict == 0, _decide(ratio, half), verdict)
        found |= {f"{name} {word}": float(np.mean(verdict == i)) for i, word in enumerate(_VERDICTS)}
    return found


class Cores:
    """The part of the machine's cores that others took between two looks. ``own``: pids of our processes."""

    def __init__(self, own: Collection[int]) -> None:
        self._own = own
        self._before = self._look()

    def _look(self) -> tuple[dict[int, float], float, float]:
        """Seconds of processor that our own and all have used, and of the machine's cores that have passed."""
        tick = os.sysconf("SC_CLK_TCK")
        used = {}
        for pid in self._own:
            with contextlib.suppress(OSError, IndexError, ValueError):
                columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used[pid] = (int(columns[11]) + int(columns[12])) / tick
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, iowait, irq, softirq, steal = (int(column) / tick for column in columns)
        busy = user + nice + system + irq + softirq + steal
        return used, busy, busy + idle + iowait

    def others(self) -> float:
        """Since it was made. 0 where the kernel does not say."""
        (own_0, busy_0, all_0), (own_1, busy_1, all_1) = self._before, self._look()
        own = sum(used - own_0.get(pid, 0.0) for pid, used in own_1.items())
        return min(1.0, max(0.0, (busy_1 - busy_0 - own) / (all_1 - all_0))) if all_1 > all_0 else 0.0
