"""Refuses requests on arrival if their first token is not expected within the TTFT target.

Little's law: the last of n waiting requests gets its first token after n times the mean interval between first tokens.
The interval is measured on decode, so it covers both bottlenecks: prefill and this worker.

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

# First tokens before any request is refused; and the number that the mean interval covers.
ENOUGH, RECENT = 16, 64
# A request is refused if its expected TTFT exceeds this part of the target: at the target itself half would be late.
PART = 0.75
# The measured interval holds for this multiple of the requests that waited then: with a longer queue first tokens may
# come faster. So no request is refused while first tokens take less than half of the target.
REACH = 1.5
# Bound of a span's interval, in medians: one long prompt or one pause says little about later requests.
LONG = 4.0
# Spans shorter than this belong to one step; they are merged into the span before.
ONE_STEP_S = 0.001


class FINISH_REFUSED(FINISH_ABORT):
    """The finish reason of a refused request. retry_after: seconds after which it would be accepted."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable")
        self.retry_after = retry_after

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "retry_after": self.retry_after}


class TtftRefusal:
    """The requests of one rank that wait for their first token, and the interval between first tokens.

    Part of the reduction over ranks: rank 0's clock decides. A span ends when a quarter of its waiting requests have
    their first token. So the queue was nearly as long throughout: with a shorter one first tokens come more slowly.
    """

    width = 2

    def __init__(
        self,
        target: TtftTarget,
        counters: TargetMetrics | None = None,
        ready: Callable[[], int] = lambda: 0,
    ):
        """ready: number of requests whose KV has arrived and that wait to run; equal on all ranks."""
        self._target, self._counters, self._ready = target, counters, ready
        # Requests without KV memory, by arrival: priorities of those in time, and the late ones. Those with memory.
        self._in_time: OrderedDict[int, int] = OrderedDict()
        self._by_priority: Counter[int] = Counter()
        self._late: set[int] = set()
        self._admitted: set[int] = set()
        # The current span: its start, the requests that waited then, and the first tokens since.
        self._began, self._waited, self._came = 0.0, 0, 0
        # Recent spans: seconds, first tokens, waiting requests.
        self._spans: deque[tuple[float, int, int]] = deque()
        # Agreed on by all ranks: microseconds between first tokens, and the queue length for which that holds.
        self._pace_us = self._reach = 0
        self.refused_requests = 0

    # ---- events ----

    def joined(self, arrival: int, priority: int) -> None:
        """A request is queued. arrival: its number. priority: lower goes first."""
        self._in_time[arrival] = priority
        self._by_priority[priority] += 1
        if not self._waited:
            self._begin_span()

    def admitted(self, arrival: int) -> None:
        """A request got its KV memory."""
        self._leave_queue(arrival)
        self._admitted.add(arrival)

    def first_token(self) -> None:
        """The first token of an admitted request arrived; a call of `left` follows."""
        self._came += 1

    def left(self, arrival: int) -> None:
        """A request no longer waits for its first token."""
        self._leave_queue(arrival)
        self._admitted.discard(arrival)
        if 4 * self._came >= self._waited or not self._waiting():
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

    # ---- interval between first tokens ----

    def _begin_span(self) -> None:
        waiting = self._waiting()
        self._began, self._waited, self._came = time.monotonic(), waiting and waiting + self._ready(), 0

    def _end_span(self) -> None:
        if self._came:
            span = time.monotonic() - self._began, self._came, self._waited
            if self._spans and span[0] < ONE_STEP_S:
                seconds, came, waited = self._spans.pop()
                span = seconds + span[0], came + span[1], waited
            # Spans with less than half as many waiting requests may have been slower for lack of work.
            self._spans = deque([*(one for one in self._spans if 2 * one[2] >= span[2]), span])
            while sum(came for _, came, _ in self._spans) - self._spans[0][1] >= RECENT:
                self._spans.popleft()
        self._begin_span()

    def own(self) -> list[int]:
        """Microseconds between first tokens, and the queue length for which that holds; zeros before `ENOUGH`."""
        came = sum(one[1] for one in self._spans)
        if came < ENOUGH:
            return [0, 0]
        most = LONG * self._median_s(came)
        seconds = sum(min(one[0], one[1] * most) for one in self._spans)
        return [round(1e6 * seconds / came), round(REACH * self._spans[-1][2])]

    def _median_s(self, came: int) -> float:
        """Median seconds between first tokens, weighted by tokens. came: tokens of all spans."""
        paces = sorted((one[0] / one[1], one[1]) for one in self._spans)
        behind = accumulate(tokens for _, tokens in paces)
        return next(pace for (pace, _), n in zip(paces, behind, strict=True) if 2 * n >= came)

    def take(self, figures: list[int]) -> None:
        """Take the figures that all ranks agreed on."""
        self._pace_us, self._reach = figures

    # ---- decision ----

    def expected_s(self, priority: int) -> float:
        """Expected TTFT of a request that arrives now, seconds; 0 if none waits before it."""
        late_before = self._target.late_before
        while self._in_time and (first := next(iter(self._in_time))) < late_before:
            self._leave_queue(first)
            self._late.add(first)
        before = self._ready() + len(self._admitted)
        before += sum(n for other, n in self._by_priority.items() if other <= priority)
        if not before:
            return 0.0
        # Every fourth admission goes to a late request.
        more = EVERY / (EVERY - 1) if self._late else 1.0
        return min(before + 1, self._reach) * self._pace_us / 1e6 * more

    def refuses(self, priority: int) -> FINISH_REFUSED | None:
        """The finish reason if a request that arrives now is refused; otherwise None."""
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
        """For ``kv_pool``; times in milliseconds."""
        return {"first_token_every_ms": self._pace_us / 1000, "refused_requests": self.refused_requests}


class RefusalHooks(DecodeHooks):
    """Connects `TtftRefusal` to the core's events."""

    def __init__(self, refusal: TtftRefusal):
        self.refusal = refusal

    @classmethod
    def of(cls, queue: Any) -> RefusalHooks | None:
        """None unless the worker refuses requests. queue: the transfer queue; it gets ``ttft_refusal``."""
        args, target = queue.scheduler.server_args, queue.ttft_target
        if target is None or not ttft_option(args.disaggregation_decode_ttft_target).refuses:
            return None
        ready = lambda: len(queue.scheduler.waiting_queue)  # noqa: E731
        queue.ttft_refusal = TtftRefusal(target, TargetMetrics.get(args), ready)
        return cls(queue.ttft_refusal)

    def measured(self) -> Measured:
        return self.refusal

    def entered(self, entry: QueueEntry) -> None:
        self.refusal.joined(entry.arrival, entry.priority)

    def admitted(self, entry: QueueEntry) -> None:
        self.refusal.admitted(entry.arrival)

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        self.refusal.first_token()

    def left(self, entry: QueueEntry) -> None:
        self.refusal.left(entry.arrival)

    def state(self) -> dict[str, Any]:
        return {"ttft_refusal": self.refusal.state()}
