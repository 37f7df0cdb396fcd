"""Orders requests that wait on a decode worker by whether they can still meet the TTFT target.

Under overload, first come, first served makes every request late. With a TTFT target, requests that are late already
go behind the others, except for every `EVERY`-th admission. Within each group the order of admission and its bound
apply, so no request waits for ever.

Upstream: none is known.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks, Measured
from sglang.srt.observability.target_metrics import TargetMetrics
from sglang.srt.server_args import ttft_option

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry

__all__ = ["LATE_INTERVAL", "LateLines", "TtftHooks", "TtftTarget", "late_by_turns"]

# While requests are late, one admission in so many goes to a late one.
EVERY = 4
# Expected time from admission to first token: this quantile of so many recent requests. A higher one makes all late if
# many prompts are long; a lower one admits most just too late.
RECENT, PART = 64, 0.75
# Steps of a blocked queue between two looks: the next request may become late, and a later one may fit.
LATE_INTERVAL = 4
# Bound of the priorities in `_since_late`; clients choose them.
PRIORITIES = 4096


class TtftTarget:
    """The TTFT target of one rank, and the first arrival that is not late.

    Part of the reduction over ranks (`Ranks.agree`): rank 0's clock decides.
    """

    width = 1

    def __init__(self, target_s: float, counters: TargetMetrics | None = None):
        self.target_s, self._counters = target_s, counters
        # Arrival times of waiting requests that are not late by this rank's clock, by ascending arrival number.
        self._in_time: OrderedDict[int, float] = OrderedDict()
        self._first_in_time = 0
        self._took: deque[float] = deque(maxlen=RECENT)
        self._takes_s = 0.0
        # Arrivals below are late: in this step, and from the next step on.
        self.late_before = self._agreed = 0
        # By priority: admissions since the last late one, while any is late.
        self._since_late: dict[int, int] = {}
        self.late_requests = 0
        # Whether there is one rank: its figures apply to the order of their own step.
        self.alone = False

    @classmethod
    def of(cls, server_args: Any) -> TtftTarget | None:
        """None without a target."""
        given = server_args.disaggregation_decode_ttft_target
        return None if given is None else cls(ttft_option(given).target_ms / 1000, TargetMetrics.get(server_args))

    # ---- events ----

    def joined(self, arrival: int) -> None:
        """A request is queued. arrival: its number."""
        self._in_time[arrival] = time.monotonic()

    def is_late(self, arrival: int) -> bool:
        """Whether a waiting request can no longer meet the target."""
        return arrival < self.late_before

    def since_late(self, priority: int) -> int:
        """Admissions of that priority since the last late one, at most `EVERY`."""
        return self._since_late.get(priority, 0)

    def admitted(self, arrival: int, priority: int) -> None:
        """A request is admitted."""
        self.left(arrival)
        if not self.is_late(arrival):
            if len(self._since_late) >= PRIORITIES:
                self._since_late.clear()
            self._since_late[priority] = min(self.since_late(priority) + 1, EVERY)
            return
        self._since_late.pop(priority, None)
        self.late_requests += 1
        if self._counters is not None:
            self._counters.ttft_late()

    def left(self, arrival: int) -> None:
        """A request left the queue, admitted or not."""
        self._in_time.pop(arrival, None)

    def arrived(self, seconds: float) -> None:
        """A first token arrived. seconds: since admission."""
        self._took.append(seconds)
        self._takes_s = sorted(self._took)[int(PART * (len(self._took) - 1))]

    # ---- agreement of ranks ----

    def own(self) -> list[int]:
        """The first arrival that is not late by this rank's clock."""
        since = time.monotonic() - max(0.0, self.target_s - self._takes_s)
        while self._in_time and (first := next(iter(self._in_time.items())))[1] < since:
            self._in_time.popitem(last=False)
            self._first_in_time = first[0] + 1
        return [self._first_in_time]

    def take(self, figures: list[int]) -> None:
        """Take the agreed figure. It applies from the next step: this step's order may exist already."""
        (self._agreed,) = figures
        if self.alone:
            self.begin_step()

    def begin_step(self) -> None:
        """Apply the agreed figure; called before the step's order is made."""
        self.late_before = self._agreed

    def nobody_is_late(self) -> None:
        """No waiting request is late: the count restarts with the next late one."""
        self._since_late.clear()

    # ---- reports ----

    def state(self, late: int) -> dict[str, Any]:
        """For ``kv_pool``; times in milliseconds. late: number of late requests in the queue."""
        return {
            "target_ms": 1000 * self.target_s,
            "takes_ms": round(1000 * self._takes_s, 1),
            "late": late,
            "late_requests": self.late_requests,
        }


