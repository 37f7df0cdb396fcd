"""Holds back requests with which decode steps would take longer than the ITL that was promised.

A step's time follows from who is in it (step_time.py), so an admission is refused as one for which there is no memory
is: it ends the step of admission, and what waits goes by the order of admission. With nobody live the next is admitted
whatever it takes, so at least one request always runs. Requests that are on their way here count from when they will
decode, beside those that will not have ended by then; but for those whose prefill stands still (standstill.py).

Nothing here is measured by more than one rank: the first one's estimate is part of what ranks agree on, and decisions
follow from that, and from live requests, in whole numbers.

Upstream: none is known.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from sglang.srt.disaggregation.decode_prefix import KvTransferCounters
from sglang.srt.disaggregation.step_time import (
    PS,
    RECENT,
    WIDTH,
    Estimate,
    Parts,
    SeenTimes,
    StepTimes,
    StepWatch,
    has_prompts,
    mean_of,
)
from sglang.srt.mem_cache.prefix_reader import PrefixPeek, tokens_above

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_budget import AdmissionPlan, LiveReqs
    from sglang.srt.disaggregation.standstill import Standstills
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["ItlGate", "Load"]

Array = np.ndarray[Any, np.dtype[np.int64]]

# Requests that run before steps have been measured, and how many times what has been measured may be tried.
SEED, STRIDE = 4, 2
# An answer's tokens before one has ended; the least part of a mean answer that is expected still to come; and the
# answers of which the mean is taken.
UNKNOWN_ANSWER, LEAST_PART, ANSWERS = 256, 4, 64
# What is expected of the longest step that live requests grow into, in tenths of the target.
PEAK_TENTHS = 11
# One in so many requests that were admitted decodes sooner than is reckoned with.
SHORT_PART = 4
# Steps between two reports to the metrics.
REPORT = 16


class Steps(NamedTuple):
    """Requests and tokens of some steps, int64."""

    requests: Array
    tokens: Array

    def longest(self, parts: Parts) -> int:
        """Picoseconds of the longest of them."""
        return int((parts.fixed + parts.per_request * self.requests + parts.per_token * self.tokens).max())


class _Sums(NamedTuple):
    """Numbers in the order of their times: the times, and the sums of the first 0, 1, ... of them; int64."""

    times: Array
    sums: Array

    @classmethod
    def by(cls, times: Array, numbers: Array) -> _Sums:
        order = np.argsort(times, kind="stable")
        return cls(times[order], np.concatenate([[0], np.cumsum(numbers[order])]))

    def until(self, times: Array, side: Literal["left", "right"]) -> tuple[Array, Array]:
        """How many there are up to each of ``times``, and their sum. side: "right" for with those at that time."""
        count = np.searchsorted(self.times, times, side)
        return count, self.sums[count]


class Load:
    """What the requests of the next steps read. shared: tokens that all of them read once, beside those of each."""

    def __init__(self, shared: int = 0):
        self.shared = shared
        # Of each request: tokens that it begins with, steps until it begins, and tokens by which it will grow, a step
        # for each.
        self.reqs: list[tuple[int, int, int]] = []

    def add(self, tokens: int, growth: int, start: int = 0, shared: int = 0) -> None:
        """A request reads ``tokens`` of its own from the step ``start`` on, and in the end ``growth`` more."""
        self.reqs.append((tokens, start, growth))
        self.shared += shared

    def remove_last(self, shared: int) -> None:
        """Undo the last `add`."""
        self.reqs.pop()
        self.shared -= shared

    def steps(self) -> tuple[Steps, Steps]:
        """The steps in which a request begins, and those in which one ends: between two of these all only grow."""
        figures = np.fromiter(chain.from_iterable(self.reqs), np.int64, 3 * len(self.reqs))
        tokens, starts, growth = figures.reshape(-1, 3).T
        ends = starts + growth
        # What each would have had at time 0.
        base = tokens - starts
        begun, gone = _Sums.by(starts, base), _Sums.by(ends, base)
        return self._at(begun.times, begun, gone), self._at(gone.times, begun, gone)

    def _at(self, times: Array, begun: _Sums, gone: _Sums) -> Steps:
        """The steps at ``times``, with all that have begun and not ended before; as often as a time is named."""
        requests, tokens = begun.until(times, "right")
        fewer, less = gone.until(times, "left")
        count = requests - fewer
        return Steps(count, self.shared + tokens - less + count * times)


class ItlGate:
    """The target of one rank, what it knows of steps, and whom it holds back."""

    width = WIDTH

    def __init__(self, target_ms: float, tree: DecodeRadixCache, shares: bool = False, counters: Any = None):
        """shares: whether a step reads what several of its requests share once."""
        self.target_ms, self._target = target_ms, round(target_ms * PS / 1000)
        self._tree, self._shares = tree, shares
        self._counters: KvTransferCounters | None = counters
        self.decode, self.computed = SeenTimes(), StepTimes()
        # What all ranks go by.
        self.estimate: Estimate | None = None
        self._accepted: deque[float] = deque(maxlen=RECENT)
        self._answers: deque[int] = deque(maxlen=ANSWERS)
        self._watch = StepWatch()
        # How many that decoded in the last step go on, and the seconds of steps over prompts since, for all of them.
        self._left, self._waited = 0, 0.0
        # The requests of the last step, and the tokens of theirs that it did not read again.
        self._reqs: list[Req] = []
        self._read_once = 0
        self._steps = 0
        # In which step those were admitted that do not decode yet, None of those for which nothing is sent; and after
        # how many steps those decoded for which something was.
        self._admitted: dict[str, int | None] = {}
        self._delays: deque[int] = deque(maxlen=ANSWERS)
        # Whose prefills stand still; and how many of those on their way `load` has left out last for that.
        self.standstills: Standstills | None = None
        self.left_out = 0
        # Locks on the tree of what no step reads; see `load`.
        self._unread: Counter[TreeNode] = Counter()
        # Whether the last one was refused since no step has been like that, which the next ones may change.
        self.untried = False
        # The request that is held back, how many wait with it, and how many have been so far.
        self._held: str | None = None
        self.waiting = self.held_requests = 0

    @classmethod
    def of(cls, scheduler: Any, tree: DecodeRadixCache) -> ItlGate | None:
        """The gate that the options of a decode worker ask for; None where they ask for none."""
        target_ms = scheduler.server_args.disaggregation_decode_itl_target
        if target_ms is None:
            return None
        backend = getattr(scheduler.tp_worker.model_runner, "attn_backend", None)
        backend = getattr(backend, "full_attn_backend", backend)
        counters = KvTransferCounters.get(scheduler.server_args)
        counters.itl_target(target_ms / 1000)
        return cls(target_ms, tree, getattr(backend, "shares_prefixes", False), counters)

    # ---- what is measured ----

    def idle(self) -> None:
        """The loop has nothing to do: the next step's time is not what passes until its end."""
        self._watch.idle()
        self._left, self._waited = 0, 0.0

    def note_step(self, batch: Any, result: Any, now: float | None = None) -> None:
        """The result of ``batch`` has been processed. Its time is that since the result before, as clients see it."""
        seconds = self._watch.lap(now)
        reqs, mode = batch.reqs, batch.forward_mode
        if not mode.is_decode():
            if mode.is_extend() and seconds is not None and batch.prefill_stats is not None:
                self.computed.note(batch.prefill_stats.log_input_tokens, 0, seconds)
            self._waited += self._left * (seconds or 0.0)
            return
        accepted = getattr(result, "accept_length_per_req_cpu", None)
        if accepted:
            self._accepted.append(1 + sum(accepted) / len(accepted))
        ended = [req for req in reqs if req.finished_reason is not None]
        if ended:
            self._answers.extend([len(req.output_ids) for req in ended if not _aborted(req)])
            self.decode.expect(round(mean_of(self._answers) / self._tokens_per_step()))
        self._note_joined(reqs)
        if seconds is not None:
            self._note_decoded(batch, seconds)
        self._left = len(reqs) - len(ended)
        self._steps += 1
        if self._counters is not None and self._steps % REPORT == 0:
            self._counters.itl(self.decode.seconds() or 0.0, self.decode.seconds_explained() or 0.0)

    def _note_decoded(self, batch: Any, seconds: float) -> None:
        """A decode step took ``seconds``."""
        own = max(1, len(batch.reqs))
        if has_prompts(batch):
            # Of another DP rank's prompts tokens are told, and the step took as long as they did.
            self._waited += own * max(0.0, seconds - (self.decode.seconds() or seconds))
        else:
            self.decode.note(self._requests(batch), self._tokens(batch.reqs), seconds, self._waited / own)
            self._waited = 0.0

    def _note_joined(self, reqs: Sequence[Req]) -> None:
        """``reqs`` decode."""
        admitted = self._admitted
        for rid in [req.rid for req in reqs if req.rid in admitted] if admitted else ():
            step = admitted.pop(rid, None)
            if step is not None:
                self._delays.append(self._steps - step)

    @staticmethod
    def _requests(batch: Any) -> int:
        """Requests of a step; where DP ranks step together, of the fullest, which all wait for."""
        return max([len(batch.reqs), *(batch.global_num_tokens or ())])

    def _tokens(self, reqs: Sequence[Req]) -> int:
        """Tokens of KV that a step over ``reqs`` reads."""
        tokens = sum([len(req.origin_input_ids) + len(req.output_ids) for req in reqs])
        if not self._shares:
            return tokens
        if reqs != self._reqs:
            self._reqs = list(reqs)
            held = sum([req.cache_protected_len for req in reqs])
            self._read_once = held - tokens_above([req.last_node for req in reqs])
        return max(1, tokens - self._read_once)

    # ---- what ranks agree on ----

    def own(self) -> list[int]:
        """What this rank makes of its steps, as `WIDTH` figures of 0 or more."""
        parts = self.decode.parts()
        if parts is None:
            return [0] * WIDTH
        accepted, waits = round(1000 * self._tokens_per_step()), round(1000 * self.decode.waits())
        computed = self.computed.parts() or Parts(0, 0, 0)
        answer = mean_of(self._answers)
        delay = sorted(self._delays)[len(self._delays) // SHORT_PART] if self._delays else 0
        return Estimate(parts, computed, accepted, answer, *self.decode.most(), delay, waits).figures()

    def _tokens_per_step(self) -> float:
        """Of a request, where drafts are accepted."""
        return sum(self._accepted) / len(self._accepted) if self._accepted else 1.0

    def take(self, figures: list[int]) -> None:
        """These are what all ranks go by from now on."""
        self.estimate = Estimate.of(figures)

    # ---- decisions ----

    def load(self, live: LiveReqs, prefills: Callable[[], set[Hashable]] | None = None) -> Load:
        """What steps over the live requests read. prefills: as of `Standstills.without`. Cost: some figures of each."""
        coming = live.coming
        if self.standstills is not None:
            coming = self.standstills.without(coming, look=self._held is not None, prefills=prefills)
        self.left_out = len(live.coming) - len(coming)
        self._unread = _locks_unread(self._tree, live, coming) if self._shares else Counter()
        load = Load(self._tree.protected_size_ - _held_alone(self._unread) if self._shares else 0)
        load.reqs = self._figures(live.running)
        delay, step, admitted = self._delay(), self._steps, self._admitted
        # Without those that have failed on their way. How long a prefill stands still is no word of the others'.
        self._admitted = dict.fromkeys([req.rid for req in live.coming])
        self._admitted.update((req.rid, admitted.get(req.rid)) for req in coming)
        for req, (tokens, _, growth) in zip(coming, self._figures(coming), strict=True):
            since = self._admitted[req.rid]
            load.add(tokens, growth, 0 if since is None else max(0, delay - step + since))
        return load

    def _figures(self, reqs: Sequence[Req]) -> list[tuple[int, int, int]]:
        """Those of `Load.reqs` of each of ``reqs``, as if all ran.

        Of all that do, in each step in which somebody could be admitted: it makes no call for each of them.
        """
        shares, answer = self._shares, 0 if self.estimate is None else self.estimate.answer
        least = answer // LEAST_PART if answer else UNKNOWN_ANSWER
        figures = []
        for req in reqs:
            done = len(req.output_ids)
            tokens = len(req.origin_input_ids) + done - (req.cache_protected_len if shares else 0)
            left, expected = req.sampling_params.max_new_tokens - done, answer - done
            expected = expected if expected > least else least
            figures.append((tokens, 0, 0 if left < 0 else left if left < expected else expected))
        return figures

    def _delay(self) -> int:
        """Steps from an admission until the request decodes; for the shorter ones of them."""
        return 0 if self.estimate is None else self.estimate.delay

    def add(self, load: Load, plan: AdmissionPlan, req: Req, at_once: bool = False) -> bool:
        """Add ``req``, whose admission takes ``plan``, to ``load`` if steps do not become too long with it.

        at_once: nothing is sent for it; it decodes beside those that run now, and not beside those that will be left.
        """
        alone = not load.reqs
        shared = plan.found.evictable + _unread_of(plan.found, self._unread) if self._shares else 0
        start = 0 if at_once else self._delay()
        load.add(plan.delta + (0 if self._shares else plan.found.length), self._growth(req), start, shared)
        if alone or self._covers(load):
            self._admitted[req.rid] = None if at_once else self._steps
            return True
        load.remove_last(shared)
        return False

    def _covers(self, load: Load) -> bool:
        known = self.estimate
        if known is None:
            self.untried = len(load.reqs) > SEED
            return not self.untried
        begin, end = load.steps()
        # No further than twice what has been seen: beyond that, the parts are a guess.
        requests, tokens = begin.requests.max(), begin.tokens.max()
        beyond = requests > STRIDE * known.requests or tokens > STRIDE * known.tokens
        self.untried = bool(requests > SEED and beyond)
        if self.untried:
            return False
        most = self._most(known) * 1000 // known.waits
        return begin.longest(known.decode) <= most and 10 * end.longest(known.decode) <= PEAK_TENTHS * most

    def _most(self, known: Estimate) -> int:
        """Picoseconds that a step may take."""
        return self._target * known.milli_tokens // 1000

    def _growth(self, req: Req) -> int:
        """Tokens that a request is expected still to generate."""
        return self._figures([req])[0][2]

    def most_computed(self, most: int, running: Sequence[Req], elsewhere: int = 0) -> int:
        """Tokens of prompts that one step may compute, at most ``most``, while ``running`` wait for it.

        A quarter of that even where there is no time, or prompts that are computed here would starve. elsewhere:
        requests that wait for it on another DP rank.
        """
        known = self.estimate
        requests = max(len(running), elsewhere)
        if known is None or not any(known.computed) or not requests:
            return most
        tokens = sum(req.seqlen for req in running) if not self._shares else self._tokens(running)
        spare = self._most(known) - known.decode.of(requests, tokens) - known.computed.fixed
        return max(min(most, spare // max(1, known.computed.per_request)), most // LEAST_PART, 1)

    # ---- what is told ----

    def tell_held(self, rid: str | None, waiting: Callable[[], int]) -> None:
        """``rid`` is held back, if anybody is, and ``waiting`` requests in all with it."""
        if rid is not None and rid != self._held:
            self.held_requests += 1
            if self._counters is not None:
                self._counters.itl_held()
        before, self._held, self.waiting = self.waiting, rid, 0 if rid is None else waiting()
        if self._counters is not None and self.waiting != before:
            self._counters.itl_waiting(self.waiting)

    def state(self) -> dict[str, Any]:
        """What ``kv_pool`` says: milliseconds, microseconds for a request and nanoseconds for a token."""
        state = {
            "target_ms": self.target_ms,
            "step_ms": _ms(self.decode.seconds()),
            "predicted_ms": _ms(self.decode.seconds_explained()),
            "held": self.waiting,
            "held_requests": self.held_requests,
        }
        return state if self.estimate is None else state | _told(self.estimate)


def _locks_unread(tree: DecodeRadixCache, live: LiveReqs, coming: Sequence[Req]) -> Counter[TreeNode]:
    """Locks on the nodes of ``tree`` of what only saves have locked, failed requests, and those not of ``coming``."""
    counted = set(map(id, coming))
    others = [req.last_node for req in (*live.quarantined, *live.coming) if id(req) not in counted]
    locks: Counter[TreeNode] = Counter()
    for node in chain(tree.tier.nodes_in_use(), others):
        while node is not None and node.parent is not None:
            locks[node] += 1
            node = node.parent
    return locks


def _held_alone(locks: Counter[TreeNode]) -> int:
    """Tokens of the tree that these locks hold, and no other."""
    return sum(len(node.key.token_ids) for node, count in locks.items() if node.lock_ref == count)


def _unread_of(found: PrefixPeek, unread: Counter[TreeNode]) -> int:
    """Tokens of ``found`` that have no locks but these: no step was counted to read them, and the next ones will."""
    if not unread:
        return 0
    spans = [len(node.key.token_ids) for node in found.path[:-1]] + [found.in_last]
    return sum(span for node, span in zip(found.path, spans, strict=False) if node.lock_ref == unread.get(node))


def _told(known: Estimate) -> dict[str, Any]:
    """The part of `ItlGate.state` that all ranks go by."""
    parts = known.decode
    return {
        "fixed_ms": round(parts.fixed / 1e9, 3),
        "per_request_us": round(parts.per_request / 1e6, 3),
        "per_token_ns": round(parts.per_token / 1e3, 3),
        "tokens_per_step": known.milli_tokens / 1000,
        "answer_tokens": known.answer,
        "steps_until_it_decodes": known.delay,
        "waits": known.waits / 1000,
    }


def _aborted(req: Req) -> bool:
    return req.finished_reason.to_json().get("type") == "abort"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
