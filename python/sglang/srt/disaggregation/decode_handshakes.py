"""Requests before their admission: their handshakes, and what prefills are told of them meanwhile.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); in threads #34865 (open).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.request_phase import Phase
from sglang.srt.disaggregation.utils import prepare_abort

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.prefix_loads import PrefixLoads
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["Announcements", "LiveRooms", "fail_unreached", "poll_handshake", "take_polls"]

logger = logging.getLogger(__name__)

# To get at a member of an enumeration takes longer than what is done with it, for each of hundreds of requests.
READY, WAITING, FAILED, BOOTSTRAPPING = Phase.READY, KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Bootstrapping
# Requests that prefills are told of in one step.
ANNOUNCEMENTS = 256


class LiveRooms(WeakValueDictionary[int, Any]):
    """The last request of each room, for as long as there is one.

    A room is what KV, metadata and notifications are told apart by. The engine lets two requests of one mix; one ends
    the books of the other, and the scheduler with them.
    """

    def refuse(self, req: Req, queues: Callable[[], Iterable[DecodeRequest]]) -> bool:
        """Abort ``req`` if another request of its room is in one of ``queues``; returns whether it has been.

        Only if its room is known are they looked through, which takes a millisecond where thousands wait.
        """
        known = self.get(req.bootstrap_room)
        if known is None or not any(dr is known for dr in queues()):
            return False
        message = (
            f"bootstrap_room {req.bootstrap_room} of request {req.rid} belongs to a request that is still being "
            "served. With PD disaggregation each request needs a room of its own."
        )
        logger.error(message)
        prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
        return True


class Announcements:
    """Tells prefills of the requests that wait here."""

    def __init__(self, again_s: float):
        """again_s: after how long they are told again of all that wait, if none that is told gives up before."""
        self.again_s = again_s
        # Requests that prefill has not been told of, and when all that wait were last looked at.
        self.unannounced: list[DecodeRequest] = []
        self.announced_at = time.monotonic()

    def add(self, decode_req: DecodeRequest) -> None:
        """Have prefill told of a request at the end of the step, if it waits then."""
        self.unannounced.append(decode_req)

    def announce(self, waiting: Sequence[DecodeRequest]) -> None:
        """Tell prefills of those of ``waiting`` that they do not know of."""
        now = time.monotonic()
        if now - self.announced_at > self.again_s:
            self.announced_at, self.unannounced = now, [*waiting]
        if not self.unannounced:
            return
        known, later = {id(dr) for dr in waiting}, []
        for decode_req in self.unannounced[:ANNOUNCEMENTS]:
            receiver = decode_req.kv_receiver
            if id(decode_req) not in known or not isinstance(receiver, CommonKVReceiver):
                continue
            try:
                # Behind the window it is not polled.
                receiver.shake_hands()
                if receiver.bootstrap_infos is None:
                    # The handshake is not done.
                    later.append(decode_req)
                else:
                    receiver.announce()
                    waits_s = receiver.kv_mgr.prefills.of(receiver.bootstrap_addr).bootstrap_timeout
                    self.again_s = min(self.again_s, waits_s / 4 or self.again_s)
            except Exception as e:
                decode_req.lose(e)
        self.unannounced = [*self.unannounced[ANNOUNCEMENTS:], *later]


def fail_unreached(pending: Iterable[DecodeRequest], manager: Any) -> None:
    """Fail those of ``pending`` whose prefill, by ``manager``, is gone, of no use or silent."""
    waits: set[str] = set()
    for decode_req in pending:
        receiver = decode_req.kv_receiver
        if receiver.bootstrap_addr in waits:
            # What an older one still waits for it does too; there may be thousands.
            continue
        reason = manager.why_unreached(receiver.bootstrap_addr, receiver.made_at)
        if reason is None:
            waits.add(receiver.bootstrap_addr)
        else:
            decode_req.lose(reason)


def poll_handshake(decode_req: DecodeRequest, loads: PrefixLoads) -> int:
    """What its receiver says, but a request whose prefix ``loads`` still brings has not shaken hands yet."""
    poll = decode_req.poll()
    if decode_req.phase is READY or poll != WAITING or loads.is_done(decode_req):
        return poll
    return int(KVPoll.Bootstrapping)


def take_polls(window: Sequence[DecodeRequest], polls: Sequence[int]) -> int:
    """Note for each of ``window`` what all ranks have polled. Returns how many have failed with that."""
    failed = 0
    for decode_req, poll in zip(window, polls, strict=True):
        if poll == WAITING and decode_req.phase is READY:
            continue
        if poll == FAILED:
            failed += _fail(decode_req)
        elif poll == WAITING:
            n = decode_req.req.sampling_params.n
            if n > 1:
                # Its samples would be requests of one room. Refused only now that its prefill can be told, which
                # would wait for it for ever.
                decode_req.kv_receiver.abort()
                failed += _fail(decode_req, f"n is {n}. With PD disaggregation n must be 1: send the request n times.")
            else:
                decode_req.advance(READY)
                decode_req.req.time_stats.set_bootstrap_done_time()
        elif poll != BOOTSTRAPPING:
            decode_req.lose("prefill says that it has sent what it has not been asked for")
    return failed


def _fail(decode_req: DecodeRequest, refusal: str | None = None) -> bool:
    """Abort a request before its admission, unless it has been; returns whether that was done.

    refusal: what is wrong with the request itself, if anything.
    """
    req = decode_req.req
    if decode_req.is_aborted:
        return False
    reason = decode_req.failure_reason()
    message = f"Decode handshake failed for request {req.rid} (bootstrap_room={req.bootstrap_room}){reason}"
    status = HTTPStatus.BAD_REQUEST if refusal else HTTPStatus.INTERNAL_SERVER_ERROR
    message = refusal or message
    logger.error(message)
    prepare_abort(req, message, status_code=status)
    if isinstance(decode_req.kv_receiver, CommonKVReceiver):
        # Prefill would wait for this request's message for ever.
        decode_req.cancel()
    return True
