"""Which of the requests that wait on a decode worker can have their first token in time, and who goes first then.

A worker that is asked for more than it can do has a queue. In the order of arrival all in it are as late as each other,
and soon nobody is in time. With a target for TTFT, who is late already lets those pass that are not, but for every
`EVERY`-th admission. Among the late ones, as among the others, the order is that of admission with its bound, so each
of them moves up and none waits for ever.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang.srt.disaggregation.decode_prefix import KvTransferCounters

__all__ = ["TtftTarget", "late_by_turns"]

# Of so many admissions while somebody is late, one is of those that are.
EVERY = 4
# Between its admission and its first token a request is taken to take no longer than this part of the last ones did:
# more where many prompts are long would make all late, and less would admit most of them just too late.
RECENT, PART = 64, 0.75
# Priorities of which is kept whose turn it is; clients choose them.
PRIORITIES = 4096


class TtftTarget:
    """The target of one rank, and until which arrival those that wait are late.

    It is one of what ranks agree on (`Ranks.agree`): the first one's clock decides, as the number of the first arrival
    that is not late.
    """

    width = 1

    def __init__(self, target_s: float, counters: KvTransferCounters | None = None):
        self._target_s, self._counters = target_s, counters
        # Those that wait and are not late by this rank's clock: when they came, by their numbers, which rise.
        self._in_time: OrderedDict[int, float] = OrderedDict()
        self._first_in_time = 0
        self._took: deque[float] = deque(maxlen=RECENT)
        self._takes_s = 0.0
        # What all ranks go by: arrivals below are late, in this step and from the next one on.
        self.late_before = self._agreed = 0
        # Of each priority, admissions since the last of a request that was late, while any is.
        self._since_late: dict[int, int] = {}
        # Of what the order depends on: it changes with these.
        self.admissions = self.late_requests = 0

    @classmethod
    def of(cls, server_args: Any) -> TtftTarget | None:
        """Of the options of a decode worker; None where they have no target."""
        target_ms = server_args.disaggregation_decode_ttft_target
        return None if target_ms is None else cls(target_ms / 1000, KvTransferCounters.get(server_args))

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
        self.admissions += 1
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
        since = time.monotonic() - max(0.0, self._target_s - self._takes_s)
        while self._in_time and (first := next(iter(self._in_time.items())))[1] < since:
            self._in_time.popitem(last=False)
            self._first_in_time = first[0] + 1
        return [self._first_in_time]

    def take(self, figures: list[int]) -> None:
        """This is what all ranks go by from the next step on: the order of this one may have been made."""
        (self._agreed,) = figures

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
            "target_ms": 1000 * self._target_s,
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
