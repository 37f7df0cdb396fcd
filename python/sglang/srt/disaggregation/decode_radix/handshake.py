"""Requests before their admission: their rooms and their handshakes.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); in threads #34865 (open).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.utils import prepare_abort

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.tier import Tier

__all__ = ["LiveRooms", "fail_unreached", "poll_handshake", "take_polls"]

logger = logging.getLogger(__name__)

# To get at a member of an enumeration takes longer than what is done with it, for each of hundreds of requests.
READY, WAITING, FAILED, BOOTSTRAPPING = Phase.READY, KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Bootstrapping


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
        known.is_doubled = True
        return True


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


def poll_handshake(decode_req: DecodeRequest, tier: Tier) -> int:
    """What its receiver says, but a request whose prefix ``tier`` still brings has not shaken hands yet."""
    poll = decode_req.poll()
    if decode_req.phase is READY or poll != WAITING or tier.is_done(decode_req.req.rid):
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
            decode_req.advance(READY)
            decode_req.req.time_stats.set_bootstrap_done_time()
        elif poll != BOOTSTRAPPING:
            decode_req.lose("prefill says that it has sent what it has not been asked for")
    return failed


def _fail(decode_req: DecodeRequest) -> bool:
    """Abort a request before its admission, unless it has been; returns whether that was done."""
    req = decode_req.req
    if decode_req.is_aborted:
        return False
    reason = decode_req.failure_reason()
    message = f"Decode handshake failed for request {req.rid} (bootstrap_room={req.bootstrap_room}){reason}"
    logger.error(message)
    prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    if isinstance(decode_req.kv_receiver, CommonKVReceiver):
        # Prefill would wait for this request's message for ever.
        decode_req.cancel()
    return True
