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
    # Whether decode computed what it lacked.
    local: bool = False

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
    """What one decode worker held, looked at before each stride, and its means over time."""

    retracted: int = 0
    decoded: int = 0
    peak_running: int = 0
    peak_held: int = 0
    peak_queued: int = 0
    running_time: float = 0.0
    held_time: float = 0.0
    moving_time: float = 0.0
    series: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    _at: float = 0.0
    _last: tuple[int, int, int] = (0, 0, 0)

    def take(self, worker: SimulatedDecode) -> None:
        running, moving, queued = len(worker.running), len(worker.transfer.queue), len(worker.queue.queue)
        held = (worker.size - worker.allocator.available_size() - worker.tree.evictable_size()) * worker.scale
        self.note(worker.clock.now, running, moving, queued, held)

    def note(self, now: float, running: int, moving: int, queued: int, held: int) -> None:
        """What is so from now on."""
        before, held_before, moving_before = self._last
        passed = now - self._at
        self.running_time += before * passed
        self.held_time += held_before * passed
        self.moving_time += moving_before * passed
        self._at, self._last = now, (running, held, moving)
        self.peak_running = max(self.peak_running, running)
        self.peak_held = max(self.peak_held, held)
        self.peak_queued = max(self.peak_queued, queued)
        self.series.append((now, running, moving, queued, held))


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

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """It has the slots of ``answer`` to ``prompt``, but for the last, whose last token has no KV."""
        self._held.update([*prompt, *answer[:-1]][self.page - 1 :: self.page])


# The last of a conversation's early turns, as in `pd-radix bench`.
EARLY = 10


def turns_of(done: Sequence[Record]) -> dict[str, float]:
    """TTFT of first, early and late turns, and the part of later turns that decode computed; {} without turns."""
    parts = {"first": [r for r in done if r.request.turn == 1]}
    parts |= {
        "early": [r for r in done if 1 < r.request.turn <= EARLY],
        "late": [r for r in done if r.request.turn > EARLY],
    }
    if not all(parts.values()):
        return {}
    found = {
        f"{name}_ttft_p{p}": percentile([r.ttft for r in part], p) for name, part in parts.items() for p in (50, 99)
    }
    later = parts["early"] + parts["late"]
    return found | {"without_prefill": sum(r.local for r in later) / len(later)}


def steady(series: Sequence[tuple[float, int, int, int, int]]) -> float:
    """The median of what runs in the middle half of the time: neither cold nor coming to its end."""
    end = series[-1][0] if series else 0.0
    return percentile([running for at, running, *_ in series if end / 4 <= at <= 3 * end / 4], 50)


def summary(records: Sequence[Record], least_pages: int, began: float, gauges: Sequence[Gauges]) -> dict[str, Any]:
    """The figures of the measured requests. least_pages: pages that had to be sent for them.

    Means and peaks of what is running, in transfer, queued and held are those of one decode worker.
    """
    done = [r for r in records if r.request.measured]
    assert done and all(r.done is not None for r in done)
    end = max(r.done or 0.0 for r in done)
    ttfts = [r.ttft for r in done]
    itls = [r.itl for r in done if r.request.answer > 1]
    span = end - began
    sent = sum(r.sent_pages for r in done)
    # Workers x seconds.
    looked = sum(g._at for g in gauges)
    return {
        "requests": len(done),
        "seconds": span,
        "requests_per_s": len(done) / span,
        "ttft_p50": percentile(ttfts, 50),
        "ttft_p99": percentile(ttfts, 99),
        "ttft_mean": sum(ttfts) / len(ttfts),
        "ttft_max": max(ttfts),
        "latency_p50": percentile([r.latency for r in done], 50),
        "itl_mean": sum(itls) / len(itls) if itls else 0.0,
        **turns_of(done),
        "itl_p50": percentile(itls, 50) if itls else 0.0,
        "itl_p90": percentile(itls, 90) if itls else 0.0,
        "itl_p99": percentile(itls, 99) if itls else 0.0,
        "ttft_p90": percentile(ttfts, 90),
        "pages_sent": sent,
        "pages_least": least_pages,
        "sent_over_least": sent / least_pages,
        "hit": sum(r.prefix_len for r in done) / sum(r.request.length for r in done),
        "peak_running": max(g.peak_running for g in gauges),
        "steady_running": steady(gauges[0].series),
        "mean_running": sum(g.running_time for g in gauges) / looked,
        "mean_moving": sum(g.moving_time for g in gauges) / looked,
        "peak_held": max(g.peak_held for g in gauges),
        "mean_held": sum(g.held_time for g in gauges) / looked,
        "retracted": sum(g.retracted for g in gauges),
        "peak_queued": max(g.peak_queued for g in gauges),
    }
