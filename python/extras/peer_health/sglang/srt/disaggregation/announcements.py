"""What prefills are told of the requests that wait here before their admission.

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

# Messages about requests that wait, in one step; 20 us each.
ANNOUNCEMENTS = 16
# Seconds after which those ranks of a prefill are told again that took no messages: they may have stood still.
MISSED_AGAIN_S = 2.0


class Listener:
    """What one prefill has still to be told of the requests that wait for it here.

    again_s: seconds after which it is told again of each.
    """

    def __init__(self, again_s: float):
        self.again_s = again_s
        # Those that it has not been told of, and those of them whose handshake was not done when that was tried.
        self.new: deque[DecodeRequest] = deque()
        self.unreached: deque[DecodeRequest] = deque()
        # When it was told of each of the others, the one of longest ago first. They may have ended since: what they
        # hold is not kept for this.
        self.told: deque[tuple[float, ref[DecodeRequest]]] = deque()
        # The same of those of which some ranks took no word, by id, and which ranks.
        self.missed: dict[int, tuple[float, ref[DecodeRequest], list[dict]]] = {}

    def due_at(self) -> float:
        """When it is to be told of the next one, by the monotonic clock."""
        if self.new or self.unreached:
            return -math.inf
        again_at = self.told[0][0] + self.again_s if self.told else math.inf
        return min(again_at, self._missed_due_at())

    def _missed_due_at(self) -> float:
        if not self.missed:
            return math.inf
        return next(iter(self.missed.values()))[0] + min(MISSED_AGAIN_S, self.again_s / 2)

    def take(self, now: float, known: Container[int]) -> tuple[DecodeRequest, list[dict] | None] | None:
        """The next one that it is to be told of, which leaves the book, and which ranks; None if there is none now.

        known: the ids of the requests that wait. Of the ranks, None is all of them.
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
            # Behind those it has heard of: there may be as many as can be told of in a step, in each step.
            if id(decode_req := self.unreached.popleft()) in known:
                return decode_req, None
        return None

    def note(self, decode_req: DecodeRequest, now: float, ranks: list[dict] | None, missed: list[dict]) -> None:
        """It has been told of a request. ranks: which of its ranks were, None for all. missed: who did not take it."""
        if ranks is None:
            self.told.append((now, ref(decode_req)))
        # Behind the others.
        self.missed.pop(id(decode_req), None)
        if missed:
            self.missed[id(decode_req)] = now, ref(decode_req), missed


class Announcements:
    """Tells prefills of the requests that wait here: of each soon, and again before its prefill gives it up.

    In a step with ANNOUNCEMENTS messages, or as many more as tell of all in half of their time, however long steps are.
    Prefills take turns, so that one that has more to hear of, or less time, is at nobody else's expense.
    """

    def __init__(self, again_s: float):
        """again_s: after how long a prefill is told again of a request, if it does not give up before."""
        self.again_s = again_s
        # Requests that have come since the last step, and the prefills that others wait for, by address; the one whose
        # turn it is first.
        self.unannounced: list[DecodeRequest] = []
        self.listeners: dict[str, Listener] = {}
        # When the first of them is to be told something, and when the last step was.
        self.due_at, self.stepped_at = math.inf, time.monotonic()

    def add(self, decode_req: DecodeRequest) -> None:
        """Have prefill told of a request at the end of the step, if it waits then."""
        self.unannounced.append(decode_req)

    def announce(self, waiting: Sequence[DecodeRequest]) -> None:
        """Tell prefills of those of ``waiting`` that they have not heard of, or not for long."""
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
            # In the next step it comes after those that were not reached in this one.
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
        """Tell a prefill, or these of its ranks, of a request. Returns the messages; 0 if the handshake is not done."""
        receiver = decode_req.kv_receiver
        try:
            # Behind the window it is not polled.
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
