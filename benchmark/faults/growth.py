"""Whether what a worker holds grows with the requests that it has served: a slope and its confidence, not a spare.

Of every life of a worker (a restart begins another), after its first requests (``WARM``): descriptors, threads and
memory over the requests served. The least of some samples in a row counts, as what requests under way hold comes and
goes. The slope is common to all lives of a role; each has a level of its own, which may rise at up to ``STEPS``
places, since pools of threads and connections are made once, when they are first needed; but a leak may come in lumps,
so all steps of a life together have a bound too, ``RISES``. The error of the slope counts that what is near in time is
alike, and how much the lives differ. What grows for certain by more than its bound in ``BOUNDS`` is a problem. Each
verdict has its resolution, the least growth that it would have found in 19 of 20 runs; where that is above ``GOALS``,
the run was too short to say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from .judge import SPARE_FDS, SPARE_THREADS
from .watch import Sample

# Requests served after which a life has what it pays once. Memory takes longer: the allocator keeps what it once had.
WARM = {"descriptors": 200, "threads": 200, "rss_kib": 500}
# Of a life: at most so many points, each the least of at least so many samples; and at least so many points.
POINTS, TOGETHER, LEAST = 40, 3, 6
# Rises of the level in a life: how many, and of at least which height (a lost descriptor is a rise of one).
STEPS = 3
HEIGHTS = {"descriptors": 3.0, "threads": 3.0, "rss_kib": 1024.0}
# All of them together: what pools may be, with which nobody asks for a slope.
RISES = {"descriptors": float(SPARE_FDS), "threads": float(SPARE_THREADS), "rss_kib": 48 * 1024.0}
# Standard errors: a problem has to be more than its bound by SURE, which 1 of 740 sound runs is by chance; what is
# that and 1.645 more is missed in 1 of 20.
SURE, MISSED = 3.0, 1.645
# Growth for each request that is nobody's worry, and the least that a verdict has to be able to find.
BOUNDS = {"descriptors": 1 / 2000, "threads": 1 / 2000, "rss_kib": 8.0}
GOALS = {"descriptors": 1 / 250, "threads": 1 / 250, "rss_kib": 24.0}


@dataclasses.dataclass(frozen=True)
class Growth:
    """``what`` of the workers of ``role`` grows by ``slope`` for each request that one serves, give or take ``error``
    (standard); ``served``: requests after the first ones, of all its lives; ``risen``: the sum of the steps of the
    life that has most in them."""

    role: str
    what: str
    slope: float
    error: float
    served: int
    risen: float = 0.0

    @property
    def resolution(self) -> float:
        return BOUNDS[self.what] + (SURE + MISSED) * self.error

    @property
    def grows(self) -> bool:
        return self.slope - SURE * self.error > BOUNDS[self.what]

    @property
    def judged(self) -> bool:
        return self.grows or self.resolution <= GOALS[self.what]

    def amount(self, slope: float) -> str:
        """A slope in words."""
        if self.what == "rss_kib":
            return f"{slope:.1f} KiB a request"
        if slope > 0.5:
            return f"{slope:.1f} a request"
        return f"one in {1 / slope:,.0f} requests" if slope > 0 else "none"

    def __str__(self) -> str:
        found = f"{self.amount(self.slope)}, and that is certain" if self.grows else "none that is certain"
        if not math.isfinite(self.error):
            return f"{_NAMES[self.what]} of {self.role}: not known"
        steps = f"; {self.height} in steps, in the life that has most" if self.risen else ""
        return (
            f"{_NAMES[self.what]} of {self.role}: {found}{steps}; {self.amount(self.resolution)} would have been found"
        )

    @property
    def height(self) -> str:
        """What it has risen by in steps, in words."""
        return f"{self.risen / 1024:.1f} MiB" if self.what == "rss_kib" else f"{self.risen:.0f}"


_NAMES = {"descriptors": "descriptors", "threads": "threads", "rss_kib": "memory"}


def problems(found: Sequence[Growth]) -> list[str]:
    """What grows for certain, and what has risen in steps by more than pools that are made once."""
    wrong = [
        f"{one.role}: {_NAMES[one.what]} grow with the requests served: {one.amount(one.slope)} "
        f"(at least {one.amount(one.slope - SURE * one.error)}), over {one.served} of them"
        for one in found
        if one.grows
    ]
    return wrong + [
        f"{one.role}: {_NAMES[one.what]} have risen by {one.height} in steps in the life of one worker, and what is "
        f"made once takes {dataclasses.replace(one, risen=RISES[one.what]).height} at the most"
        for one in found
        if one.risen > RISES[one.what]
    ]


def not_judged(found: Sequence[Growth]) -> list[str]:
    """What the run was too short for."""
    if not found:
        return ["growth of anything: no worker was looked at"]
    return [
        f"growth of {_NAMES[one.what]} of {one.role} by {one.amount(GOALS[one.what])}: {_longer(one)}"
        for one in found
        if not one.judged
    ]


def _longer(one: Growth) -> str:
    if not one.served or not math.isfinite(one.error):
        return "too few requests"
    # The error of a slope falls with the power of 3/2 of the length.
    room = (GOALS[one.what] - BOUNDS[one.what]) / (SURE + MISSED)
    return f"about {(one.error / room) ** (2 / 3):.1f} times as many requests would show it"


def judge(samples: Sequence[Sample]) -> list[Growth]:
    """One for each role and thing."""
    workers: dict[str, set[str]] = {}
    for one in samples:
        workers.setdefault(_role(one), set()).add(one.worker)
    found = []
    for role in sorted(workers):
        own = [one for one in samples if _role(one) == role]
        # All ask all; each serves its part.
        part = 1 / len(workers[role])
        for what in BOUNDS:
            lives = [_life(own, key, part, what) for key in sorted({(one.worker, one.life) for one in own})]
            lives = [life for life in lives if len(life) >= LEAST]
            served = round(sum(life[-1, 0] - life[0, 0] for life in lives))
            steps = [_steps(life, HEIGHTS[what]) for life in lives]
            slope, error = _slope(lives, steps)
            risen = max((_risen(life, at, slope) for life, at in zip(lives, steps, strict=True)), default=0.0)
            found.append(Growth(role, what, slope, error, served, risen))
    return found


def _role(sample: Sample) -> str:
    return sample.worker.rpartition("-")[0]


def _life(samples: Sequence[Sample], key: tuple[str, int], part: float, what: str) -> np.ndarray:
    """Points of one life once it is warm, in rows: requests served, and the least of ``what``."""
    own = [one for one in samples if (one.worker, one.life) == key]
    warm = [one for one in own if (one.asked - own[0].asked) * part >= WARM[what]]
    # Of few, each counts.
    together = max(TOGETHER if len(warm) >= 2 * LEAST * TOGETHER else 1, -(-len(warm) // POINTS))
    groups = [warm[i : i + together] for i in range(0, len(warm) - together + 1, together)]
    return np.array([[group[0].asked * part, min(getattr(one, what) for one in group)] for group in groups], float)


def _slope(lives: Sequence[np.ndarray], steps: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Slope common to all ``lives`` (rows of x and y), and its standard error; infinite where there is too little.

    steps: of each life.
    """
    # What is left beside a line and the steps of each life, of both columns.
    parts = [[_without(life[:, column], at) for column in (0, 1)] for life, at in zip(lives, steps, strict=True)]
    across = np.array([x @ x for x, _ in parts])
    points = sum(len(x) for x, _ in parts)
    free = points - (2 + STEPS) * len(parts)
    if not parts or not across.all() or free < LEAST / 2:
        return 0.0, math.inf
    slopes = np.array([x @ y for x, y in parts]) / across
    slope = float(slopes @ across / across.sum())
    rest = [y - slope * x for x, y in parts]
    squares = sum(float(r @ r) for r in rest)
    alike = sum(float(r[1:] @ r[:-1]) for r in rest) / squares if squares else 0.0
    # Levels taken from so few points hide some of the likeness.
    alike = min(0.9, max(0.0, alike + 2 * len(parts) / points))
    # What is counted in whole numbers is not known better than by a part of one.
    spread = max(math.sqrt(squares / free), 0.3)
    within = spread * math.sqrt((1 + alike) / (1 - alike) / across.sum())
    between = 0.0
    if len(parts) > 1:
        weights = across / across.sum()
        between = math.sqrt(float(weights**2 @ (slopes - slope) ** 2) * len(parts) / (len(parts) - 1))
    return slope, max(within, between)


