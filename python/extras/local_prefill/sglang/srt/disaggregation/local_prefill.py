"""Remainders of prompts that a decode rank computes itself, in slices between its decode steps.

In a chat, decode holds all of a prompt but the tokens that are new. To compute these is one short step here; to ask
prefill for them is a round trip, behind whatever else waits there. NVIDIA Dynamo calls it conditional disaggregation.

A request comes here from admission with its prefix locked and its slots allocated, and leaves with a step of the
engine's own kind (EXTEND), after which it decodes like any other. Whole pages enter the tree when the step that
computes them is launched: what reads them comes later in the same stream, and if the tree has got the same pages from
elsewhere meanwhile, ours have not been touched by anybody and go back to the pool.

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
    """Why prompts of this worker are never computed by it; None if they can be. model: what it keeps beside KV."""
    if model is None:
        return None
    return f"{model} of a prefix, which a step over the rest would start from, are not kept on decode"


@dataclasses.dataclass(eq=False)
class LocalReq:
    """A request that is computed here. done: tokens of its prompt held, or launched. due: the decode step after which
    it may begin while others decode. agreed: by all ranks. begun: a step has computed, or computes, a part of it.
    computed: so many tokens of it."""

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
        """Tokens of the prompt that no step computes yet."""
        return len(self.req.origin_input_ids) - self.done


class Slice(NamedTuple):
    """Tokens of a prompt that one step computes: up to ``end``, from where `LocalReq.done` is."""

    one: LocalReq
    end: int


class PromptSteps:
    """The steps over prompts, by number. The tree is told which is to write what enters it, and which are over."""

    def __init__(self, tree: DecodeRadixCache):
        self._tree, self.launched = tree, 0

    @contextmanager
    def next_writes(self) -> Iterator[None]:
        """What enters the tree meanwhile the next step writes: who reads outside of the stream waits until it has."""
        self._tree.writing = self.launched + 1
        try:
            yield
        finally:
            self._tree.writing = 0

    def launch(self, batch: Any) -> None:
        """``batch`` is that step."""
        self.launched += 1
        batch.prompt_step = self.launched

    def note_step(self, batch: Any, result: Any = None) -> None:
        """The result of ``batch`` has been processed: it has written what it was to write."""
        self._tree.written = max(self._tree.written, batch.prompt_step)

    def idle(self) -> None:
        """The loop has nothing to do: no step is under way."""
        self._tree.written = self.launched


class PromptPages:
    """The whole pages of prompts that are computed here, in the tree from the launch of their step on."""

    def __init__(self, tree: DecodeRadixCache):
        self._tree = tree

    def end(self, one: LocalReq, end: int) -> int:
        """Before which token a step that computes a prompt up to ``end`` puts it into the tree."""
        # The page of the last token is computed into a page of its own, whatever the tree holds.
        shared = end - 1 if end == len(one.req.origin_input_ids) else end
        return shared // self._tree.page_size * self._tree.page_size

    def enter(self, slices: Sequence[Slice]) -> Iterator[tuple[Slice, int]]:
        """Put into the tree what a step over ``slices`` computes, one by one, each with the token that it starts with.

        One whose beginning another of them computes is left for the next step: attention may read what is before a
        slice before this step writes it (FlashInfer, ragged).
        """
        ends = [self.end(*part) for part in slices]
        # The first has none before it.
        before = [self._held(part.one, ends[i]) if i else None for i, part in enumerate(slices)]
        for part, end, earlier in zip(slices, ends, before, strict=True):
            held = self._held(part.one, end)
            # Nobody but those before it has put anything into the tree since.
            if earlier in (None, held):
                self.share(part.one, end)
                yield part, max(part.one.done, min(held, end))

    def _held(self, one: LocalReq, end: int) -> int:
        """How many of the prompt's tokens before ``end`` the tree has."""
        req, tree = one.req, self._tree
        if not tree.accepts(req):
            return 0
        return tree.peek(tree.shareable(self._tokens(req, end)), req.extra_key).length

    def share(self, one: LocalReq, end: int) -> None:
        """Put the prompt's tokens before ``end`` into the tree."""
        # All slices of a prompt are one use of it: the last counts. With drafts, a token's KV depends on the next.
        if end > one.req.cache_protected_len:
            chunked = end < self.end(one, len(one.req.origin_input_ids))
            self._tree.commit_req(one.req, end + self._tree.is_eagle, chunked)

    def _tokens(self, req: Req, end: int) -> list[int]:
        """What the tree knows the tokens before ``end`` by: with drafts, the token after them is part of it."""
        return req.origin_input_ids[: end + 1 if self._tree.is_eagle else end]


