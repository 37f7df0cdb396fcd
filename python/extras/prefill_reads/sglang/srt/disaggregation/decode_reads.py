"""KV that a prefill rank reads out of decode's pages before it computes a prompt, in place of computing it too.

Decode holds what it has decoded, and the short remainders that it has computed itself; no prefill has that. The prefix
of a request that it has asked for stays locked there until the request has been answered, so its pages can be read for
as long: see docs/decisions/reading-from-decode.md.

A request stays in the queue of those that have not begun while it is read for. What its sender polls says how far that
is, and the reduction of that queue, which all ranks enter anyway, has them begin and end a read in the same steps.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.wire import asks_for_nothing
from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.kv_weights import weights_of
from sglang.srt.disaggregation.nixl.page_reads import PageReads
from sglang.srt.disaggregation.offers import OFFER, Offer
from sglang.srt.disaggregation.utils import kv_to_page_indices
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_support import check_tree
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.read_support import READ_FLAG
from sglang.srt.observability.read_metrics import ReadCounters

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["DecodeRead", "DecodeReads", "agree_on_reads", "make_reads"]

logger = logging.getLogger(__name__)

# Seconds after which a request goes on without what is being read for it: in that time a prefill computes thousands of
# tokens itself. And for how long nothing more is read from there then.
LATE_S, AVOIDED_S = 2.0, 60.0
# Part of the pool that what is read, and not yet used, may take.
MOST_OF_POOL = 0.5
# What a sender polls: it may go on; decode offers its pages, or all of them have been read.
GO_ON, READABLE = KVPoll.WaitingForInput, KVPoll.Transferring


class Posted(Protocol):
    """A read that has been posted."""

    def state(self) -> str: ...


class Reader(Protocol):
    """Reads pages of a decode rank, by its name."""

    def fits(self, agent_name: str) -> bool: ...

    def begin_turn(self) -> None: ...

    def post(self, agent_name: str, theirs: Any, ours: Any) -> Posted | None: ...


class Phase(enum.Enum):
    """Where a read is."""

    # Decode has not asked, or not all ranks know of it.
    UNDECIDED = enum.auto()
    # It has its pages.
    READING = enum.auto()
    # What it brought is in the tree, or nothing was read, or nobody waits for it any more.
    OVER = enum.auto()


class Source(NamedTuple):
    """Where the KV of a prefix is. pages: int32, in prompt order; agent_name: of the decode rank that has them."""

    agent_name: str
    pages: np.ndarray


class Target(NamedTuple):
    """What a read has taken here. node: the end of what the tree had, locked. own: its slots, int64; slots: of the
    pages that are read, int64."""

    node: Any
    own: torch.Tensor
    slots: torch.Tensor


class DecodeRead:
    """What one request may read. Its sender polls it; `take` is told what all ranks have polled."""

    def __init__(self, reads: DecodeReads, req: Req) -> None:
        self._reads, self.req = reads, req
        self.phase = Phase.UNDECIDED
        self.source: Source | None = None
        self.target: Target | None = None
        self.posted: Posted | None = None
        self.failed = False
        # Whether a read from there was late on this rank.
        self.slow = False
        # The decode rank that offers KV of other weights, by its agent's name.
        self.unlike: str | None = None
        self.posted_at, self.began_in = 0.0, 0

    # ---- this rank ----

    def poll(self, asked: Mapping[str, Any]) -> int:
        """How far it is on this rank, for a request that decode has asked for. asked: what, by the rank's name."""
        if self.phase is Phase.UNDECIDED:
            self.source = self._reads.source_of(asked, self)
            return GO_ON if self.source is None else READABLE
        if self.phase is Phase.OVER:
            return GO_ON
        self._reads.post(self)
        if self.posted is None:
            return GO_ON if self.failed else KVPoll.Bootstrapping
        state = self.look()
        if state == "DONE":
            return READABLE
        if state == "PROC" and time.monotonic() - self.posted_at < LATE_S:
            return KVPoll.Bootstrapping
        if state == "PROC":
            self._reads.note_late(self)
        return GO_ON

    def look(self) -> str:
        """How it is with what has been posted; ``DONE`` if nothing has."""
        return "DONE" if self.posted is None else self.posted.state()

    # ---- all ranks ----

    def take(self, poll: int) -> int:
        """Go on as all ranks have polled; returns what the queue goes by: whether the request has to wait."""
        if self.phase is Phase.OVER or poll < GO_ON:
            return poll
        if self.phase is Phase.UNDECIDED:
            readable, stuck = poll == READABLE, self._reads.is_stuck
            if readable and stuck and self._reads.by_arrival():
                return KVPoll.Bootstrapping
            if not readable:
                self._reads.pass_over(self)
            # Else it may come before the first one, who could wait for as long as a transfer stands still.
            began = readable and not stuck and self._reads.begin(self)
            self.phase = Phase.READING if began else Phase.OVER
            return KVPoll.Bootstrapping if began else GO_ON
        self.phase = Phase.OVER
        if poll == READABLE:
            self._reads.commit(self)
        else:
            self._reads.abandon(self)
        return GO_ON


