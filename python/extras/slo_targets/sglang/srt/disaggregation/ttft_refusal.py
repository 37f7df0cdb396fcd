"""Refuses requests whose first token cannot come within the target for TTFT, when they arrive.

By Little's law, the last of n waiting requests has its first token after n times the mean time between two first
tokens. Whatever limits these, prefill or this worker, it is measured where they arrive.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks, Measured
from sglang.srt.disaggregation.ttft_target import EVERY, TtftTarget
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.observability.target_metrics import TargetMetrics
from sglang.srt.server_args import ttft_option

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.policy import QueueEntry

__all__ = ["FINISH_REFUSED", "RefusalHooks", "TtftRefusal"]

# First tokens without which nobody is refused, and of which the mean time is taken.
ENOUGH, RECENT = 16, 64
# Of the target: a request is refused if it is expected to take longer. Of those expected at the target half are late.
PART = 0.75
# Times the requests that waited when it was measured: with more, first tokens may come faster. So nobody is refused
# while first tokens take less than half of the target.
REACH = 1.5
# Times the median: what one span adds for each of its first tokens is bounded by that, as a single long prompt or a
# pause of the worker says little of the requests behind it.
LONG = 4.0
# First tokens that come within this time have come in one step, and took what the first of them took.
ONE_STEP_S = 0.001


class FINISH_REFUSED(FINISH_ABORT):
    """The end of a request that is refused. retry_after: seconds after which it need not be."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable")
        self.retry_after = retry_after

    def to_json(self) -> dict[str, Any]:
        """Adds ``retry_after``."""
        return {**super().to_json(), "retry_after": self.retry_after}


