"""Requests whose prefill is gone or late: decode computes their prompts itself, however much of them it lacks.

Only where decode computes prompts at all, see local_prefill.py. They are computed after short remainders, in the same
slices, and only so many tokens of them wait at a time: what comes beyond fails with its prefill, or waits for it.

A request that prefill has been asked for starts over with memory of its own. What it had goes into quarantine, as that
of any failed request, until nobody writes there.

All ranks take over the same requests in the same step. Which have failed they know together; why, each knows for
itself, or does not. So that is agreed on, in a reduction of its own, in steps in which there is something to decide.

Upstream: none is known.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.computed_rooms import tell_prefill
from sglang.srt.disaggregation.decode_schedule import peer_drops
from sglang.srt.disaggregation.local_prefill import may_compute
from sglang.srt.disaggregation.local_steps import who_wait
from sglang.srt.disaggregation.no_prefill import NoPrefill, PrefillGone, is_taken_over
from sglang.srt.disaggregation.request_phase import Phase

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_prefix import KvTransferCounters
    from sglang.srt.disaggregation.local_prefill import LocalPrefills
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

__all__ = ["NoTakeovers", "Takeovers", "first_reason", "make_takeovers", "reason_of"]

# Tokens of taken over prompts that may wait to be computed, beside those of the request that lacks most.
MOST_QUEUED = 8192
# Several ranks look for late requests once in so many steps: only to look they have to agree.
LOOK_STEPS = 16
# What a rank knows of why a request has failed, or is to be taken over: its prefill is no reason; it knows none; it is.
NO, UNKNOWN, GONE = 0, 1, 2


def reason_of(error: Exception) -> str:
    """What is told of ``error``, with which a request has failed."""
    text = f"{type(error).__name__}: {error}"
    return PrefillGone(text) if isinstance(error, NotTaken) else text


def first_reason(known: str | None, new: str) -> str:
    """Which of two reasons a request has failed for. One that another way to compute it does not mend counts more."""
    if known is None or (isinstance(known, PrefillGone) and not isinstance(new, PrefillGone)):
        return new
    return known


class Taken(NamedTuple):
    """A request to take over: its place among those that were looked at, and how many tokens decode lacks of it, on
    the rank where that is most. late: its prefill is not gone."""

    place: int
    decode_req: DecodeRequest
    delta: int
    late: bool


class NoTakeovers:
    """Of a worker that computes no prompts."""

    def take_waiting(self, requests: Sequence[DecodeRequest], polls: Sequence[int]) -> Sequence[int]:
        """See `Takeovers`."""
        return polls

    def take_transfers(self, transfers: Sequence[DecodeRequest], polls: Sequence[int]) -> Collection[int]:
        """See `Takeovers`."""
        return ()


class Takeovers(NoTakeovers):
    """Finds the requests that decode takes over, and lets go of their prefills."""

    def __init__(
        self,
        local: LocalPrefills,
        group: dist.ProcessGroup,
        tells: bool,
        after_s: float | None,
        counters: KvTransferCounters,
    ):
        """tells: whether this rank tells prefills. after_s: seconds after which one is late; None: it never is."""
        self._local, self._group, self._several = local, group, dist.get_world_size(group) > 1
        self._tells, self._after_s, self._counters = tells, after_s, counters
        self._steps = {"queue": 0, "transfer": 0}
        # Where requests wait for their admission, what is done when some of them have been taken over, and how one
        # comes there that had been admitted.
        self.queue: Callable[[], Iterable[DecodeRequest]] = lambda: ()
        self.look_for_no_prefill: Callable[[], None] = lambda: None
        self.admit_again: Callable[[DecodeRequest, DecodeRequest], None] = lambda fresh, old: None
        # Whether requests decode, which would wait for a long step.
        self.others: Callable[[], bool] = lambda: False

    def take_waiting(self, requests: Sequence[DecodeRequest], polls: Sequence[int]) -> Sequence[int]:
        """Take over requests before their admission, of which no prefill has been asked for anything.

        polls: what all ranks have polled of each. Returns the same, but those go on as if they shook hands still.
        """
        taken = self._agree(requests, polls, "queue")
        if not taken:
            return polls
        polls = list(polls)
        for place, decode_req, delta, late in taken:
            self._let_go(decode_req, late)
            decode_req.kv_receiver, decode_req.error = NoPrefill(decode_req.req.bootstrap_room, delta), None
            # In the next step all ranks find that its handshake is done: what they have agreed on for this one does
            # not count with that. Whom it waits for is found anew then.
            decode_req.advance(Phase.HANDSHAKE)
            if decode_req.entry is not None:
                decode_req.entry.follow_nobody()
                decode_req.entry.prefill = None
            polls[place] = int(KVPoll.Bootstrapping)
        self.look_for_no_prefill()
        return polls

    def take_transfers(self, transfers: Sequence[DecodeRequest], polls: Sequence[int]) -> Collection[int]:
        """Take over requests that prefill has been asked for, or was to be: they begin again before their admission.

        Returns the ``id`` of each that has been. What is left of it is the memory that it held, for quarantine.
        """
        taken = self._agree(transfers, polls, "transfer")
        for _, decode_req, delta, late in taken:
            req = decode_req.req
            decode_req.req = copy.copy(req)
            self._let_go(decode_req, late)
            _forget_memory(req)
            fresh = type(decode_req)(req, NoPrefill(req.bootstrap_room, delta))
            self.admit_again(fresh, decode_req)
        return {id(one.decode_req) for one in taken}

    # ---- which ----

    def _agree(self, requests: Sequence[DecodeRequest], polls: Sequence[int], where: str) -> list[Taken]:
        looks = self._looks(where)
        if not looks and KVPoll.Failed not in polls:
            return []
        asked = [
            (place, dr, poll == KVPoll.Failed)
            for place, (dr, poll) in enumerate(zip(requests, polls, strict=False))
            if (looks or poll == KVPoll.Failed) and poll != KVPoll.Success and self._may_take(dr)
        ]
        if not asked:
            return []
        figures = [(self._known(dr, failed), _delta(dr)) for _, dr, failed in asked]
        taken: list[Taken] = []
        queued = self._queued()
        total, longest = sum(queued), max(queued, default=0)
        for (place, decode_req, failed), (least, most, delta) in zip(asked, self._reduce(figures), strict=True):
            if least > NO and most == GONE and total + delta - max(longest, delta) <= MOST_QUEUED:
                total, longest = total + delta, max(longest, delta)
                taken.append(Taken(place, decode_req, delta, late=not failed))
        return taken

    def _looks(self, where: str) -> bool:
        """Whether to look for late requests in this step."""
        if self._after_s is None:
            return False
        self._steps[where] += 1
        return not self._several or self._steps[where] % LOOK_STEPS == 0

    def _may_take(self, decode_req: DecodeRequest) -> bool:
        """Whether decode could compute a request at all; the same on all ranks."""
        req = decode_req.req
        if decode_req.phase is Phase.LOCAL or is_taken_over(decode_req) or req.finished_reason is not None:
            return False
        # Without slices the others would wait for all of it, and its step have more tokens than there is memory for.
        policy = self._local.policy
        most = policy.slice if self.others() else policy.step
        too_long = not self._local.slices and len(req.origin_input_ids) > most
        return not too_long and req.sampling_params.n == 1 and may_compute(req)

    def _known(self, decode_req: DecodeRequest, failed: bool) -> int:
        """What this rank knows: `NO`, `UNKNOWN` or `GONE`."""
        receiver = decode_req.kv_receiver
        if decode_req.error is not None:
            return GONE if isinstance(decode_req.error, PrefillGone) else NO
        if failed:
            try:
                lost = receiver.lost_prefill()
            except Exception as e:
                decode_req.lose(e)
                return NO
            return UNKNOWN if lost is None else GONE if lost else NO
        # Prefill is told, or its client would wait for a request that nobody asks for.
        return GONE if self._is_late(decode_req) and peer_drops(decode_req) else UNKNOWN

    def _is_late(self, decode_req: DecodeRequest) -> bool:
        """Whether its prefill has been waited for too long.

        Of one that is ready, it is decode that lets it wait; and of one that a storage or a server still brings a
        prefix for.
        """
        if self._after_s is None or decode_req.phase is Phase.READY:
            return False
        shakes_hands = decode_req.phase is Phase.HANDSHAKE
        if shakes_hands and decode_req.poll() == KVPoll.WaitingForInput:
            return False
        since = decode_req.kv_receiver.made_at if shakes_hands else decode_req.entry.admitted_at
        return time.monotonic() - since > self._after_s

    def _queued(self) -> list[int]:
        """Of each request that has been taken over, tokens that no step computes yet; the same on all ranks.

        Before its admission those that ranks have agreed on then, whatever the tree holds by now.
        """
        admitted = [one.left for one in self._local.waiting if not one.is_short]
        return [*admitted, *(dr.kv_receiver.delta for dr in self.queue() if is_taken_over(dr))]

    def _reduce(self, figures: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Of what each rank knows of each request and of its delta: the least, the most, and the longest delta."""
        reduced = torch.tensor([(known, -known, -delta) for known, delta in figures], dtype=torch.int64)
        if self._several:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=self._group)
        return [(least, -most, -delta) for least, most, delta in reduced.tolist()]

    # ---- how ----

    def _let_go(self, decode_req: DecodeRequest, late: bool) -> None:
        """Have prefill, if it is there, drop the request. late: it is, and has to answer its client as well."""
        self._counters.taken_over()
        receiver, room = decode_req.kv_receiver, decode_req.req.bootstrap_room
        state = "late" if late else "gone"
        logger.warning(
            "Request %s is computed here: its prefill %s is %s", decode_req.req.rid, receiver.bootstrap_addr, state
        )
        if late:
            receiver.tells_later = True
            if self._tells:
                tell_prefill(receiver.bootstrap_addr, room)
        if decode_req.phase in (Phase.HANDSHAKE, Phase.READY):
            decode_req.cancel()
        else:
            decode_req.fail()