class LocalPrefills(DeltaSource):
    """The requests of one decode rank that are computed here, from admission until they decode."""

    def __init__(
        self,
        tree: DecodeRadixCache,
        rows: Any,
        admission: AdmissionPolicy,
        events: Events,
        policy: Policy,
        tells: bool,
    ):
        """rows: the pool of requests' rows. tells: whether this rank tells prefill, for all ranks."""
        self._tree, self._rows, self._admission, self._events = tree, rows, admission, events
        self.policy, self._tells = policy, tells
        self.transfers = ShortTransfers()
        self.bucket = Bucket(self.transfers.short)
        self.ranks = OtherRanks()
        # A draft's KV of a token is computed with the one after it, which the end of a slice does not know.
        self.slices = not tree.is_eagle
        self.waiting: list[LocalReq] = []
        # Of the request that was last decided to be computed here: the decode steps that it waits, its own steps.
        self._wait, self._takes = 0, 0
        self._due_only = False  # Whether the next step computes only what has waited for as long as expected.
        self.stood_back = False  # Whether they have left the last single place to those whose KV has arrived.
        # The last step, until those that it has finished decode.
        self.launched: Any = None
        self.steps, self._pages = PromptSteps(tree), PromptPages(tree)

    # ---- questions ----

    @property
    def busy(self) -> bool:
        """Whether a request waits here, or for its first decode step."""
        return bool(self.waiting) or self.launched is not None

    @property
    def queued(self) -> int:
        """Tokens of prompts that no step computes yet."""
        return sum(one.left for one in self.waiting)

    # ---- the source of a delta ----

    def lets(self, decode_req: DecodeRequest) -> bool:
        """Whether its prefill drops a request that is computed here."""
        receiver = decode_req.kv_receiver
        drops: bool = receiver.kv_mgr.drops(receiver.bootstrap_addr)
        return drops

    def takes(self, req: Req, found: PrefixPeek, live: Callable[[], LiveReqs]) -> bool:
        """Whether ``req``, of which the tree holds ``found``, is computed here."""
        return self.should_compute(req, found, lambda: len(live().running))

    def taken(self) -> list[DecodeRequest]:
        """The requests of whose prompts a part is left to compute."""
        return [one.decode_req for one in self.waiting]

    def writes(self) -> bool:
        """Whether a step over prompts is in flight: what it computes is in the tree from its launch on."""
        return self.steps.launched > self._tree.written

    def should_compute(self, req: Req, found: PrefixPeek, others: Callable[[], int]) -> bool:
        """Whether ``req``, of which the tree holds ``found``, is computed here. others: requests that decode."""
        # Of a full hit, the last page is computed anew.
        delta = len(req.origin_input_ids) - found.length or self._tree.page_size
        if delta > self.policy.most or not is_plain(req):
            return False
        decoding = max(others(), self.ranks.decoding)
        most = self.policy.slice
        if decoding and not self.slices and delta > most:
            return False
        if self.policy.paced and self.queued + delta > self.policy.step:
            # More than one step computes: by the next step, the requests of this one decode.
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
        """Take in a request that has its memory, and have its prefill drop it.

        A step in flight comes before ours in the stream, so it need not be waited for.
        """
        req = decode_req.req
        req.computed_here = decode_req.entry.delta
        req.transfer_prefix_len = len(req.origin_input_ids) - req.computed_here
        decode_req.advance(Phase.LOCAL)
        self.waiting.append(LocalReq(decode_req, req.transfer_prefix_len, self.bucket.steps + self._wait))
        self.bucket.spend(self._takes)
        req.time_stats.set_decode_transfer_queue_entry_time()
        # Prefill has been asked for nothing.
        receiver = decode_req.kv_receiver
        receiver.conclude_state = KVPoll.Success
        receiver.end()
        if self._tells:
            tell(receiver.bootstrap_addr, COMPUTED_ROUTE, [req.bootstrap_room])

    def agree(self, decode_req: DecodeRequest) -> bool:
        """A request has failed on no rank: if it is one of these, it is computed when its step comes.

        Returns whether it is. One that has failed on the way is not, nor one for which KV is being copied.
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
        """What has been copied from host memory is the tree's."""
        load = one.decode_req.load
        if load is None:
            return
        self._pages.share(one, load.end)
        if load.known:
            note_known(one.req.last_node)
        let_go(one.decode_req, self._tree.tier)

    def forget(self, decode_req: DecodeRequest) -> None:
        """A request has failed before that."""
        self.waiting = [one for one in self.waiting if one.decode_req is not decode_req]

    def abort(self, matches: Callable[[Req], bool]) -> None:
        """Have the requests that match end at the next step; what is in flight for them is waited for."""
        for one in self.waiting:
            if matches(one.req) and one.req.to_finish is None:
                one.req.to_finish = FINISH_ABORT()

    # ---- steps ----

    def take_aborted(self, overlapped: bool) -> list[DecodeRequest]:
        """Those that have been aborted and of which no step is in flight; they are no longer here.

        overlapped: whether the result of the last step has not been processed.
        """
        in_flight = set(map(id, self.launched.reqs)) if overlapped and self.launched is not None else set()
        gone = [one for one in self.waiting if one.agreed and one.req.to_finish and id(one.req) not in in_flight]
        self.waiting = [one for one in self.waiting if one not in gone]
        for one in gone:
            self._admission.leave(one.decode_req.entry)
        return [one.decode_req for one in gone]

    def computed(self) -> tuple[Any, list[Req]] | None:
        """The last step, and those of its requests of whose prompt a part is left; None if there was none."""
        batch, self.launched = self.launched, None
        return None if batch is None else (batch, [one.req for one in self.waiting])

    def may_step(self, decoding: int) -> bool:
        """Whether the next step may be one over prompts: while ``decoding`` requests wait, what has begun or is due."""
        self._due_only = bool(decoding) and self.policy.paced
        return not self._due_only or any(map(self._is_due, self.waiting))

    def _is_due(self, one: LocalReq) -> bool:
        return one.agreed and (one.begun or one.due <= self.bucket.steps)

    def pick(self, most_tokens: int, most_reqs: int, fits: Callable[[Req], bool]) -> list[Slice]:
        """What the next step computes, in order of admission.

        All end with a page, or with their prompt; the last one may be a part of its prompt. fits: whether the step can
        have this request too.
        """
        return list(self._pick(most_tokens, most_reqs, fits))

    def most_tokens(self, decoding: int) -> int:
        """Tokens that one step computes, for which ``decoding`` requests wait.

        A slice, or as many as those who wait for this step are times those that decode: one for all takes less time.
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
                # At least a page: its start need not be at one, where pages are larger than the slice.
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
                # The engine expects one such request in a step: of another it would stream an answer without a token.
                return

    def begin(self, slices: Sequence[Slice]) -> list[Slice]:
        """Set the requests of ``slices`` up for a step of the engine; what is whole pages by then is the tree's.

        Returns those of which the step has something to compute.
        """
        with self.steps.next_writes():
            return [part for part, start in self._pages.enter(slices) if self._set_up(part.one, start, part.end)]

    def _set_up(self, one: LocalReq, start: int, end: int) -> bool:
        """Have the next step compute a prompt from ``start`` to ``end``; returns whether there is something to compute.

        Before ``start`` the tree has had it.
        """
        req, prompt = one.req, one.req.origin_input_ids
        last = end == len(prompt)
        one.done = end
        if start == end:
            # The tree has got all of it from elsewhere meanwhile.
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
        """``batch`` computes ``slices``: whose prompt it ends is no longer here."""
        self.launched = batch
        self.steps.launch(batch)
        for one, _ in slices:
            req = one.req
            # The engine takes what this step computes for all that has been allocated.
            req.kv_committed_len = req.kv_allocated_len = len(req.origin_input_ids)
            if one.left == 0:
                self._admission.committed(one.decode_req.entry)
                one.decode_req.advance(Phase.COMMITTED)
                # What has come into the tree since its admission was held, and not computed.
                prompt_len, req.computed_here = len(req.origin_input_ids), one.computed
                req.transfer_prefix_len = prompt_len - one.computed
                self._events.committed(prompt_len, req.transfer_prefix_len, one.computed)
        self.waiting = [one for one in self.waiting if one.left]


class LocalHooks(DecodeHooks):
    """What the core and other extras learn of the requests that are computed here."""

    def __init__(self, local: LocalPrefills):
        self._local = local

    def source(self) -> DeltaSource:
        """This worker."""
        return self._local

    def arrived(self, entry: QueueEntry, seconds: float) -> None:
        """From a prefill, or it was computed here."""
        if not entry.local:
            self._local.transfers.done(entry.delta, seconds)

    def has_work(self) -> bool:
        """Whether a request waits here, or for its first decode step."""
        return self._local.busy

    def state(self) -> dict[str, Any]:
        """What ``kv_pool`` says of prompts that are computed here."""
        return {"computes_up_to": self._local.policy.most}

    def measured(self) -> Bucket:
        """What goes by the times of steps."""
        return self._local.bucket

    def reqs(self) -> list[Req]:
        """The requests that all ranks know to be here and that do not decode, those in the last step included."""
        found = {id(one.req): one.req for one in self._local.waiting if one.agreed}
        if self._local.launched is not None:
            found |= {id(req): req for req in self._local.launched.reqs}
        return list(found.values())

    def begun(self) -> tuple[list[Req], list[Req]]:
        """Those of which a step has computed a part, and those that it has not; none that has been aborted."""
        going = [one for one in self._local.waiting if one.agreed and not one.req.to_finish]
        return [one.req for one in going if one.begun], [one.req for one in going if not one.begun]

    def in_step(self) -> list[Req]:
        """Those in the last step, until it has been processed."""
        return [] if self._local.launched is None else list(self._local.launched.reqs)

    def beside(self, queue: Sequence[DecodeRequest]) -> list[Req]:
        """The requests that have not ended, and do not decode, beside those in ``queue``; each once.

        queue: of transfers. Of what is computed here, it has what all ranks do not know of yet.
        """
        found = {id(one.req): one.req for one in self._local.waiting} | {id(req): req for req in self.reqs()}
        queued = {id(decode_req.req) for decode_req in queue}
        return [req for key, req in found.items() if key not in queued and not req.finished()]

    def note_step(self, batch: Any, result: Any) -> None:
        """All learn from each step."""
        for watcher in (self._local.bucket, self._local.steps, self._local.ranks):
            watcher.note_step(batch, result)

    def idle(self) -> None:
        """And are told where the loop has nothing to do."""
        for watcher in (self._local.bucket, self._local.steps, self._local.ranks):
            watcher.idle()
