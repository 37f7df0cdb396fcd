"""Which of the requests that wait on a decode worker can have their first token in time, and who goes first then.

A worker that is asked for more than it can do has a queue. In the order of arrival all in it are as late as each other,
and soon nobody is in time. With a target for TTFT, who is late already lets those pass that are not, but for every
`EVERY`-th admission. Among the late ones, as among the others, the order is that of admission with its bound, so each
of them moves up and none waits for ever.

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

# Of so many admissions while somebody is late, one is of those that are.
EVERY = 4
# Between its admission and its first token a request is taken to take no longer than this part of the last ones did:
# more where many prompts are long would make all late, and less would admit most of them just too late.
RECENT, PART = 64, 0.75
# Steps of a blocked queue between two looks at it: what goes next may have become late meanwhile, and another, which
# fits, is not.
LATE_INTERVAL = 4
# Priorities of which is kept whose turn it is; clients choose them.
PRIORITIES = 4096


class TtftTarget:
    """The target of one rank, and until which arrival those that wait are late.

    It is one of what ranks agree on (`Ranks.agree`): the first one's clock decides, as the number of the first arrival
    that is not late.
    """

    width = 1

    def __init__(self, target_s: float, counters: TargetMetrics | None = None):
        self.target_s, self._counters = target_s, counters
        # Those that wait and are not late by this rank's clock: when they came, by their numbers, which rise.
        self._in_time: OrderedDict[int, float] = OrderedDict()
        self._first_in_time = 0
        self._took: deque[float] = deque(maxlen=RECENT)
        self._takes_s = 0.0
        # What all ranks go by: arrivals below are late, in this step and from the next one on.
        self.late_before = self._agreed = 0
        # Of each priority, admissions since the last of a request that was late, while any is.
        self._since_late: dict[int, int] = {}
        self.late_requests = 0
        # Whether there is one rank: its figures apply to the order of their own step.
        self.alone = False

    @classmethod
    def of(cls, server_args: Any) -> TtftTarget | None:
        """Of the options of a decode worker; None where they have no target."""
        given = server_args.disaggregation_decode_ttft_target
        return None if given is None else cls(ttft_option(given).target_ms / 1000, TargetMetrics.get(server_args))

    # ---- what happens ----

    def joined(self, arrival: int) -> None:
        """A request came, as number ``arrival``."""
        self._in_time[arrival] = time.monotonic()

    def is_late(self, arrival: int) -> bool:
        """Whether the first token of a request that waits cannot come in time any more."""
        return arrival < self.late_before

    def since_late(self, priority: int) -> int:
        """Admissions of requests of that priority since the last one of a late one, at most `EVERY`."""
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
        """A request waits no longer, whether it was admitted or not."""
        self._in_time.pop(arrival, None)

    def arrived(self, seconds: float) -> None:
        """The first token of a request came so many seconds after its admission."""
        self._took.append(seconds)
        self._takes_s = sorted(self._took)[int(PART * (len(self._took) - 1))]

    # ---- what ranks agree on ----

    def own(self) -> list[int]:
        """The first arrival that is not late by this rank's clock."""
        since = time.monotonic() - max(0.0, self.target_s - self._takes_s)
        while self._in_time and (first := next(iter(self._in_time.items())))[1] < since:
            self._in_time.popitem(last=False)
            self._first_in_time = first[0] + 1
        return [self._first_in_time]

    def take(self, figures: list[int]) -> None:
        """This is what all ranks go by from the next step on: the order of this one may have been made."""
        (self._agreed,) = figures
        if self.alone:
            self.begin_step()

    def begin_step(self) -> None:
        """A step begins, or its order is still to be made."""
        self.late_before = self._agreed

    def nobody_is_late(self) -> None:
        """Of those that wait: the first that will be waits for its turn."""
        self._since_late.clear()

    # ---- what is told ----

    def state(self, late: int) -> dict[str, Any]:
        """What ``kv_pool`` says, milliseconds. late: how many wait that are."""
        return {
            "target_ms": 1000 * self.target_s,
            "takes_ms": round(1000 * self._takes_s, 1),
            "late": late,
            "late_requests": self.late_requests,
        }


def late_by_turns(
    in_time: Iterable[int], late: Sequence[int], since_late: int, follows: Callable[[int], bool]
) -> list[int]:
    """``in_time`` and then ``late``, of which one comes in every `EVERY`-th place.

    since_late: admissions since the last one of a late request. follows: whether one waits for the transfer of another:
    it takes no place, and what is kept for it meanwhile is not taken from those in time if it is late.
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
    """Those that can be in time in the first line, and who is late in the second."""

    def __init__(self, target: TtftTarget):
        self._target = target

    def begin_step(self, first: QueueEntry | None) -> None:
        """What has been agreed on counts from now on."""
        self._target.begin_step()
        if first is None or not self.is_second(first):
            self._target.nobody_is_late()

    def is_second(self, entry: QueueEntry) -> bool:
        """Whether it is late."""
        return self._target.is_late(entry.arrival)

    def split(self, entries: Sequence[QueueEntry]) -> tuple[Sequence[QueueEntry], Sequence[QueueEntry]]:
        """Those in time, and those that are late."""
        in_time, late = ([entry for entry in entries if self.is_second(entry) is which] for which in (False, True))
        return in_time, late

    def looked_at(
        self, ready: list[DecodeRequest], entry_of: Callable[[DecodeRequest], QueueEntry]
    ) -> list[DecodeRequest]:
        """Those in time first."""
        first_in_time = bisect_left(ready, self._target.late_before, key=lambda dr: entry_of(dr).arrival)
        return [*ready[first_in_time:], *ready[:first_in_time]]

    def mix(self, order: list[int], entries: Sequence[QueueEntry]) -> list[int]:
        """Of each priority as `late_by_turns`."""
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
    """The target in the core's events. queue: of transfers, which knows the scheduler."""

    def __init__(self, target: TtftTarget, queue: Any):
        self.target, self._queue = target, queue

    @classmethod
    def of(cls, queue: Any) -> TtftHooks | None:
        """Of a worker with a target."""
        queue.ttft_target = target = TtftTarget.of(queue.scheduler.server_args)
        if target is None:
            return None
        queue.policy.late = LateLines(target)
        return cls(target, queue)

    def measured(self) -> Measured:
        """Who is late by the first rank's clock."""
        return self.target

    def entered(self, entry: QueueEntry) -> None:
        """It is in time."""
        self.target.joined(entry.arrival)

    def admitted(self, entry: QueueEntry) -> None:
        """In time, or late."""
        self.target.admitted(entry.arrival, entry.priority)

    def left(self, entry: QueueEntry) -> None:
        """Its time does not count."""
        self.target.left(entry.arrival)

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        """Or does."""
        self.target.arrived(seconds)

    def state(self) -> dict[str, Any]:
        """See `TtftTarget.state`."""
        queue = self._queue.scheduler.disagg_decode_prealloc_queue.queue
        late = [self.target.is_late(dr.entry.arrival) for dr in queue if dr.entry is not None]
        return {"ttft": self.target.state(sum(late))}
