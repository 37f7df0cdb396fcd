"""Local prefill: a decode rank computes short remainders of prompts itself, in slices between its decode steps.

In a chat, decode holds all of a prompt but the new tokens. Computing these takes one short step; prefill would take a
round trip behind its queue. NVIDIA Dynamo calls this conditional disaggregation.

A request arrives from admission with its prefix locked and its slots allocated, and leaves with an EXTEND step of the
engine, after which it decodes like any other. Whole pages enter the tree when the step that computes them is launched:
readers come later in the same stream. If the tree has received the same pages meanwhile, ours are still untouched and
are freed.

Upstream: none is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks, DeltaSource, Events
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.quarantine import let_go
from sglang.srt.disaggregation.local_policy import MORE_DEBT, Bucket, OtherRanks, Policy, ShortTransfers
from sglang.srt.disaggregation.peer_calls import tell
from sglang.srt.managers.computed_answers import COMPUTED_ROUTE
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.known_prefixes import is_plain, note_known, unknown_to_prefill

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.budget import LiveReqs
    from sglang.srt.disaggregation.decode_radix.policy import AdmissionPolicy, QueueEntry
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, PrefixPeek

__all__ = ["LocalHooks", "LocalPrefills", "LocalReq", "Slice", "needs_prefill"]


def needs_prefill(model: str | None) -> str | None:
    """Why this worker's prompts cannot be computed locally; None if they can. model: its state beside KV."""
    if model is None:
        return None
    return f"{model} of a prefix, from which a step would start, are not kept on decode"


@dataclasses.dataclass(eq=False)
class LocalReq:
    """A request that is computed here. done: tokens held or launched. due: the decode step after which it may begin
    while others decode. agreed: known on all ranks. begun: a step has computed, or computes, a part of it. computed:
    tokens of these steps."""

    decode_req: DecodeRequest
    done: int
    due: int = 0
    agreed: bool = False
    begun: bool = False
    computed: int = 0

    @property
    def req(self) -> Req:
        return self.decode_req.req

    @property
    def left(self) -> int:
        """Tokens of the prompt that no step has computed yet."""
        return len(self.req.origin_input_ids) - self.done


class Slice(NamedTuple):
    """Tokens of a prompt that one step computes, from `LocalReq.done` to ``end``."""

    one: LocalReq
    end: int


class PromptSteps:
    """Numbers the prefill steps. The tree records which step writes new nodes, and the last one that has ended."""

    def __init__(self, tree: DecodeRadixCache):
        self._tree, self.launched = tree, 0

    @contextmanager
    def next_writes(self) -> Iterator[None]:
        """Nodes inserted in this context are written by the next step; readers outside the stream wait for it."""
        self._tree.writing = self.launched + 1
        try:
            yield
        finally:
            self._tree.writing = 0

    def launch(self, batch: Any) -> None:
        """``batch`` is the next step."""
        self.launched += 1
        batch.prompt_step = self.launched

    def note_step(self, batch: Any, result: Any = None) -> None:
        """The result of ``batch`` has been processed, so its writes are done."""
        self._tree.written = max(self._tree.written, batch.prompt_step)

    def idle(self) -> None:
        """The loop is idle: no step is in flight."""
        self._tree.written = self.launched


class PromptPages:
    """Whole pages of prompts that are computed here; they enter the tree when their step is launched."""

    def __init__(self, tree: DecodeRadixCache):
        self._tree = tree

    def end(self, one: LocalReq, end: int) -> int:
        """The number of tokens that enter the tree with a step that computes a prompt up to ``end``."""
        # The last token is always computed, into its own page, whatever the tree holds.
        shared = end - 1 if end == len(one.req.origin_input_ids) else end
        return shared // self._tree.page_size * self._tree.page_size

    def enter(self, slices: Sequence[Slice]) -> Iterator[tuple[Slice, int]]:
        """Insert what a step over ``slices`` computes into the tree; yields each with the token it starts at.

        A slice whose beginning is computed by an earlier one is left for the next step: attention may read the tokens
        before a slice before this step writes them (FlashInfer, ragged).
        """
        ends = [self.end(*part) for part in slices]
        # None precedes the first.
        before = [self._held(part.one, ends[i]) if i else None for i, part in enumerate(slices)]
        for part, end, earlier in zip(slices, ends, before, strict=True):
            held = self._held(part.one, end)
            # Equal: no earlier slice of this step has inserted tokens of it.
            if earlier in (None, held):
                self.share(part.one, end)
                yield part, max(part.one.done, min(held, end))

    def _held(self, one: LocalReq, end: int) -> int:
        """Tokens of the prompt before ``end`` that the tree holds."""
        req, tree = one.req, self._tree
        if not tree.accepts(req):
            return 0
        return tree.peek(tree.shareable(self._tokens(req, end)), req.extra_key).length

    def share(self, one: LocalReq, end: int) -> None:
        """Insert the prompt's tokens before ``end`` into the tree."""
        # All slices of a prompt count as one use, with the last. With a draft, a token's KV depends on the next token.
        if end > one.req.cache_protected_len:
            chunked = end < self.end(one, len(one.req.origin_input_ids))
            self._tree.commit_req(one.req, end + self._tree.is_eagle, chunked)

    def _tokens(self, req: Req, end: int) -> list[int]:
        """The tree's key of the tokens before ``end``; with a draft it includes the next token."""
        return req.origin_input_ids[: end + 1 if self._tree.is_eagle else end]


