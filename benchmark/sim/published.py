"""What was published of the run that ``times.published`` replays, and where each of its constants comes from.

Source of all outcomes: sgl-project/sglang#19746. The first run is the one with which it was proposed, the second was
made of a later state of it and reported in its thread on 2026-04-14. The same deployment and workload: 20 prefixes of
50K tokens, 4.5K of their own, 1000 requests, 128 at a time; Qwen3-32B on 8 GPUs, 3 prefill workers and 1 decode worker
of 2 each. No bytes were published of either, and no percentile but the median.

An outcome to which a constant is *fitted* shows that the model can have it, and nothing else. The others are held out:
no constant was chosen by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# The figures of `figures.summary`, by mode.
Runs = Mapping[str, Mapping[str, Any]]
# What the published engine's flag off and on are here.
OFF, ON = "off", "today"


@dataclass(frozen=True)
class Outcome:
    """A figure that was published. published: of one run or two. read: the same of simulated runs.

    tolerance: how far beyond what was published, as a part of it. fits: the constant that was chosen by it; "": held
    out. same_as: the outcome that says the same in another unit; its gate, which knows both runs, is for both.
    """

    name: str
    needs: tuple[str, ...]
    published: tuple[float, ...]
    unit: str
    read: Callable[[Runs], float]
    tolerance: float
    why: str
    fits: str = ""
    same_as: str = ""

    def off_by(self, simulated: float) -> float:
        """How far ``simulated`` is beyond what was published, as a part of it, signed; 0 if it is between the runs."""
        low, high = min(self.published), max(self.published)
        return min(0.0, simulated / low - 1) + max(0.0, simulated / high - 1)

    def holds(self, simulated: float) -> bool:
        # No number is as published.
        return not math.isnan(simulated) and abs(self.off_by(simulated)) <= self.tolerance


def _of(mode: str, figure: str) -> Callable[[Runs], float]:
    return lambda runs: runs[mode][figure]


def _ratio(runs: Runs) -> float:
    return runs[ON]["requests_per_s"] / runs[OFF]["requests_per_s"]


CLOSE = "the two published runs are 0.7 to 3.1% apart"
# `--set times.poll=...`, from 0.0005 to 5: an idle worker's looks, of which there are only a few at the start.
COURSE = "and any change of the course of a simulated run, such as a constant that has no effect, moves it by up to"
OUTCOMES = (
    Outcome(
        "running at most, off",
        (OFF,),
        (37,),
        "",
        _of(OFF, "peak_running"),
        0.02,
        "a whole number: one request more or less is 2.7%",
        fits="pool",
    ),
    Outcome(
        "requests/s, off",
        (OFF,),
        (1.21, 1.2433),
        "1/s",
        _of(OFF, "requests_per_s"),
        0.05,
        CLOSE,
        fits="bandwidth",
    ),
    Outcome("ITL mean, off", (OFF,), (0.0656, 0.06517), "s", _of(OFF, "itl_mean"), 0.05, CLOSE, fits="step"),
    Outcome(
        "ITL mean, on",
        (ON,),
        (0.1306, 0.13463),
        "s",
        _of(ON, "itl_mean"),
        0.10,
        f"{CLOSE}, {COURSE} 11%",
        fits="step_token",
    ),
    Outcome(
        "TTFT p50, on",
        (ON,),
        (9.0, 6.99333),
        "s",
        _of(ON, "ttft_p50"),
        0.3,
        "a short queue, the difference of large numbers: the two published runs are 29% apart",
        fits="operations",
    ),
    Outcome("requests/s, on", (ON,), (1.59, 1.6075), "1/s", _of(ON, "requests_per_s"), 0.08, f"{CLOSE}, {COURSE} 6%"),
    Outcome(
        "requests/s, on / off",
        (OFF, ON),
        (1.59 / 1.21, 1.6075 / 1.2433),
        "x",
        _ratio,
        0.10,
        "of two figures that may be off by 5% and 8%: the root of the sum of the squares",
    ),
    Outcome("TTFT p50, off", (OFF,), (73.2, 71.9407), "s", _of(OFF, "ttft_p50"), 0.05, CLOSE),
    Outcome(
        "latency p50, off",
        (OFF,),
        (98.04979,),
        "s",
        _of(OFF, "latency_p50"),
        0.05,
        "published once; as the TTFT that is most of it",
    ),
    Outcome(
        "latency p50, on",
        (ON,),
        (70.66968,),
        "s",
        _of(ON, "latency_p50"),
        0.08,
        f"published once, {COURSE} 5%",
    ),
    Outcome(
        "running steadily, on",
        (ON,),
        (104, 126),
        "",
        _of(ON, "steady_running"),
        0.05,
        "a range that was read off a log",
    ),
    Outcome(
        "tokens answered/s, off",
        (OFF,),
        (441.87,),
        "1/s",
        lambda runs: 355.4 * runs[OFF]["requests_per_s"],
        0.0,
        "",
        same_as="requests/s, off",
    ),
    Outcome(
        "tokens answered/s, on",
        (ON,),
        (571.30,),
        "1/s",
        lambda runs: 355.396 * runs[ON]["requests_per_s"],
        0.0,
        "",
        same_as="requests/s, on",
    ),
    Outcome("duration, off", (OFF,), (804.31,), "s", _of(OFF, "seconds"), 0.0, "", same_as="requests/s, off"),
    Outcome("duration, on", (ON,), (622.08,), "s", _of(ON, "seconds"), 0.0, "", same_as="requests/s, on"),
)
