"""Requests before their admission: their rooms and handshakes.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); in threads #34865
(open).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.decode_radix.commit import abort
from sglang.srt.disaggregation.decode_radix.phase import Phase

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.tier import Tier

# An enum lookup takes longer than its use, for each of hundreds of requests.
READY, WAITING, FAILED, BOOTSTRAPPING = (
    Phase.READY,
    KVPoll.WaitingForInput,
    KVPoll.Failed,
    KVPoll.Bootstrapping,
)


class LiveRooms(WeakValueDictionary[int, Any]):
    """The last live request of each bootstrap_room.

    KV, metadata and notifications are matched by room. The engine mixes two requests of one room:
    one of them deletes the records of the other, which ends the scheduler.
    """

    def refuse(self, req: Req, queues: Callable[[], Iterable[DecodeRequest]]) -> bool:
        """Abort ``req`` if a request in ``queues`` has its room; returns whether it was aborted.

        Searches the queues only if the room is known: with thousands of requests it takes 1 ms.
        """
        known = self.get(req.bootstrap_room)
        if known is None or not any(dr is known for dr in queues()):
            return False
        message = (
            f"bootstrap_room {req.bootstrap_room} of request {req.rid} belongs to a request that "
            "is still being served. With PD disaggregation each request needs a room of its own."
        )
        abort(req, message, HTTPStatus.BAD_REQUEST)
        known.is_doubled = True
        return True


def fail_unreached(pending: Iterable[DecodeRequest], manager: Any) -> None:
    """Fail requests of ``pending`` whose prefill is lost, incompatible or unresponsive."""
    waited_for: set[str] = set()
    for decode_req in pending:
        receiver = decode_req.kv_receiver
        if receiver.bootstrap_addr in waited_for:
            # An older request still waits for this prefill, as do perhaps thousands.
            continue
        reason = manager.why_unreached(receiver.bootstrap_addr, receiver.made_at)
        if reason is None:
            waited_for.add(receiver.bootstrap_addr)
        else:
            decode_req.mark_failed(reason)


def poll_handshake(decode_req: DecodeRequest, tier: Tier) -> int:
    """The request's poll; Bootstrapping while ``tier`` still fetches its prefix."""
    poll = decode_req.poll()
    if decode_req.phase is READY or poll != WAITING or tier.is_done(decode_req.req.rid):
        return poll
    return int(KVPoll.Bootstrapping)


def take_polls(window: Sequence[DecodeRequest], polls: Sequence[int]) -> int:
    """Apply the reduced polls to ``window``. Returns how many requests failed by them."""
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
            decode_req.mark_failed("prefill says that it has sent what it has not been asked for")
    return failed


def _fail(decode_req: DecodeRequest) -> bool:
    """Abort a request before its admission; False if it was aborted already."""
    if decode_req.is_aborted:
        return False
    decode_req.abort("handshake")
    if isinstance(decode_req.kv_receiver, CommonKVReceiver):
        # Else prefill would wait forever for this request's message.
        decode_req.cancel()
    return True
