"""Prefill reads the KV of a prompt from decode's pages instead of computing it.

Decode holds KV that no prefill has: of decoded tokens, and of short deltas that it computed itself. The prefix of a
request stays locked on decode until the request ends, so its pages can be read until then: see
docs/decisions/reading-from-decode.md.

During its read a request stays in the bootstrap queue. Its sender's poll reports the progress, and that queue's
reduction, which all ranks enter anyway, starts and ends a read in the same steps on all of them.

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

# Seconds after which a request goes on without its read: prefill computes thousands of tokens in that time. And seconds
# without reads from that decode rank then.
LATE_S, AVOIDED_S = 2.0, 60.0
# Bound of pages in reads or read and not yet used, as a part of the pool.
MOST_OF_POOL = 0.5
# Polls of a sender: go on; or pages are offered, or have been read.
GO_ON, READABLE = KVPoll.WaitingForInput, KVPoll.Transferring


class Posted(Protocol):
    """A posted read."""

    def state(self) -> str: ...


class Reader(Protocol):
    """Reads pages of a decode rank. agent_name: the rank's NIXL agent."""

    def fits(self, agent_name: str) -> bool: ...

    def begin_turn(self) -> None: ...

    def post(self, agent_name: str, theirs: Any, ours: Any) -> Posted | None: ...


class Phase(enum.Enum):
    """Phase of a read."""

    # No request from decode yet, or not on all ranks.
    UNDECIDED = enum.auto()
    # Its pages are allocated.
    READING = enum.auto()
    # Its KV is in the tree, or nothing was read, or it was abandoned.
    OVER = enum.auto()


class Source(NamedTuple):
    """The pages to read. pages: int32, in prompt order; agent_name: NIXL agent of their decode rank."""

    agent_name: str
    pages: np.ndarray


class Target(NamedTuple):
    """Memory of a read. node: end of the prefix in this tree, locked. own: the prefix's slots, int64. slots: to read
    into, int64."""

    node: Any
    own: torch.Tensor
    slots: torch.Tensor


class DecodeRead:
    """The read of one request. Its sender polls it; `take` gets the result of all ranks."""

    def __init__(self, reads: DecodeReads, req: Req) -> None:
        self._reads, self.req = reads, req
        self.phase = Phase.UNDECIDED
        self.source: Source | None = None
        self.target: Target | None = None
        self.posted: Posted | None = None
        self.failed = False
        # Whether a recent read from that decode rank was late on this rank.
        self.slow = False
        # NIXL agent of a decode rank that offers KV of other weights.
        self.unlike: str | None = None
        self.posted_at, self.began_in = 0.0, 0

    # ---- this rank ----

    def poll(self, asked: Mapping[str, Any]) -> int:
        """Progress on this rank, once decode has requested the KV. asked: requests by decode rank's name."""
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
        """State of the posted read; ``DONE`` if there is none."""
        return "DONE" if self.posted is None else self.posted.state()

    # ---- all ranks ----

    def take(self, poll: int) -> int:
        """Go on with the poll that all ranks agreed on. Returns the queue's poll: whether the request has to wait."""
        if self.phase is Phase.OVER or poll < GO_ON:
            return poll
        if self.phase is Phase.UNDECIDED:
            readable, stuck = poll == READABLE, self._reads.is_stuck
            if readable and stuck and self._reads.by_arrival():
                return KVPoll.Bootstrapping
            if not readable:
                self._reads.pass_over(self)
            # Without FCFS it may precede the stuck request, which a hung transfer can hold up for ever: no read then.
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
    """Polls as done when nothing is written to the pages of an abandoned read any more."""

    def __init__(self, read: DecodeRead) -> None:
        self.read = read

    def poll(self) -> int:
        return int(KVPoll.Transferring if self.read.look() == "PROC" else KVPoll.Success)


def agree_on_reads(pollers: Iterable[Any], polls: Sequence[int]) -> list[int]:
    """A queue's polls, given those that all ranks agreed on."""
    reads = [getattr(poller, "reading", None) for poller in pollers]
    return [poll if read is None else read.take(poll) for read, poll in zip(reads, polls, strict=True)]


class Held(NamedTuple):
    """KV read for a request, locked until the request begins. node: its end; tokens: read."""

    req: Req
    node: Any
    tokens: int