class LocalPrefills(DeltaSource):
    """Requests of one decode rank that are computed here, from admission until they decode."""

    def __init__(
        self,
        tree: DecodeRadixCache,
        rows: Any,
        admission: AdmissionPolicy,
        events: Events,
        policy: Policy,
        tells: bool,
    ):
        """rows: the req_to_token pool. tells: whether this rank notifies prefill on behalf of all ranks."""
        self._tree, self._rows, self._admission, self._events = tree, rows, admission, events
        self.policy, self._tells = policy, tells
        self.transfers = ShortTransfers()
        self.bucket = Bucket(self.transfers.short)
        self.ranks = OtherRanks()
        # No slices with a draft: its KV of a token is computed with the next token, which is not in the slice.
        self.slices = not tree.is_eagle
        self.waiting: list[LocalReq] = []
        # Of the request last chosen for local prefill: decode steps that it waits, and its own steps.
        self._wait, self._takes = 0, 0
        self._due_only = False  # Whether the next step computes only requests that are due.
        self.stood_back = False  # Whether they have left the last free req slot to requests whose KV has arrived.
        # The last step, until the requests that it completed decode.
        self.launched: Any = None
        self.steps, self._pages = PromptSteps(tree), PromptPages(tree)

    # ---- state ----

    @property
    def busy(self) -> bool:
        """Whether a request waits here or for its first decode step."""
        return bool(self.waiting) or self.launched is not None

    @property
    def queued(self) -> int:
        """Tokens of prompts that no step has computed yet."""
        return sum(one.left for one in self.waiting)

    # ---- the source of a delta ----

    def lets(self, decode_req: DecodeRequest) -> bool:
        """Whether its prefill supports cancelling requests that are computed here."""
        receiver = decode_req.kv_receiver
        drops: bool = receiver.kv_mgr.drops(receiver.bootstrap_addr)
        return drops

    def takes(self, req: Req, found: PrefixPeek, live: Callable[[], LiveReqs]) -> bool:
        """Whether ``req``, with prefix ``found``, is computed here."""
        return self.should_compute(req, found, lambda: len(live().running))

    def taken(self) -> list[DecodeRequest]:
        """Requests whose prompts are not computed completely."""
        return [one.decode_req for one in self.waiting]

    def writes(self) -> bool:
        """Whether a prefill step is in flight; its pages are in the tree since its launch."""
        return self.steps.launched > self._tree.written

    def should_compute(self, req: Req, found: PrefixPeek, others: Callable[[], int]) -> bool:
        """Whether ``req``, with prefix ``found``, is computed here. others: returns the number of decoding requests."""
        # Of a full hit, the last page is computed again.
        delta = len(req.origin_input_ids) - found.length or self._tree.page_size
        if delta > self.policy.most or not is_plain(req):
            return False
        decoding = max(others(), self.ranks.decoding)
        most = self.policy.slice
        if decoding and not self.slices and delta > most:
            return False
        if self.policy.paced and self.queued + delta > self.policy.step:
            # Needs several steps: by the next one, the requests of this one decode.
            decoding = max(decoding, len(self.waiting))
        paced = bool(decoding) and self.policy.paced
        debt = unknown_to_prefill(found)
        if debt and delta + debt > self.policy.debt * (MORE_DEBT if paced and self.bucket.is_slow(decoding) else 1):
            return False
        self._takes = -(-delta // most) if paced else 0
        wait = self.bucket.wait(self._takes, decoding) if paced else 0
        self._wait = wait or 0
        return wait is not None

    def request(self, decode_req: DecodeRequest) -> None:
        """Accept a request that has its memory, and cancel it on prefill.

        Steps in flight precede ours in the stream, so there is no need to wait for them.
        """
        req = decode_req.req
        req.computed_here = decode_req.entry.delta
        req.transfer_prefix_len = len(req.origin_input_ids) - req.computed_here
        decode_req.advance(Phase.LOCAL)
        self.waiting.append(LocalReq(decode_req, req.transfer_prefix_len, self.bucket.steps + self._wait))
        self.bucket.spend(self._takes)
        req.time_stats.set_decode_transfer_queue_entry_time()
        # Prefill was not asked for KV.
        receiver = decode_req.kv_receiver
        receiver.conclude_state = KVPoll.Success
        receiver.end()
        if self._tells:
            tell(receiver.bootstrap_addr, COMPUTED_ROUTE, [req.bootstrap_room])

    def agree(self, decode_req: DecodeRequest) -> bool:
        """A request is ready on all ranks: mark it for the next step if it is computed here.

        Returns whether it is. False if it has failed, or while KV is copied for it.
        """
        for one in self.waiting:
            if one.decode_req is decode_req and decode_req.poll() == KVPoll.Success:
                one.agreed = True
                if self._tells and decode_req.is_doubled:
                    tell(decode_req.kv_receiver.bootstrap_addr, COMPUTED_ROUTE, [one.req.bootstrap_room])
                one.req.time_stats.set_wait_queue_entry_time()
                self._take_in(one)
                return True
        return False

    def _take_in(self, one: LocalReq) -> None:
        """Put what was loaded from host memory into the tree."""
        load = one.decode_req.load
        if load is None:
            return
        self._pages.share(one, load.end)
        if load.known:
            note_known(one.req.last_node)
        let_go(one.decode_req, self._tree.tier)

    def forget(self, decode_req: DecodeRequest) -> None:
        """A request failed before `agree`."""
        self.waiting = [one for one in self.waiting if one.decode_req is not decode_req]

    def abort(self, matches: Callable[[Req], bool]) -> None:
        """Abort matching requests in the next step, after any step in flight for them."""
        for one in self.waiting:
            if matches(one.req) and one.req.to_finish is None:
                one.req.to_finish = FINISH_ABORT()

    # ---- steps ----

    def take_aborted(self, overlapped: bool) -> list[DecodeRequest]:
        """Remove and return aborted requests without a step in flight.

        overlapped: whether the result of the last step is still to be processed.
        """
        in_flight = set(map(id, self.launched.reqs)) if overlapped and self.launched is not None else set()
        gone = [one for one in self.waiting if one.agreed and one.req.to_finish and id(one.req) not in in_flight]
        self.waiting = [one for one in self.waiting if one not in gone]
        for one in gone:
            self._admission.leave(one.decode_req.entry)
        return [one.decode_req for one in gone]

    def computed(self) -> tuple[Any, list[Req]] | None:
        """The last step, and its requests that are not computed completely; None if there was no step."""
        batch, self.launched = self.launched, None
        return None if batch is None else (batch, [one.req for one in self.waiting])

    def may_step(self, decoding: int) -> bool:
        """Whether the next step may compute prompts; while ``decoding`` requests wait, only begun or due ones."""
        self._due_only = bool(decoding) and self.policy.paced
        return not self._due_only or any(map(self._is_due, self.waiting))

    def _is_due(self, one: LocalReq) -> bool:
        return one.agreed and (one.begun or one.due <= self.bucket.steps)

    def pick(self, most_tokens: int, most_reqs: int, fits: Callable[[Req], bool]) -> list[Slice]:
        """Slices of the next step, in order of admission.

        Each ends at a page boundary or with its prompt; only the last may be part of a prompt. fits: whether the step
        can hold this request as well.
        """
        return list(self._pick(most_tokens, most_reqs, fits))

    def most_tokens(self, decoding: int) -> int:
        """Tokens of one step, for which ``decoding`` requests wait.

        One slice, times waiting/decoding if more requests wait than decode: one step for all takes less time.
        """
        if not decoding:
            return self.policy.step
        waiting = sum(one.agreed for one in self.waiting)
        return min(self.policy.step, self.policy.slice * max(1, waiting // decoding))

    def _pick(self, most_tokens: int, most_reqs: int, fits: Callable[[Req], bool]) -> Iterator[Slice]:
        page, picked = self._tree.page_size, 0
        for one in self.waiting:
            if picked >= most_reqs or most_tokens <= 0:
                return
            if not one.agreed or one.req.to_finish or (self._due_only and not self._is_due(one)) or not fits(one.req):
                continue
            if one.left <= most_tokens or (not self.slices and not picked):
                end = len(one.req.origin_input_ids)
            elif self.slices:
                # At least one page; its start need not be at a boundary if pages are larger than the slice.
                end = max((one.done + most_tokens) // page, one.done // page + 1) * page
                end = min(end, len(one.req.origin_input_ids))
                if picked and end - one.done > most_tokens:
                    return
            else:
                return
            most_tokens -= end - one.done
            picked += 1
            yield Slice(one, end)
            if end < len(one.req.origin_input_ids):
                # The engine expects one partial request per step: for a second it would stream an answer without token.
                return

    def begin(self, slices: Sequence[Slice]) -> list[Slice]:
        """Prepare the requests of ``slices`` for a step and insert their whole pages into the tree.

        Returns the slices with tokens left to compute.
        """
        with self.steps.next_writes():
            return [part for part, start in self._pages.enter(slices) if self._set_up(part.one, start, part.end)]

    def _set_up(self, one: LocalReq, start: int, end: int) -> bool:
        """Prepare the next step to compute a prompt from ``start`` to ``end``; returns False if nothing is left.

        The tree holds the tokens before ``start``.
        """
        req, prompt = one.req, one.req.origin_input_ids
        last = end == len(prompt)
        one.done = end
        if start == end:
            # The tree has received all of it meanwhile.
            return False
        one.begun = True
        one.computed += end - start
        req.fill_ids = prompt[:end]
        req.prefix_indices = self._rows.req_to_token[req.req_pool_idx, :start].to(torch.int64)
        req.set_extend_input_len(end - start)
        if not last:
            req.is_chunked += 1
        return True

    def launch(self, batch: Any, slices: Sequence[Slice]) -> None:
        """``batch`` computes ``slices``; requests whose prompt it completes are removed here."""
        self.launched = batch
        self.steps.launch(batch)
        for one, _ in slices:
            req = one.req
            # The engine takes the tokens of this step for all allocated ones.
            req.kv_committed_len = req.kv_allocated_len = len(req.origin_input_ids)
            if one.left == 0:
                self._admission.committed(one.decode_req.entry)
                one.decode_req.advance(Phase.COMMITTED)
                # Tokens that entered the tree since admission count as held, not computed.
                prompt_len, req.computed_here = len(req.origin_input_ids), one.computed
                req.transfer_prefix_len = prompt_len - one.computed
                self._events.committed(prompt_len, req.transfer_prefix_len, one.computed)
        self.waiting = [one for one in self.waiting if one.left]


class LocalHooks(DecodeHooks):
    """Hooks that report local prefills to the core and other extras."""

    def __init__(self, local: LocalPrefills):
        self._local = local

    def source(self) -> DeltaSource:
        return self._local

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        """Records the transfer time, unless it was computed here."""
        if not entry.local:
            self._local.transfers.done(entry.delta, seconds)

    def has_work(self) -> bool:
        """Whether a request waits here or for its first decode step."""
        return self._local.busy

    def state(self) -> dict[str, Any]:
        """Fields of ``kv_pool``."""
        return {"computes_up_to": self._local.policy.most}

    def measured(self) -> Bucket:
        """The measurements that ranks agree on."""
        return self._local.bucket

    def reqs(self) -> list[Req]:
        """Requests here that all ranks know and that do not decode yet, including those of the last step."""
        found = {id(one.req): one.req for one in self._local.waiting if one.agreed}
        if self._local.launched is not None:
            found |= {id(req): req for req in self._local.launched.reqs}
        return list(found.values())

    def begun(self) -> tuple[list[Req], list[Req]]:
        """Requests that a step has begun, and those that it has not; without aborted ones."""
        going = [one for one in self._local.waiting if one.agreed and not one.req.to_finish]
        return [one.req for one in going if one.begun], [one.req for one in going if not one.begun]

    def in_step(self) -> list[Req]:
        """Requests of the last step, until it is processed."""
        return [] if self._local.launched is None else list(self._local.launched.reqs)

    def beside(self, queue: Sequence[DecodeRequest]) -> list[Req]:
        """Live requests that do not decode and are not in ``queue``; each once.

        queue: the transfer queue. It has the requests here that not all ranks know yet.
        """
        found = {id(one.req): one.req for one in self._local.waiting} | {id(req): req for req in self.reqs()}
        queued = {id(decode_req.req) for decode_req in queue}
        return [req for key, req in found.items() if key not in queued and not req.finished()]

    def note_step(self, batch: Any, result: Any) -> None:
        for watcher in (self._local.bucket, self._local.steps, self._local.ranks):
            watcher.note_step(batch, result)

    def idle(self) -> None:
        for watcher in (self._local.bucket, self._local.steps, self._local.ranks):
            watcher.idle()