def late_by_turns(
    in_time: Iterable[int], late: Sequence[int], since_late: int, follows: Callable[[int], bool]
) -> list[int]:
    """``in_time``, then ``late``, except that every `EVERY`-th place goes to a late request.

    since_late: admissions since the last late one. follows: whether a request waits for another's transfer. Such a
    request takes no place; if it is late, memory kept for it is not taken from requests in time.
    """
    order: list[int] = []
    going = deque([one for one in late if not follows(one)])
    for one in in_time:
        if going and since_late >= EVERY - 1:
            order.append(going.popleft())
            since_late = 0
        order.append(one)
        since_late += not follows(one)
    placed = set(order)
    return [*order, *(one for one in late if one not in placed)]


class LateLines:
    """Two lines: requests in time, then late ones."""

    def __init__(self, target: TtftTarget):
        self._target = target

    def begin_step(self, first: QueueEntry | None) -> None:
        self._target.begin_step()
        if first is None or not self.is_second(first):
            self._target.nobody_is_late()

    def is_second(self, entry: QueueEntry) -> bool:
        """Whether it is late."""
        return self._target.is_late(entry.arrival)

    def split(self, entries: Sequence[QueueEntry]) -> tuple[Sequence[QueueEntry], Sequence[QueueEntry]]:
        """Requests in time, and late ones."""
        in_time, late = ([entry for entry in entries if self.is_second(entry) is which] for which in (False, True))
        return in_time, late

    def looked_at(self, ready: list[DecodeRequest]) -> list[DecodeRequest]:
        """Requests in time first."""
        first_in_time = bisect_left(ready, self._target.late_before, key=lambda dr: dr.entry.arrival)
        return [*ready[first_in_time:], *ready[:first_in_time]]

    def mix(self, order: list[int], entries: Sequence[QueueEntry]) -> list[int]:
        """Applies `late_by_turns` within each priority."""
        late = {i for i in order if self.is_second(entries[i])}
        if not late:
            return order

        def follows(i: int) -> bool:
            return getattr(entries[i], "coming", 0) > 0

        mixed: list[int] = []
        for priority, group in itertools.groupby(order, lambda i: entries[i].priority):
            same = [*group]
            parts = [i for i in same if i not in late], [i for i in same if i in late]
            mixed += late_by_turns(*parts, self._target.since_late(priority), follows)
        return mixed


class TtftHooks(DecodeHooks):
    """Connects `TtftTarget` to the core's events. queue: the transfer queue."""

    def __init__(self, target: TtftTarget, queue: Any):
        self.target, self._queue = target, queue

    @classmethod
    def of(cls, queue: Any) -> TtftHooks | None:
        """None without a target."""
        queue.ttft_target = target = TtftTarget.of(queue.scheduler.server_args)
        if target is None:
            return None
        queue.policy.late = LateLines(target)
        return cls(target, queue)

    def measured(self) -> Measured:
        return self.target

    def entered(self, entry: QueueEntry) -> None:
        self.target.joined(entry.arrival)

    def admitted(self, entry: QueueEntry) -> None:
        self.target.admitted(entry.arrival, entry.priority)

    def left(self, entry: QueueEntry) -> None:
        self.target.left(entry.arrival)

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        self.target.arrived(seconds)

    def state(self) -> dict[str, Any]:
        queue = self._queue.scheduler.disagg_decode_prealloc_queue.queue
        late = [self.target.is_late(dr.entry.arrival) for dr in queue]
        return {"ttft": self.target.state(sum(late))}