class DecodeReads:
    """The reads of one prefill rank, in the same order on all ranks of its group."""

    def __init__(
        self, tree: Any, reader: Reader, least: int, counters: ReadCounters, weights: Callable[[], int | None]
    ) -> None:
        """tree: the engine's radix cache. least: fewest tokens to read. weights: `KvWeights.current` of this worker,
        which decode's has to equal; None if unknown."""
        self._tree, self._reader, self._counters, self._weights = tree, reader, counters, weights
        self.least = least
        self._allocator = tree.token_to_kv_pool_allocator
        self._most = int(self._allocator.size * MOST_OF_POOL)
        self.reading: list[DecodeRead] = []
        # Abandoned reads whose pages may still be written to.
        self.ending: list[DecodeRead] = []
        self.held: list[Held] = []
        self._turn = 0
        # When a read was last late, by decode rank.
        self._late: dict[str, float] = {}
        # Decode ranks whose different weights have been logged.
        self._told_unlike: set[str] = set()
        # Whether the waiting queue is blocked on memory, which a read must not take first.
        self.is_stuck = False
        # Whether a batch is in flight; and tokens that the current chunked prompt may still allocate.
        self.step_in_flight: Callable[[], bool] = lambda: False
        # Whether requests are computed in order of arrival, so that none bypasses one that waits for memory.
        self.by_arrival: Callable[[], bool] = lambda: True
        self.promised: Callable[[], int] = lambda: 0

    def __len__(self) -> int:
        return len(self.reading) + len(self.ending) + len(self.held)

    @property
    def tokens_out(self) -> int:
        """Pool tokens in reads: neither free nor in the tree."""
        return sum(len(read.target.slots) for read in (*self.reading, *self.ending) if read.target is not None)

    # ---- this rank ----

    def source_of(self, asked: Mapping[str, Any], read: DecodeRead) -> Source | None:
        """Where decode has the KV of a prompt's prefix; None without a readable offer."""
        wanted = [info for info in asked.values() if not asks_for_nothing(info)]
        offer: Offer | None = wanted[0].parts.get(OFFER) if len(wanted) == 1 else None
        if offer is None or not self._reader.fits(wanted[0].agent_name):
            return None
        name = wanted[0].agent_name
        read.unlike = name if offer.weights != self._weights() else None
        read.slow = read.unlike is None and time.monotonic() < self._late.get(name, -math.inf) + AVOIDED_S
        return None if read.unlike or read.slow else Source(name, offer.pages)

    def note_late(self, read: DecodeRead) -> None:
        """Avoid the decode rank of ``read``, which was abandoned for its time."""
        assert read.source is not None
        now = time.monotonic()
        self._late = {name: at for name, at in self._late.items() if now < at + AVOIDED_S} | {
            read.source.agent_name: now
        }

    def post(self, read: DecodeRead) -> None:
        """Post a read once no batch can write to its pages.

        The batch in flight at its allocation may, for the pages' last request. It has ended in the next turn.
        """
        if read.posted is not None or read.failed or (read.began_in == self._turn and self.step_in_flight()):
            return
        assert read.source is not None and read.target is not None
        first = len(read.target.own) // self._tree.page_size
        ours = kv_to_page_indices(read.target.slots.cpu().numpy(), self._tree.page_size).astype(np.int32)
        try:
            # None: this turn's regions are used up.
            read.posted = self._reader.post(read.source.agent_name, read.source.pages[first:], ours)
            read.posted_at = time.monotonic()
        except Exception as e:
            logger.warning("Request %s: its read from decode failed: %r", read.req.rid, e)
            read.failed = True

    # ---- all ranks, in the same step ----

    def pass_over(self, read: DecodeRead) -> None:
        """Count a read that some rank cannot do or avoids.

        Different weights are logged: they may be a lasting misconfiguration.
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
        """Allocate the pages of a read; False if it is too short or there is no memory.

        Equal on all ranks: their trees and pools are the same.
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
        """Slots for ``tokens``, whole pages; may evict, but not what the chunked prompt needs. None without memory."""
        tree, pool = self._tree, self._allocator
        taken = self.tokens_out + sum(held.tokens for held in self.held)
        free = pool.available_size()
        if taken + tokens > self._most or free + tree.evictable_size() - self.promised() < tokens:
            return None
        if free < tokens:
            tree.evict(EvictParams(num_tokens=tokens - free))
        return pool.alloc(tokens)

    def commit(self, read: DecodeRead) -> None:
        """All ranks have read it: insert it into the tree, locked until its request begins."""
        assert read.target is not None
        self.reading.remove(read)
        tree, req, (node, own, slots) = self._tree, read.req, read.target
        key = self._key(req, len(own) + len(slots))
        value = torch.cat([own, slots])
        result = tree.insert(InsertParams(key=key, value=value, priority=req.priority or 0))
        # Another request may have computed a part meanwhile.
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
        """The request goes on without it, or has ended. Its pages are freed once nothing is written to them."""
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
        """Release what is no longer needed; called in each turn of the loop.

        not_begun, waiting: the two queues whose requests keep their reads. is_stuck: no waiting request could begin,
        and none runs. poll_all: polls on all ranks.
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
        # If stuck, the first request may need memory that is locked for later ones.
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
    """The reads of this rank; None without the option. Raises ValueError for an unsupported model."""
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
    logger.info("Prefill reads missing KV from decode, from %d tokens on.", least)
    return reads