def _risen(life: np.ndarray, steps: Sequence[int], slope: float) -> float:
    """By how much the level of ``life`` rises in all its ``steps``, beside a line of this slope."""
    levels = [float(np.mean(piece[:, 1] - slope * piece[:, 0])) for piece in np.split(life, sorted(steps))]
    return levels[-1] - levels[0]


def _without(values: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """What is left of ``values`` when each piece between ``steps`` has its mean taken away."""
    return np.concatenate([piece - piece.mean() for piece in np.split(values, sorted(steps))])


def _steps(life: np.ndarray, height: float) -> list[int]:
    """Where the level of ``life`` rises by ``height`` or more, at up to `STEPS` places, beside a line of one slope."""
    steps: list[int] = []
    while len(steps) < STEPS:
        best = (math.inf, 0, 0.0)
        for place in range(2, len(life) - 1):
            if all(abs(place - step) >= 2 for step in steps):
                x, y, jump = (_without(v, steps) for v in (*life.T, np.arange(len(life)) >= place))
                found, left, *_ = np.linalg.lstsq(np.column_stack([x, jump]), y, rcond=None)
                best = min(best, (float(left[0]) if len(left) else 0.0, place, float(found[1])))
        if best[2] < height:
            break
        steps.append(best[1])
    return steps
