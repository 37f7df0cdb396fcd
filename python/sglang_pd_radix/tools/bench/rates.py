"""Rates of requests at which a side is measured, and what was measured at each: given, or searched for by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_pd_radix.errors import PdRadixError

from .stats import percentile

if TYPE_CHECKING:
    from .goodput import Slo
    from .measure import Run

#: Parts of requests that are to keep both promises.
SHARES = (0.9, 0.99)
#: Requests of a measurement from which on it says anything of a part: of fewer, 99% would be all of them.
LEAST_REQUESTS_OF = {0.99: 100}
#: A rate is known when one that is by this part higher is too high. And the first that is tried, the least, the most.
PRECISION = 1.15
FIRST_RATE, LEAST_RATE, MOST_RATE = 8.0, 1 / 16, 1024.0
#: Measurements of a rate before it counts as too high, of which the best counts: other guests of a machine spoil some.
TRIES = 2
#: A measurement is not of its rate where a tenth of the requests were sent later than by this part of the promised
#: TTFT: the load generator was too slow, or had no processor. If it is late but once, a crowd comes, which is harder.
LATE = 0.1


def parse_rates(text: str, names: Collection[str]) -> list[tuple[str, float]]:
    """Of ``SIDE=RATE,...`` (requests per second), in that order. names: of the sides. Raises PdRadixError."""
    found = []
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        try:
            rate = float(value)
        except ValueError:
            rate = 0.0
        if name not in names or not LEAST_RATE <= rate <= MOST_RATE:
            raise PdRadixError(
                f"--slo-rates {text}: {part} is no SIDE=RATE with one of the sides {', '.join(sorted(names))} "
                f"and {LEAST_RATE:g} to {MOST_RATE:g} requests per second"
            )
        found.append((name, rate))
    return found


@dataclass(frozen=True)
class Trial:
    """One measurement of a side.

    rate: at which requests were to come, per second. kept: the part that kept both promises. late_p90_s: by which they
    were sent late, seconds. on_time: whether that is little enough to be of that rate.
    """

    rate: float
    requests: int
    kept: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    itl_mean_s: float
    itl_p90_s: float
    late_p90_s: float = 0.0
    on_time: bool = True

    @property
    def kept_at_rate(self) -> float:
        """`kept`, of which nothing is known where requests came at another rate."""
        return self.kept if self.on_time else 0.0

    @property
    def good_per_s(self) -> float:
        """Requests within both promises, per second of the measurement."""
        return self.kept * self.requests_per_s

    @classmethod
    def of(cls, rate: float, run: Run, slo: Slo) -> Trial:
        late = percentile(run.late_s, 90) if run.late_s else 0.0
        pairs = list(zip(run.ttft_s, run.tpot_s, strict=True))
        return cls(
            rate,
            len(pairs),
            sum(slo.kept(ttft, itl) for ttft, itl in pairs) / len(pairs),
            run.figures["requests_per_s"],
            percentile(run.ttft_s, 50),
            percentile(run.ttft_s, 90),
            sum(run.tpot_s) / len(pairs),
            percentile(run.tpot_s, 90),
            late,
            late <= LATE * slo.ttft_s,
        )


class Search:
    """The greatest rates of one side at which each of ``shares`` is kept, from what has been measured so far.

    most: the greatest rate that is tried, per second. failed_at: the one at which a request failed, which ended it.
    """

    def __init__(
        self,
        shares: Sequence[float] = SHARES,
        precision: float = PRECISION,
        tries: int = TRIES,
        most: float = MOST_RATE,
    ) -> None:
        self.shares, self.precision, self.tries, self.most = shares, precision, tries, most
        self.trials: list[Trial] = []
        self.failed_at = math.inf

    def told(self, trial: Trial) -> None:
        self.trials.append(trial)

    def best(self, share: float) -> tuple[float, float]:
        """The greatest rate known to be kept below the least that is known not to be, and that; 0 and infinity."""
        rates = self.rates()
        # What is not even the least share is no greater one, of however few requests.
        least = {rate: share if _enough(trial, share) else min(self.shares) for rate, trial in rates.items()}
        wrong = min((rate for rate, trial in rates.items() if trial.kept_at_rate < least[rate]), default=math.inf)
        wrong = min(wrong, self.failed_at)
        right = max((rate for rate, trial in rates.items() if rate < wrong and _enough(trial, share)), default=0.0)
        return right, wrong

    def unknown(self, share: float) -> float:
        """The greatest rate below the least that is not kept of which too few requests came to say more; or 0."""
        _, wrong = self.best(share)
        few = (rate for rate, trial in self.rates().items() if rate < wrong and not _enough(trial, share))
        return max(few, default=0.0)

    def rates(self) -> dict[float, Trial]:
        """The best measurement of each rate."""
        found: dict[float, Trial] = {}
        for trial in self.trials:
            if trial.rate not in found or trial.kept_at_rate > found[trial.rate].kept_at_rate:
                found[trial.rate] = trial
        return found

    def next_rate(self) -> float | None:
        """What to measure next; None when all is known."""
        for share in self.shares:
            right, wrong = self.best(share)
            if wrong in (rates := self.rates()) and not _enough(rates[wrong], share):
                continue  # Of lower rates fewer requests come. That it is not kept was tried for the least share.
            right = max(right, self.unknown(share))
            if sum(trial.rate == wrong for trial in self.trials) in range(1, self.tries):
                return wrong
            if not right:
                rate = min(FIRST_RATE, self.most) if wrong == math.inf else wrong / 2
            elif right == self.most:
                continue
            elif wrong == math.inf:
                rate = min(2 * right, self.most)
            elif wrong / right > self.precision:
                rate = math.sqrt(right * wrong)
            else:
                continue
            if LEAST_RATE <= rate <= self.most:
                return rate
        return None

    def goodput(self, share: float) -> Trial | None:
        """The measurement at the greatest rate; None where no rate is low enough."""
        right, _ = self.best(share)
        return self.rates().get(right)


def _enough(trial: Trial, share: float) -> bool:
    """Whether ``trial`` has the requests that it takes to say whether ``share`` is kept."""
    return trial.requests >= LEAST_REQUESTS_OF.get(share, 0)


def search_all(searches: Mapping[str, Search], measure: Callable[[str, float], Trial | None]) -> None:
    """Find the rates of each side; the sides take turns. One that could not be measured is left at what is known."""
    left = list(searches)
    while left:
        for name in list(left):
            rate = searches[name].next_rate()
            trial = None if rate is None else measure(name, rate)
            if trial is None:
                left.remove(name)
            else:
                searches[name].told(trial)


def measure_given(
    searches: Mapping[str, Search],
    rates: Sequence[tuple[str, float]],
    measure: Callable[[str, float], Trial | None],
) -> None:
    """Measure ``rates``, in their order; a side of which a request fails has no more."""
    for name, rate in rates:
        trial = measure(name, rate)
        if trial is not None:
            searches[name].told(trial)