def _delta(decode_req: DecodeRequest) -> int:
    """Tokens that tree and host memory lack of a prompt, on this rank.

    Either may evict some until its admission, and then more is computed than has been counted.
    """
    entry, load = decode_req.entry, decode_req.load
    held = 0 if load is None else load.end
    for watch in () if entry is None else (entry.watch, entry.host_watch):
        held = held if watch is None else max(held, watch.length)
    return max(1, len(decode_req.req.origin_input_ids) - held)


def _forget_memory(req: Req) -> None:
    """``req`` holds nothing, as before its admission; who has taken over what it held gives that back."""
    req.req_pool_idx, req.last_node, req.cache_protected_len = None, None, 0
    req.kv_allocated_len = req.kv_committed_len = 0
    req.decode_prefix_len = req.transfer_prefix_len = req.kv_generation = None
    req.host_prefix_len = req.load_start = req.from_storage = 0


def make_takeovers(queue: Any) -> NoTakeovers:
    """What takes over requests of ``queue``, in which they wait for their admission, and of its transfers."""
    local = queue.transfer_queue.local
    if local is None:
        return NoTakeovers()
    scheduler = queue.scheduler
    after_s = scheduler.server_args.disaggregation_decode_local_prefill_after
    takeovers = Takeovers(local, queue.gloo_group, scheduler.attn_tp_rank == 0, after_s, queue.counters)
    takeovers.queue = lambda: queue.queue
    takeovers.others = lambda: bool(who_wait(scheduler, local))

    def look_for_no_prefill() -> None:
        queue.pending_reqs = [decode_req for decode_req in queue.pending_reqs if not is_taken_over(decode_req)]

    def admit_again(fresh: DecodeRequest, old: DecodeRequest) -> None:
        policy = queue.policy
        policy.leave(old.entry)
        entry = queue.schedule.entry_of(fresh)
        if policy.ttft is not None:
            policy.ttft.left(entry.arrival)
        # In its turn: several are lost in one step, and they stand in the order of their admission.
        entry.arrival = old.entry.arrival
        insort(queue.queue, fresh, key=lambda dr: math.inf if dr.entry is None else dr.entry.arrival)

    takeovers.look_for_no_prefill, takeovers.admit_again = look_for_no_prefill, admit_again
    return takeovers
