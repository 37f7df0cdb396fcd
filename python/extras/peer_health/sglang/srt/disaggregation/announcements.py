"""Reports to prefills about requests that wait on decode before admission.

Upstream: none is known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING
from weakref import ref

from sglang.srt.disaggregation.common.conn import CommonKVReceiver

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest

# Reports per step; 20 us each.
ANNOUNCEMENTS = 16
# Seconds after which a report is repeated to prefill ranks whose queue was full: they may have been hung.
MISSED_AGAIN_S = 2.0


class Listener:
    """The reports due to one prefill.

    again_s: interval between two reports of one request, seconds.
    """

    def __init__(self, again_s: float):
        self.again_s = again_s
        # Requests not reported yet; and those of them whose handshake was not done at the attempt.
        self.new: deque[DecodeRequest] = deque()
        self.unreached: deque[DecodeRequest] = deque()
        # Time of the last report of each request, oldest first. Weak references: requests may end meanwhile, and must
        # not be kept alive.
        self.told: deque[tuple[float, ref[DecodeRequest]]] = deque()
        # By id, requests whose last report some ranks did not take: when, and which ranks.
        self.missed: dict[int, tuple[float, ref[DecodeRequest], list[dict]]] = {}

    def due_at(self) -> float:
        """When the next report is due, monotonic."""
        if self.new or self.unreached:
            return -math.inf
        again_at = self.told[0][0] + self.again_s if self.told else math.inf
        return min(again_at, self._missed_due_at())

    def _missed_due_at(self) -> float:
        if not self.missed:
            return math.inf
        return next(iter(self.missed.values()))[0] + min(MISSED_AGAIN_S, self.again_s / 2)

    def take(self, now: float, known: Container[int]) -> tuple[DecodeRequest, list[dict] | None] | None:
        """Remove and return the next request to report, and the ranks (None: all); None if nothing is due.

        known: ids of the waiting requests.
        """
        while self.new:
            if id(decode_req := self.new.popleft()) in known:
                return decode_req, None
        while self.told and self.told[0][0] + self.again_s < now:
            told = self.told.popleft()[1]()
            if told is not None and id(told) in known:
                return told, None
        while self._missed_due_at() < now:
            _, missed, ranks = self.missed.pop(next(iter(self.missed)))
            told = missed()
            if told is not None and id(told) in known:
                return told, ranks
        while self.unreached:
            # Last: these may fill every step.
            if id(decode_req := self.unreached.popleft()) in known:
                return decode_req, None
        return None

    def note(self, decode_req: DecodeRequest, now: float, ranks: list[dict] | None, missed: list[dict]) -> None:
        """A request was reported. ranks: to which, None for all. missed: those that did not take it."""
        if ranks is None:
            self.told.append((now, ref(decode_req)))
        # Moves it to the end.
        self.missed.pop(id(decode_req), None)
        if missed:
            self.missed[id(decode_req)] = now, ref(decode_req), missed


class Announcements:
    """Reports waiting requests to their prefills: soon after arrival, and again before prefill times out.

    Per step `ANNOUNCEMENTS` reports; more if steps are so long that repeats would otherwise take over half of their
    interval. Prefills take turns, so one with many reports or a short time-out does not delay others.
    """

    def __init__(self, again_s: float):
        """again_s: interval between two reports of a request, unless prefill's time-out needs a shorter one."""
        self.again_s = again_s
        # Requests added since the last step; and prefills by address, the next one first.
        self.unannounced: list[DecodeRequest] = []
        self.listeners: dict[str, Listener] = {}
        # When the next report is due; and the time of the last step.
        self.due_at, self.stepped_at = math.inf, time.monotonic()

    def add(self, decode_req: DecodeRequest) -> None:
        """Report a request at the end of the step, if it still waits then."""
        self.unannounced.append(decode_req)

    def announce(self, waiting: Sequence[DecodeRequest]) -> None:
        """Send the reports due for ``waiting``."""
        now = time.monotonic()
        step_s, self.stepped_at = now - self.stepped_at, now
        if not self.unannounced and now <= self.due_at:
            return
        self._sort_in()
        known = {id(dr) for dr in waiting}
        turns = deque(addr for addr, listener in self.listeners.items() if listener.due_at() < now)
        due = 2 * len(known) * step_s / min((one.again_s for one in self.listeners.values()), default=self.again_s)
        sent, tried, unreached = 0, 0, []
        while turns and (sent < ANNOUNCEMENTS or tried < due):
            addr = turns.popleft()
            listener = self.listeners[addr]
            taken = listener.take(now, known)
            if taken is None:
                continue
            decode_req, ranks = taken
            tried += 1
            turns.append(addr)
            # In the next step it comes after prefills that had no turn in this one.
            self.listeners[addr] = self.listeners.pop(addr)
            sent += (told := self._tell(listener, decode_req, now, ranks)) or 1
            if not told:
                unreached.append((listener, decode_req))
        for listener, decode_req in unreached:
            listener.unreached.append(decode_req)
        dues = {addr: listener.due_at() for addr, listener in self.listeners.items()}
        self.listeners = {addr: self.listeners[addr] for addr, due_at in dues.items() if due_at < math.inf}
        self.due_at = min(dues.values(), default=math.inf)

    def _sort_in(self) -> None:
        for decode_req in self.unannounced:
            if isinstance(decode_req.kv_receiver, CommonKVReceiver):
                addr = decode_req.kv_receiver.bootstrap_addr
                self.listeners.setdefault(addr, Listener(self.again_s)).new.append(decode_req)
        self.unannounced.clear()

    def _tell(self, listener: Listener, decode_req: DecodeRequest, now: float, ranks: list[dict] | None) -> int:
        """Report a request to its prefill or to ``ranks``. Returns the messages sent; 0 before the handshake."""
        receiver = decode_req.kv_receiver
        try:
            # Requests beyond the window are not polled.
            receiver.shake_hands()
            if receiver.bootstrap_infos is None:
                return 0
            missed = receiver.announce(ranks)
            waits_s = receiver.kv_mgr.prefills.of(receiver.bootstrap_addr).bootstrap_timeout
            listener.again_s = min(self.again_s, waits_s / 4 or self.again_s)
            listener.note(decode_req, now, ranks, missed)
            return len(ranks or receiver.bootstrap_infos) or 1
        except Exception as e:
            decode_req.mark_failed(e)
        return 1
