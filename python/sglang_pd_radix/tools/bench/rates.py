"""Measured rates of a side: given, or searched for by bisection."""

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

#: Shares of requests that have to keep both limits.
SHARES = (0.9, 0.99)
#: Least requests of a measurement for a share: of fewer, 99% would be all.
LEAST_REQUESTS_OF = {0.99: 100}
#: Precision of a search, as a ratio. And the first, least and greatest rate tried.
PRECISION = 1.15
FIRST_RATE, LEAST_RATE, MOST_RATE = 8.0, 1 / 16, 1024.0
#: Measurements before a rate counts as too high; the best counts, since other guests of a machine disturb some.
TRIES = 2
#: A measurement is invalid if a tenth of its requests were sent later than by this part of the TTFT limit: the load
#: generator was too slow. A single delay makes a burst, which is harder for the side.
LATE = 0.1


def parse_rates(text: str, names: Collection[str]) -> list[tuple[str, float]]:
    """Parses ``SIDE=RATE,...`` (requests per second), in that order. names: of sides. Raises PdRadixError."""
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

    rate: intended, per second. kept: share that kept both limits; refused ones did not. Times are of the others.
    late_p90_s: send delay, seconds. on_time: whether that is small enough for the rate to hold.
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
    refused: int = 0

    @property
    def in_time_per_s(self) -> float:
        """Requests within both limits, per second of arrivals."""
        return self.rate * self.kept

    @property
    def kept_at_rate(self) -> float:
        """`kept`; unknown if requests were sent at another rate."""
        return self.kept if self.on_time else 0.0

    @classmethod
    def of(cls, rate: float, run: Run, slo: Slo) -> Trial:
        late = percentile(run.late_s, 90) if run.late_s else 0.0
        pairs = list(zip(run.ttft_s, run.tpot_s, strict=True))
        requests = len(pairs) + run.refused
        return cls(
            rate,
            requests,
            sum(slo.kept(ttft, itl) for ttft, itl in pairs) / requests,
            run.figures["requests_per_s"],
            percentile(run.ttft_s, 50),
            percentile(run.ttft_s, 90),
            sum(run.tpot_s) / len(pairs),
            percentile(run.tpot_s, 90),
            late,
            late <= LATE * slo.ttft_s,
            run.refused,
        )


class Search:
    """Search for the highest rates of one side that keep each of ``shares``.

    most: highest rate to try, per second. failed_at: rate of a failed request, which ends the search.
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
        """The highest kept rate below the lowest one that is not kept, and the latter; 0 and infinity if unknown."""
        rates = self.rates()
        # Below the least share it is also below greater ones, however few its requests.
        least = {rate: share if _enough(trial, share) else min(self.shares) for rate, trial in rates.items()}
        wrong = min((rate for rate, trial in rates.items() if trial.kept_at_rate < least[rate]), default=math.inf)
        wrong = min(wrong, self.failed_at)
        right = max((rate for rate, trial in rates.items() if rate < wrong and _enough(trial, share)), default=0.0)
        return right, wrong

    def unknown(self, share: float) -> float:
        """The highest rate below the lowest unkept one that had too few requests to judge; or 0."""
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
        """The rate to measure next; None if the search is complete."""
        for share in self.shares:
            right, wrong = self.best(share)
            if wrong in (rates := self.rates()) and not _enough(rates[wrong], share):
                continue  # Lower rates have fewer requests. The least share has covered this.
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
        """The measurement at the highest kept rate; None if there is none."""
        right, _ = self.best(share)
        return self.rates().get(right)


def _enough(trial: Trial, share: float) -> bool:
    """Whether ``trial`` has enough requests to judge ``share``."""
    return trial.requests >= LEAST_REQUESTS_OF.get(share, 0)


def search_all(searches: Mapping[str, Search], measure: Callable[[str, float], Trial | None]) -> None:
    """Search the rates of all sides in turns. A side that cannot be measured keeps its results so far."""
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
    """Measure ``rates`` in order; a side ends with its first failed request."""
    for name, rate in rates:
        trial = measure(name, rate)
        if trial is not None:
            searches[name].told(trial)