class Ended:
    """Polls as done when nothing is written any more to the pages of a read that nobody waits for."""

    def __init__(self, read: DecodeRead) -> None:
        self.read = read

    def poll(self) -> int:
        return int(KVPoll.Transferring if self.read.look() == "PROC" else KVPoll.Success)


def agree_on_reads(pollers: Iterable[Any], polls: Sequence[int]) -> list[int]:
    """What a queue of senders goes by, of what all ranks have polled."""
    reads = [getattr(poller, "reading", None) for poller in pollers]
    return [poll if read is None else read.take(poll) for read, poll in zip(reads, polls, strict=True)]


class Held(NamedTuple):
    """What a request has read is locked until it has begun. node: the end of it; tokens: that were read."""

    req: Req
    node: Any
    tokens: int


class DecodeReads:
    """The reads of one prefill rank: the same on all ranks of its group, in the same order."""

    def __init__(
        self, tree: Any, reader: Reader, least: int, counters: ReadCounters, weights: Callable[[], int | None]
    ) -> None:
        """tree: the engine's radix cache. least: tokens; for fewer nothing is read. weights: what the KV here
        is of, `KvWeights.current`, as decode's must be; None if that is not known."""
        self._tree, self._reader, self._counters, self._weights = tree, reader, counters, weights
        self.least = least
        self._allocator = tree.token_to_kv_pool_allocator
        self._most = int(self._allocator.size * MOST_OF_POOL)
        self.reading: list[DecodeRead] = []
        # Nobody waits for these any more; their pages may still be written to.
        self.ending: list[DecodeRead] = []
        self.held: list[Held] = []
        self._turn = 0
        # Decode ranks from which a read was late of late, and when.
        self._late: dict[str, float] = {}
        # Decode ranks of whose weights it has been told that they are others than those here.
        self._told_unlike: set[str] = set()
        # Whether those that wait for their turn wait for memory, which no read may take before them.
        self.is_stuck = False
        # Whether a step is in flight, and tokens that the prompt being computed may still take.
        self.step_in_flight: Callable[[], bool] = lambda: False
        # Whether requests are computed in the order in which they come, so that nobody overtakes who waits for memory.
        self.by_arrival: Callable[[], bool] = lambda: True
        self.promised: Callable[[], int] = lambda: 0

    def __len__(self) -> int:
        return len(self.reading) + len(self.ending) + len(self.held)

    @property
    def tokens_out(self) -> int:
        """Tokens of the pool that are neither free nor in the tree, since they are being read."""
        return sum(len(read.target.slots) for read in (*self.reading, *self.ending) if read.target is not None)

    # ---- this rank ----

    def source_of(self, asked: Mapping[str, Any], read: DecodeRead) -> Source | None:
        """Where decode has the KV of a prompt's prefix; None if it offers none that can be read here."""
        wanted = [info for info in asked.values() if not asks_for_nothing(info)]
        offer: Offer | None = wanted[0].parts.get(OFFER) if len(wanted) == 1 else None
        if offer is None or not self._reader.fits(wanted[0].agent_name):
            return None
        name = wanted[0].agent_name
        read.unlike = name if offer.weights != self._weights() else None
        read.slow = read.unlike is None and time.monotonic() < self._late.get(name, -math.inf) + AVOIDED_S
        return None if read.unlike or read.slow else Source(name, offer.pages)

    def note_late(self, read: DecodeRead) -> None:
        """Nobody waits for ``read`` any more. The next ones from there would take as long for nothing."""
        assert read.source is not None
        now = time.monotonic()
        self._late = {name: at for name, at in self._late.items() if now < at + AVOIDED_S} | {
            read.source.agent_name: now
        }

    def post(self, read: DecodeRead) -> None:
        """Post a read that has its pages, once no step can write to them.

        A step in flight may, for a request that had them before. It is over when the loop has gone round.
        """
        if read.posted is not None or read.failed or (read.began_in == self._turn and self.step_in_flight()):
            return
        assert read.source is not None and read.target is not None
        first = len(read.target.own) // self._tree.page_size
        ours = kv_to_page_indices(read.target.slots.cpu().numpy(), self._tree.page_size).astype(np.int32)
        try:
            # None: others of this turn have taken its time.
            read.posted = self._reader.post(read.source.agent_name, read.source.pages[first:], ours)
            read.posted_at = time.monotonic()
        except Exception as e:
            logger.warning("Request %s: nothing is read from decode: %r", read.req.rid, e)
            read.failed = True

    # ---- all ranks, in the same step ----

    def pass_over(self, read: DecodeRead) -> None:
        """Some rank is offered nothing that it can read, or avoids the one that offers it.

        That the weights differ may be for good, and would else be seen nowhere.
        """
        if read.slow:
            self._counters.ended("slow")
        if read.unlike is not None:
            self._counters.ended("weights")
            if read.unlike not in self._told_unlike:
                logger.warning(
                    "The KV of decode worker %s is of other weights than those here, or these have been updated: it is "
                    "not read. Give both workers one model path and --weight-version, or one --kv-namespace",
                    read.unlike,
                )
                self._told_unlike.add(read.unlike)

    def begin(self, read: DecodeRead) -> bool:
        """Take the pages for a read; False if there is too little to read, or no memory for it.

        All ranks come to the same: their trees and pools are the same.
        """
        assert read.source is not None
        tree, req = self._tree, read.req
        end = len(read.source.pages) * tree.page_size
        match = tree.match_prefix(MatchPrefixParams(key=self._key(req, end)))
        node, own = match.last_device_node, match.device_indices
        lacks = end - len(own)
        self._told_unlike.discard(read.source.agent_name)
        if lacks < self.least:
            return False
        tree.inc_lock_ref(node)
        slots = self._allocate(lacks)
        if slots is None:
            tree.dec_lock_ref(node)
            self._counters.ended("memory")
            return False
        read.target = Target(node, own, slots)
        read.began_in = self._turn
        self.reading.append(read)
        self.post(read)
        return True

    def _key(self, req: Req, end: int) -> RadixKey:
        return RadixKey(req.origin_input_ids[:end], req.extra_key)

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        """Slots for so many tokens, whole pages; what is cached goes for them, but nothing that a request counts on."""
        tree, pool = self._tree, self._allocator
        taken = self.tokens_out + sum(held.tokens for held in self.held)
        free = pool.available_size()
        if taken + tokens > self._most or free + tree.evictable_size() - self.promised() < tokens:
            return None
        if free < tokens:
            tree.evict(EvictParams(num_tokens=tokens - free))
        return pool.alloc(tokens)

    def commit(self, read: DecodeRead) -> None:
        """All ranks have read all of it: it is the tree's, and stays there until its request has begun."""
        assert read.target is not None
        self.reading.remove(read)
        tree, req, (node, own, slots) = self._tree, read.req, read.target
        key = self._key(req, len(own) + len(slots))
        value = torch.cat([own, slots])
        result = tree.insert(InsertParams(key=key, value=value, priority=req.priority or 0))
        # Another request may have computed a part of it meanwhile.
        twice = max(0, result.prefix_len - len(own))
        if twice:
            self._allocator.free(slots[:twice])
        last = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        tree.inc_lock_ref(last)
        tree.dec_lock_ref(node)
        self.held.append(Held(req, last, len(slots)))
        read.target = None
        self._counters.ended("read", len(slots))

    def abandon(self, read: DecodeRead) -> None:
        """The request goes on without it, or has ended. Its pages are given back when nothing is written to them."""
        self.reading.remove(read)
        self.ending.append(read)
        self._counters.ended("failed")

    def turn(
        self,
        not_begun: Sequence[Req],
        waiting: Sequence[Req],
        is_stuck: bool,
        poll_all: Callable[[Sequence[Ended]], Sequence[int]],
    ) -> None:
        """Give back what is no longer needed; called in each turn of the loop.

        not_begun, waiting: the requests of the two queues in which what was read for them is kept. is_stuck: whether
        none of those that wait could begin, and nothing runs that would end. poll_all: polls on all ranks.
        """
        self._turn, self.is_stuck = self._turn + 1, is_stuck
        self._reader.begin_turn()
        if not len(self):
            return
        queued = {id(req) for req in not_begun}
        for read in [read for read in self.reading if id(read.req) not in queued]:
            read.phase = Phase.OVER
            self.abandon(read)
        if self.ending:
            polls = poll_all([Ended(read) for read in self.ending])
            over = [read for read, poll in zip(self.ending, polls, strict=True) if poll == KVPoll.Success]
            self.ending = [read for read in self.ending if read not in over]
            for read in over:
                self._give_back(read)
        # What is locked for those behind it may be what the first one lacks.
        here = set() if is_stuck else queued | {id(req) for req in waiting}
        for held in [held for held in self.held if id(held.req) not in here]:
            self._tree.dec_lock_ref(held.node)
            self.held.remove(held)

    def _give_back(self, read: DecodeRead) -> None:
        assert read.target is not None
        self._allocator.free(read.target.slots)
        self._tree.dec_lock_ref(read.target.node)
        read.target = None