class TtftRefusal:
    """The requests of one rank that wait for their first tokens, and how fast these come.

    It is one of what ranks agree on: the first one's clock decides. The time is measured over spans in which half of
    the requests that waited got their first tokens: so at least as many always waited, as they would before one that
    is refused. With less to do, first tokens come more slowly than they could.
    """

    width = 2

    def __init__(
        self,
        target: TtftTarget,
        counters: TargetMetrics | None = None,
        ready: Callable[[], int] = lambda: 0,
    ):
        """ready: requests whose KV is here, and that wait until fewer run; the same on all ranks."""
        self._target, self._counters, self._ready = target, counters, ready
        # Requests without memory, by arrival: the priority of those in time, and which are late. Those with memory.
        self._in_time: OrderedDict[int, int] = OrderedDict()
        self._by_priority: Counter[int] = Counter()
        self._late: set[int] = set()
        self._admitted: set[int] = set()
        # The span that is being measured: when it began, how many waited then, how many first tokens have come.
        self._began, self._waited, self._came = 0.0, 0, 0
        # The last spans, as seconds, first tokens, and how many waited.
        self._spans: deque[tuple[float, int, int]] = deque()
        # What all ranks go by: microseconds between two first tokens, and for how many this may be expected to hold.
        self._pace_us = self._reach = 0
        self.refused_requests = 0

    # ---- what happens ----

    def joined(self, arrival: int, priority: int) -> None:
        """A request came, as number ``arrival``. priority: lower goes first."""
        self._in_time[arrival] = priority
        self._by_priority[priority] += 1
        if not self._waited:
            self._begin_span()

    def admitted(self, arrival: int) -> None:
        """It has its memory."""
        self._leave_queue(arrival)
        self._admitted.add(arrival)

    def first_token(self) -> None:
        """The first token of an admitted request came; `left` follows."""
        self._came += 1

    def left(self, arrival: int) -> None:
        """A request waits for no first token any more."""
        self._leave_queue(arrival)
        self._admitted.discard(arrival)
        if 2 * self._came >= self._waited or not self._waiting():
            self._end_span()

    def _leave_queue(self, arrival: int) -> None:
        self._late.discard(arrival)
        priority = self._in_time.pop(arrival, None)
        if priority is not None:
            self._by_priority[priority] -= 1
            if not self._by_priority[priority]:
                del self._by_priority[priority]

    def _waiting(self) -> int:
        return len(self._in_time) + len(self._late) + len(self._admitted)

    # ---- the time between two first tokens ----

    def _begin_span(self) -> None:
        waiting = self._waiting()
        self._began, self._waited, self._came = time.monotonic(), waiting and waiting + self._ready(), 0

    def _end_span(self) -> None:
        if self._came:
            span = time.monotonic() - self._began, self._came, self._waited
            if self._spans and span[0] < ONE_STEP_S:
                seconds, came, waited = self._spans.pop()
                span = seconds + span[0], came + span[1], waited
            # As long as less than half as many waited, first tokens may have come more slowly.
            self._spans = deque([*(one for one in self._spans if 2 * one[2] >= span[2]), span])
            while sum(came for _, came, _ in self._spans) - self._spans[0][1] >= RECENT:
                self._spans.popleft()
        self._begin_span()

    def own(self) -> list[int]:
        """Microseconds between two first tokens, and for how many requests; zeros while too few have come."""
        came = sum(one[1] for one in self._spans)
        if came < ENOUGH:
            return [0, 0]
        most = LONG * self._median_s(came)
        seconds = sum(min(one[0], one[1] * most) for one in self._spans)
        return [round(1e6 * seconds / came), round(REACH * self._spans[-1][2])]

    def _median_s(self, came: int) -> float:
        """Seconds between two first tokens: of at least half of the ``came`` tokens it is no more."""
        paces = sorted((one[0] / one[1], one[1]) for one in self._spans)
        behind = accumulate(tokens for _, tokens in paces)
        return next(pace for (pace, _), n in zip(paces, behind, strict=True) if 2 * n >= came)

    def take(self, figures: list[int]) -> None:
        """All ranks go by these."""
        self._pace_us, self._reach = figures

    # ---- the decision ----

    def expected_s(self, priority: int) -> float:
        """Seconds in which a request that comes now is expected to have its first token; 0 if nobody waits."""
        late_before = self._target.late_before
        while self._in_time and (first := next(iter(self._in_time))) < late_before:
            self._leave_queue(first)
            self._late.add(first)
        before = self._ready() + len(self._admitted)
        before += sum(n for other, n in self._by_priority.items() if other <= priority)
        if not before:
            return 0.0
        # One of the late ones has every fourth place.
        more = EVERY / (EVERY - 1) if self._late else 1.0
        return min(before + 1, self._reach) * self._pace_us / 1e6 * more

    def refuses(self, priority: int) -> FINISH_REFUSED | None:
        """How a request ends that comes now; None if it is served."""
        expected, target = self.expected_s(priority), self._target.target_s
        if expected <= PART * target:
            return None
        self.refused_requests += 1
        if self._counters is not None:
            self._counters.ttft_refused()
        seconds = max(1, math.ceil(expected - target))
        reason = (
            f"this worker is overloaded: a first token is expected in {expected:.1f} s, more than {PART:g} of the "
            f"target of {target:g} s"
        )
        return FINISH_REFUSED(reason, seconds)

    def state(self) -> dict[str, Any]:
        """What ``kv_pool`` says, milliseconds."""
        return {"first_token_every_ms": self._pace_us / 1000, "refused_requests": self.refused_requests}


class RefusalHooks(DecodeHooks):
    """The refusal in the core's events."""

    def __init__(self, refusal: TtftRefusal):
        self.refusal = refusal

    @classmethod
    def of(cls, queue: Any) -> RefusalHooks | None:
        """Of a worker that refuses; its queue of transfers knows the refusal too."""
        args, target = queue.scheduler.server_args, queue.ttft_target
        if target is None or not ttft_option(args.disaggregation_decode_ttft_target).refuses:
            return None
        ready = lambda: len(queue.scheduler.waiting_queue)  # noqa: E731
        queue.ttft_refusal = TtftRefusal(target, TargetMetrics.get(args), ready)
        return cls(queue.ttft_refusal)

    def measured(self) -> Measured:
        """The time between two first tokens."""
        return self.refusal

    def entered(self, entry: QueueEntry) -> None:
        """It waits."""
        self.refusal.joined(entry.arrival, entry.priority)

    def admitted(self, entry: QueueEntry) -> None:
        """It has its memory."""
        self.refusal.admitted(entry.arrival)

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        """Its first token is here."""
        self.refusal.first_token()

    def left(self, entry: QueueEntry) -> None:
        """It waits no longer."""
        self.refusal.left(entry.arrival)

    def state(self) -> dict[str, Any]:
        """See `TtftRefusal.state`."""
        return {"ttft_refusal": self.refusal.state()}
