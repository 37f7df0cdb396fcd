"""What is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_pd_radix.tools.bench.stats import percentile
from sim.workload import Request

if TYPE_CHECKING:
    from sim.decode import SimulatedDecode


@dataclass(eq=False)
class Record:
    """One request's life; times in seconds. tokens: of its answer so far. prefix_len: tokens that decode held of it."""

    request: Request
    arrived: float
    admitted: float | None = None
    first: float | None = None
    done: float | None = None
    tokens: int = 0
    prefix_len: int = 0
    sent_pages: int = 0

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.arrived

    @property
    def latency(self) -> float:
        assert self.done is not None
        return self.done - self.arrived

    @property
    def itl(self) -> float:
        """Mean seconds between its tokens."""
        assert self.first is not None and self.done is not None
        return (self.done - self.first) / (self.request.answer - 1)


@dataclass
class Gauges:
    """What the decode worker held, looked at before each stride, and means over time. series: (seconds, running)."""

    retracted: int = 0
    peak_running: int = 0
    peak_held: int = 0
    running_time: float = 0.0
    held_time: float = 0.0
    series: list[tuple[float, int]] = field(default_factory=list)
    at: float = 0.0
    _last: tuple[int, int] = (0, 0)

    def take(self, worker: SimulatedDecode) -> None:
        now = worker.clock.now
        running, held = self._last
        self.running_time += running * (now - self.at)
        self.held_time += held * (now - self.at)
        running = len(worker.running)
        held = (worker.size - worker.allocator.available_size() - worker.tree.evictable_size()) * worker.scale
        self.at, self._last = now, (running, held)
        self.peak_running = max(self.peak_running, running)
        self.peak_held = max(self.peak_held, held)
        self.series.append((now, running))


class Least:
    """Pages that had to be sent at least: what one worker that forgets nothing would have lacked.

    As ``tools/bench/least.py`` counts them. Here a slot's number stands for all before it too, and so the last of a
    page for the page.
    """

    def __init__(self, page: int):
        self.page = page
        self._held: set[int] = set()

    def asked(self, prompt: Sequence[int]) -> int:
        """Pages of ``prompt`` (slots) that it lacks; it has the full ones from here on."""
        full = prompt[self.page - 1 :: self.page]
        lacking = len(full) - len(self._held.intersection(full)) + (len(prompt) % self.page > 0)
        self._held.update(full)
        return lacking


def steady(series: Sequence[tuple[float, int]]) -> float:
    """The median of what runs in the middle half of the time: neither cold nor coming to its end."""
    end = series[-1][0] if series else 0.0
    return percentile([running for at, running in series if end / 4 <= at <= 3 * end / 4], 50)


def summary(records: Sequence[Record], least_pages: int, gauges: Gauges) -> dict[str, Any]:
    """The figures of a run. least_pages: pages that had to be sent."""
    assert records and all(r.done is not None for r in records)
    seconds = max(r.done or 0.0 for r in records)
    ttfts = [r.ttft for r in records]
    itls = [r.itl for r in records if r.request.answer > 1]
    sent = sum(r.sent_pages for r in records)
    return {
        "requests": len(records),
        "seconds": seconds,
        "requests_per_s": len(records) / seconds,
        "ttft_p50": percentile(ttfts, 50),
        "ttft_p99": percentile(ttfts, 99),
        "latency_p50": percentile([r.latency for r in records], 50),
        "itl_mean": sum(itls) / len(itls) if itls else 0.0,
        "pages_sent": sent,
        "pages_least": least_pages,
        "sent_over_least": sent / least_pages,
        "hit": sum(r.prefix_len for r in records) / sum(r.request.length for r in records),
        "peak_running": gauges.peak_running,
        "steady_running": steady(gauges.series),
        "mean_running": gauges.running_time / gauges.at,
        "mean_held": gauges.held_time / gauges.at,
        "peak_held": gauges.peak_held,
        "retracted": gauges.retracted,
    }