def make_reads(scheduler: Any, manager: Any) -> DecodeReads | None:
    """What reads from decode on this rank, if the option asks for it. Raises ValueError for a model without such KV."""
    args = scheduler.server_args
    least, tree = getattr(args, "disaggregation_prefill_read_decode", None), scheduler.tree_cache
    if least is None:
        return None
    if type(tree) is not RadixCache or manager.has_state:
        raise ValueError(
            f"{READ_FLAG} is not verified for this model: only KV of full attention in all layers, in the engine's "
            f"RadixCache, is read, and the engine chose {type(tree).__name__}. Start this prefill worker without it."
        )
    check_tree(READ_FLAG, tree)
    reader = PageReads(manager.agent, manager.kv_args, manager.decode_kv_args_table, manager.attn_tp_size)
    counters = ReadCounters(events_of(args))
    reads = DecodeReads(tree, reader, least, counters, lambda: weights_of(manager).current())
    reads.step_in_flight = lambda: bool(getattr(scheduler, "result_queue", None))
    reads.by_arrival = lambda: (
        scheduler.policy.policy is CacheAgnosticPolicy.FCFS and not scheduler.enable_priority_scheduling
    )
    reads.promised = lambda: 0 if scheduler.chunked_req is None else len(scheduler.chunked_req.origin_input_ids)
    manager.reads = reads
    logger.info("Prefill reads KV that it lacks from decode, where that is %d tokens or more.", least)
    return reads
