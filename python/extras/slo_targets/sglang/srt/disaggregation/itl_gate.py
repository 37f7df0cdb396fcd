"""Delays admissions that would make decode steps longer than the ITL target.

A step's time is predicted from its requests (step_time.py). An admission over the target is handled like one without
memory: it ends the admission step, and the order of admission stays. If no request is live, the next is always
admitted. Requests in transfer count from the step in which they are expected to decode.

Rank 0's estimate is part of the reduction over ranks. Decisions depend on it and on live requests only, in integers.

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

# Requests admitted before the first estimate; and the largest load to try, as a multiple of the largest measured.
SEED, STRIDE = 4, 2
# Tokens expected of an answer before any has ended; the least part of a mean answer still expected of a longer one; and
# the answers in the mean.
UNKNOWN_ANSWER, LEAST_PART, ANSWERS = 256, 4, 64
# Bound of the longest step that live requests can grow into, in tenths of the target.
PEAK_TENTHS = 11
# The delay used is exceeded by all but one in so many admitted requests.
SHORT_PART = 4
# Steps between two reports to the metrics.
REPORT = 16


class Steps(NamedTuple):
    """The maxima over some steps: picoseconds, requests, tokens."""

    longest: int
    requests: int
    tokens: int


class Load:
    """KV reads of the next steps. shared: tokens that a step reads once for all requests."""

    def __init__(self, shared: int = 0):
        self.shared = shared
        # Per request: tokens at its start, steps until it starts, and tokens by which it grows, one per step.
        self.reqs: list[tuple[int, int, int]] = []

    def add(self, tokens: int, growth: int, start: int = 0, shared: int = 0) -> None:
        """Add a request that reads ``tokens`` of its own from step ``start`` on and grows by ``growth`` tokens."""
        self.reqs.append((tokens, start, growth))
        self.shared += shared

    def remove_last(self, shared: int) -> None:
        """Undo the last `add`. shared: as given to it."""
        self.reqs.pop()
        self.shared -= shared

    def steps(self, parts: Parts) -> tuple[Steps, Steps]:
        """Maxima over the steps in which a request starts, and over those in which one ends: extremes lie there."""
        tokens, starts, growth = np.array(self.reqs, np.int64).T
        ends = starts + growth
        # Token counts extrapolated to step 0.
        begun, gone = _sums(starts, tokens - starts), _sums(ends, tokens - starts)
        found = []
        for at in (starts, ends):
            count, held = begun(at, "right") - gone(at, "left")
            read = self.shared + held + count * at
            longest = (parts.fixed + parts.per_request * count + parts.per_token * read).max()
            found.append(Steps(int(longest), int(count.max()), int(read.max())))
        return found[0], found[1]


def _sums(times: Array, numbers: Array) -> Callable[[Array, Literal["left", "right"]], Array]:
    """A function of times: the number of ``times`` before each, and the sum of their ``numbers``.

    Side "right" includes equal times.
    """
    order = np.argsort(times)
    sums = np.vstack([np.arange(len(times) + 1), np.concatenate([[0], np.cumsum(numbers[order])])])
    return lambda at, side: sums[:, np.searchsorted(times[order], at, side)]


class ItlGate:
    """The ITL target of one rank: measurements, estimate and decisions."""

    width = WIDTH

    def __init__(self, target_ms: float, shares: bool = False, counters: Any = None):
        """shares: whether a step reads KV that its requests share once."""
        self.target_ms, self._target = target_ms, round(target_ms * PS / 1000)
        self._shares = shares
        self._counters: TargetMetrics | None = counters
        self.decode = StepTimes()
        # Agreed on by all ranks.
        self.estimate: Estimate | None = None
        self._accepted: deque[float] = deque(maxlen=RECENT)
        self._answers: deque[int] = deque(maxlen=ANSWERS)
        self._watch = StepWatch()
        # Requests that continue from the last decode step, and their summed seconds in prefill steps since.
        self._left, self._waited = 0, 0.0
        # The requests of the last step, and the tokens among theirs that it read once instead of again.
        self._reqs: list[Req] = []
        self._read_once = 0
        self._steps = 0
        # Step of admission of requests that do not decode yet, None if no transfer is needed; and the last delays from
        # admission to decode, steps.
        self._admitted: dict[str, int | None] = {}
        self._delays: deque[int] = deque(maxlen=ANSWERS)
        # Whether the last refusal was for a load beyond what has been measured; the next steps may extend that.
        self.untried = False
        # The delayed request, the requests that wait with it, and the number delayed so far.
        self._held: str | None = None
        self.waiting = self.held_requests = 0

    @classmethod
    def of(cls, scheduler: Any) -> ItlGate | None:
        """The gate of a decode worker; None without an ITL target."""
        target_ms = scheduler.server_args.disaggregation_decode_itl_target
        if target_ms is None:
            return None
        backend = getattr(scheduler.tp_worker.model_runner, "attn_backend", None)
        backend = getattr(backend, "full_attn_backend", backend)
        counters = TargetMetrics.get(scheduler.server_args)
        counters.itl_target(target_ms / 1000)
        return cls(target_ms, getattr(backend, "shares_prefixes", False), counters)

    # ---- measurement ----

    def idle(self) -> None:
        """The loop is idle: the time until the next step ends is no step time."""
        self._watch.idle()
        self._left, self._waited = 0, 0.0

    def note_step(self, batch: Any, result: Any, now: float | None = None) -> None:
        """Note a processed result. A step's time runs from the result before, as clients see it."""
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
        own = max(1, len(batch.reqs))
        if has_prompts(batch):
            # Token counts include other DP ranks' prompts, and the step lasted as long as those.
            self._waited += own * max(0.0, seconds - (self.decode.seconds() or seconds))
        else:
            self.decode.note(self._requests(batch), self._tokens(batch.reqs), seconds, self._waited / own)
            self._waited = 0.0

    def _note_joined(self, reqs: Sequence[Req]) -> None:
        """Note the delays of requests that decode for the first time."""
        admitted = self._admitted
        for rid in [req.rid for req in reqs if req.rid in admitted] if admitted else ():
            step = admitted.pop(rid, None)
            if step is not None:
                self._delays.append(self._steps - step)

    @staticmethod
    def _requests(batch: Any) -> int:
        """Requests of a step; with DP attention those of the fullest rank, for which the others wait."""
        return max([len(batch.reqs), *(batch.global_num_tokens or ())])

    def _tokens(self, reqs: Sequence[Req]) -> int:
        """KV tokens that a step over ``reqs`` reads."""
        tokens = sum([len(req.origin_input_ids) + len(req.output_ids) for req in reqs])
        if not self._shares:
            return tokens
        if reqs != self._reqs:
            self._reqs = list(reqs)
            held = sum([req.cache_protected_len for req in reqs])
            self._read_once = held - tokens_above([req.last_node for req in reqs])
        return max(1, tokens - self._read_once)

    # ---- agreement of ranks ----

    def own(self) -> list[int]:
        """This rank's estimate as `WIDTH` figures of 0 or more."""
        parts = self.decode.parts()
        if parts is None:
            return [0] * WIDTH
        accepted, waits = round(1000 * self._tokens_per_step()), round(1000 * self.decode.waits())
        answer = mean_of(self._answers)
        delay = sorted(self._delays)[len(self._delays) // SHORT_PART] if self._delays else 0
        return Estimate(parts, accepted, answer, *self.decode.most(), delay, waits).figures()

    def _tokens_per_step(self) -> float:
        """Tokens per request and step; above 1 with speculation."""
        return sum(self._accepted) / len(self._accepted) if self._accepted else 1.0

    def take(self, figures: list[int]) -> None:
        """Take the figures that all ranks agreed on."""
        self.estimate = Estimate.of(figures)

    # ---- decisions ----

    def load(self, live: LiveReqs) -> Load:
        """KV reads of the live requests' next steps. Cost: a few figures per request."""
        coming, delay, step = live.coming, self._delay(), self._steps
        load = Load(tokens_above([req.last_node for req in (*live.running, *coming)]) if self._shares else 0)
        load.reqs = self._figures(live.running)
        # Drops requests that failed in transfer.
        self._admitted = {req.rid: self._admitted.get(req.rid) for req in coming}
        for req, (tokens, _, growth) in zip(coming, self._figures(coming), strict=True):
            since = self._admitted[req.rid]
            load.add(tokens, growth, 0 if since is None else max(0, delay - step + since))
        return load

    def _figures(self, reqs: Sequence[Req]) -> list[tuple[int, int, int]]:
        """`Load.reqs` of ``reqs``, as if all ran.

        Called for all running requests in each admission step: no call per request.
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
        """Steps from admission to decode, at the lower quartile."""
        return 0 if self.estimate is None else self.estimate.delay

    def add(self, load: Load, plan: AdmissionPlan, req: Req, at_once: bool = False) -> bool:
        """Add ``req`` to ``load``, unless steps become too long. plan: of its admission.

        at_once: it needs no transfer, so it decodes beside the requests that run now.
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
        # Beyond twice the measured load the estimate is a guess.
        beyond = begin.requests > STRIDE * known.requests or begin.tokens > STRIDE * known.tokens
        self.untried = begin.requests > SEED and beyond
        if self.untried:
            return False
        # The longest step allowed, picoseconds.
        most = self._target * known.milli_tokens // known.waits
        return begin.longest <= most and 10 * end.longest <= PEAK_TENTHS * most

    def _growth(self, req: Req) -> int:
        """Tokens still expected of a request."""
        return self._figures([req])[0][2]

    # ---- reports ----

    def tell_held(self, rid: str | None, waiting: Callable[[], int]) -> None:
        """Report the delayed request, None if there is none. waiting: number of requests that wait with it."""
        if rid is not None and rid != self._held:
            self.held_requests += 1
            if self._counters is not None:
                self._counters.itl_held()
        before, self._held, self.waiting = self.waiting, rid, 0 if rid is None else waiting()
        if self._counters is not None and self.waiting != before:
            self._counters.itl_waiting(self.waiting)

    def state(self) -> dict[str, Any]:
        """For ``kv_pool``; units are in the names."""
        state = {
            "target_ms": self.target_ms,
            "step_ms": _ms(self.decode.seconds()),
            "predicted_ms": _ms(self.decode.seconds_explained()),
            "held": self.waiting,
            "held_requests": self.held_requests,
        }
        return state if self.estimate is None else state | _told(self.estimate)


def _told(known: Estimate) -> dict[str, Any]:
    """The part of `ItlGate.state` that all ranks agree on."""
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
    """The gate during one step of admission or resume."""

    def __init__(self, gate: ItlGate, live: LiveReqs):
        self._gate, self._load = gate, gate.load(live)

    def add(self, plan: AdmissionPlan, req: Req, at_once: bool) -> bool:
        return self._gate.add(self._load, plan, req, at_once)

    def held_live(self) -> int | None:
        """None if the next steps may allow the refused load: it was untried. Otherwise a request has to end."""
        return None if self._gate.untried else len(self._load.reqs)


class ItlHooks(DecodeHooks):
    """Connects `ItlGate` to the core's events."""

    def __init__(self, gate: ItlGate):
        self.gate = gate

    @classmethod
    def of(cls, queue: Any) -> ItlHooks | None:
        """None without a target. queue: the transfer queue."""
        # The metrics exist without a target too.
        TargetMetrics.get(queue.scheduler.server_args)
        gate = ItlGate.of(queue.scheduler)
        return None if gate is None else cls(gate)

    def measured(self) -> Measured:
        return self.gate

    def note_step(self, batch: Any, result: Any) -> None:
        self.gate.note_step(batch, result)

    def idle(self) -> None:
        self.gate.idle()

    def state(self) -> dict[str, Any]:
        return {"itl": self.gate.state()}

    def limit(self, live: LiveReqs) -> StepLimit:
        return StepLimit(self.gate, live)

    def held(self, rid: str | None, waiting: Callable[[], int]) -> None:
        self.gate.tell_held(rid, waiting)
