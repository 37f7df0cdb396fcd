"""Holds back requests with which decode steps would take longer than the ITL that was promised.

A step's time follows from who is in it (step_time.py), so an admission is refused as one for which there is no memory
is: it ends the step of admission, and what waits goes by the order of admission. With nobody live the next is admitted
whatever it takes, so at least one request always runs. Requests that are on their way here count from when they will
decode, beside those that will not have ended by then.

Nothing here is measured by more than one rank: the first one's estimate is part of what ranks agree on, and decisions
follow from that, and from live requests, in whole numbers.

Upstream: none is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks, Measured
from sglang.srt.disaggregation.step_time import PS, RECENT, WIDTH, Estimate, Parts, StepTimes, mean_of
from sglang.srt.disaggregation.step_watch import StepWatch, has_prompts
from sglang.srt.mem_cache.prefix_reader import tokens_above
from sglang.srt.observability.target_metrics import TargetMetrics

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, LiveReqs
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["ItlGate", "ItlHooks", "Load"]

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
    """The longest of some steps, picoseconds, and the most requests and tokens of any of them."""

    longest: int
    requests: int
    tokens: int


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

    def steps(self, parts: Parts) -> tuple[Steps, Steps]:
        """The steps in which a request begins, and those in which one ends: between two of these all only grow."""
        tokens, starts, growth = np.array(self.reqs, np.int64).T
        ends = starts + growth
        # With what each would have had at time 0.
        begun, gone = _sums(starts, tokens - starts), _sums(ends, tokens - starts)
        found = []
        for at in (starts, ends):
            count, held = begun(at, "right") - gone(at, "left")
            read = self.shared + held + count * at
            longest = (parts.fixed + parts.per_request * count + parts.per_token * read).max()
            found.append(Steps(int(longest), int(count.max()), int(read.max())))
        return found[0], found[1]


def _sums(times: Array, numbers: Array) -> Callable[[Array, Literal["left", "right"]], Array]:
    """Asked with times, how many of ``times`` there are until each, and the sum of their ``numbers``.

    With "right", those at that time as well.
    """
    order = np.argsort(times)
    sums = np.vstack([np.arange(len(times) + 1), np.concatenate([[0], np.cumsum(numbers[order])])])
    return lambda at, side: sums[:, np.searchsorted(times[order], at, side)]


class ItlGate:
    """The target of one rank, what it knows of steps, and whom it holds back."""

    width = WIDTH

    def __init__(self, target_ms: float, shares: bool = False, counters: Any = None):
        """shares: whether a step reads what several of its requests share once."""
        self.target_ms, self._target = target_ms, round(target_ms * PS / 1000)
        self._shares = shares
        self._counters: TargetMetrics | None = counters
        self.decode = StepTimes()
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
        # Whether the last one was refused since no step has been like that, which the next ones may change.
        self.untried = False
        # The request that is held back, how many wait with it, and how many have been so far.
        self._held: str | None = None
        self.waiting = self.held_requests = 0

    @classmethod
    def of(cls, scheduler: Any) -> ItlGate | None:
        """The gate that the options of a decode worker ask for; None where they ask for none."""
        target_ms = scheduler.server_args.disaggregation_decode_itl_target
        if target_ms is None:
            return None
        backend = getattr(scheduler.tp_worker.model_runner, "attn_backend", None)
        backend = getattr(backend, "full_attn_backend", backend)
        counters = TargetMetrics.get(scheduler.server_args)
        counters.itl_target(target_ms / 1000)
        return cls(target_ms, getattr(backend, "shares_prefixes", False), counters)

    # ---- what is measured ----

    def idle(self) -> None:
        """The loop has nothing to do: the next step's time is not what passes until its end."""
        self._watch.idle()
        self._left, self._waited = 0, 0.0

    def note_step(self, batch: Any, result: Any, now: float | None = None) -> None:
        """The result of ``batch`` has been processed. Its time is that since the result before, as clients see it."""
        seconds = self._watch.lap(now)
        reqs = batch.reqs
        if not batch.forward_mode.is_decode():
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
        answer = mean_of(self._answers)
        delay = sorted(self._delays)[len(self._delays) // SHORT_PART] if self._delays else 0
        return Estimate(parts, accepted, answer, *self.decode.most(), delay, waits).figures()

    def _tokens_per_step(self) -> float:
        """Of a request, where drafts are accepted."""
        return sum(self._accepted) / len(self._accepted) if self._accepted else 1.0

    def take(self, figures: list[int]) -> None:
        """These are what all ranks go by from now on."""
        self.estimate = Estimate.of(figures)

    # ---- decisions ----

    def load(self, live: LiveReqs) -> Load:
        """What steps over the live requests read. Cost: some figures of each."""
        coming, delay, step = live.coming, self._delay(), self._steps
        load = Load(tokens_above([req.last_node for req in (*live.running, *coming)]) if self._shares else 0)
        load.reqs = self._figures(live.running)
        # Without those that have failed on their way.
        self._admitted = {req.rid: self._admitted.get(req.rid) for req in coming}
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
        shared = plan.found.evictable if self._shares else 0
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
        begin, end = load.steps(known.decode)
        # No further than twice what has been seen: beyond that, the parts are a guess.
        beyond = begin.requests > STRIDE * known.requests or begin.tokens > STRIDE * known.tokens
        self.untried = begin.requests > SEED and beyond
        if self.untried:
            return False
        # Picoseconds that a step may take.
        most = self._target * known.milli_tokens // known.waits
        return begin.longest <= most and 10 * end.longest <= PEAK_TENTHS * most

    def _growth(self, req: Req) -> int:
        """Tokens that a request is expected still to generate."""
        return self._figures([req])[0][2]

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


class StepLimit:
    """The gate in one step of admission or resume."""

    def __init__(self, gate: ItlGate, live: LiveReqs):
        self._gate, self._load = gate, gate.load(live)

    def add(self, plan: AdmissionPlan, req: Req, at_once: bool) -> bool:
        """Whether steps do not become too long with ``req``."""
        return self._gate.add(self._load, plan, req, at_once)

    def held_live(self) -> int | None:
        """While nobody ends, steps only become longer; but those that are run may be what it needs."""
        return None if self._gate.untried else len(self._load.reqs)


class ItlHooks(DecodeHooks):
    """The gate in the core's events."""

    def __init__(self, gate: ItlGate):
        self.gate = gate

    @classmethod
    def of(cls, queue: Any) -> ItlHooks | None:
        """Of a worker with a target. queue: of transfers, which knows the scheduler."""
        # Their metrics are there in any case.
        TargetMetrics.get(queue.scheduler.server_args)
        gate = ItlGate.of(queue.scheduler)
        return None if gate is None else cls(gate)

    def measured(self) -> Measured:
        """What steps take."""
        return self.gate

    def note_step(self, batch: Any, result: Any) -> None:
        """Its time is measured."""
        self.gate.note_step(batch, result)

    def idle(self) -> None:
        """No step's time."""
        self.gate.idle()

    def state(self) -> dict[str, Any]:
        """See `ItlGate.state`."""
        return {"itl": self.gate.state()}

    def limit(self, live: LiveReqs) -> StepLimit:
        """The time of the steps that ``live`` requests are in."""
        return StepLimit(self.gate, live)

    def held(self, rid: str | None, waiting: Callable[[], int]) -> None:
        """See `ItlGate.tell_held`."""
        self.gate.tell_held(rid, waiting)
