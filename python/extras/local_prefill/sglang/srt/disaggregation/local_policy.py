"""Which remainders of prompts decode computes, and when: a token bucket, and one comparison with prefill.

A step over prompts makes one gap between the tokens of all requests that decode longer. So decode steps fill a bucket
with a part of their own time, and each remainder takes out its share of its steps. A remainder waits while the bucket
is overdrawn, or goes to prefill if that is sooner. Once admitted, it waits for no more decode steps than expected.

Times are thousandths of a decode step. All ranks go by the first one's figures, in whole numbers, and decide alike.

Upstream: none is known. NVIDIA Dynamo decides the same in its router (conditional disaggregation).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

__all__ = ["AUTO", "UNIT", "Bucket", "OtherRanks", "Policy", "ShortTransfers"]

UNIT = 1000  #: A decode step.
#: Decode steps give one part in so many of their time to steps over prompts, if this many requests or more decode. If
#: fewer decode, the part is larger: together they lose the same time.
ONE_IN, MANY = 20, 8
#: The part if prefill takes so many times as long as a step here; how many times the debt a conversation then may have.
ONE_IN_SLOW, SLOW, MORE_DEBT = 4, 4, 8
WORTH = 16  #: A second sooner for a first token is worth so many seconds by which others' next tokens are later.
FULL = 2  #: Steps over prompts that the bucket holds; as many times more as the part is larger.
#: Samples kept; how many times the median one counts at most; decode steps after which a cost is taken for unknown.
KEPT, MOST_SAMPLE, FORGOTTEN = 32, 4, 500


class Policy(NamedTuple):
    """Limits in tokens, the same on all ranks.

    most: of a remainder. slice: of a step while other requests decode. step: of a step while none does. debt: what
    decode has computed of a conversation and prefill has never seen. paced: whether the bucket limits steps; not where
    the operator names a number of tokens.
    """

    most: int
    slice: int
    step: int
    debt: int
    paced: bool = False

    @classmethod
    def of(cls, asked: str) -> Policy | None:
        """What ``--disaggregation-decode-local-prefill`` asks for; None for nothing. Raises ValueError."""
        if asked in ("off", "false"):
            # YAML makes the second of the first.
            return None
        if asked == "auto":
            return AUTO
        if not (asked.isdecimal() and int(asked)):
            raise ValueError(f"--disaggregation-decode-local-prefill is {asked!r}: give off, auto or 1 token or more.")
        most = int(asked)
        return cls(most, AUTO.slice, step=max(AUTO.step, most), debt=max(AUTO.debt, most))

    def within(self, most: int, slices: bool) -> Policy:
        """The same, with at most ``most`` tokens in a step, and in a remainder if there are no slices."""
        longest = self.most if slices else min(self.most, most)
        return self._replace(step=min(self.step, most), slice=min(self.slice, most), most=longest)


AUTO = Policy(most=128, slice=64, step=2048, debt=512, paced=True)  #: A chat's turn has fewer than 128 tokens.


def _has_prompts(batch: Any) -> bool:
    """Whether a step computes prompts, on this or another of the DP ranks that step together."""
    return bool(getattr(batch, "is_extend_in_batch", False))


class ShortTransfers:
    """How long the last transfers from prefills took, from admission to commit."""

    KEPT = 8
    # What a transfer of fewer tokens takes is not for its tokens.
    LEAST_TOKENS = 256
    # Older ones say nothing of what a prefill does now.
    LATE_S = 30.0

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=self.KEPT)

    def done(self, tokens: int, seconds: float) -> None:
        """A transfer of ``tokens`` tokens was committed ``seconds`` after its admission."""
        self._last.append((time.monotonic(), seconds / max(tokens, self.LEAST_TOKENS)))

    def short(self) -> float | None:
        """Seconds of a transfer of few tokens, from any prefill; None if there were none of late."""
        since = time.monotonic() - self.LATE_S
        found = [seconds_per_token for at, seconds_per_token in self._last if at > since]
        return median(found) * self.LEAST_TOKENS if found else None


class Bucket:
    """Time for steps over prompts. transfer_s: what prefill took for short remainders of late; None if unknown."""

    width = 2

    def __init__(self, transfer_s: Callable[[], float | None] = lambda: None):
        self._transfer_s = transfer_s
        # When the last step ended, if the loop has not been idle since.
        self._ended: float | None = None
        self._decode, self._computed = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        # Agreed on: of a request in a step over prompts, of prefill; 0: unknown.
        self.cost = self.prefill = 0
        self.level = self.steps = self._since = 0
        self._sharers = 1  # DP ranks that step together: all wait for a step of each.

    def idle(self) -> None:
        """The loop has nothing to do: the time until the next result is not that of a step."""
        self._ended = None

    def note_step(self, batch: Any, result: Any = None, now: float | None = None) -> None:
        """The result of ``batch`` has been processed; its time is that since the result before."""
        began, self._ended = self._ended, time.monotonic() if now is None else now
        everywhere = batch.global_num_tokens or ()
        self._sharers = max(1, len(everywhere))
        if began is None:
            return
        seconds = self._ended - began
        if batch.forward_mode.is_extend() and batch.prefill_stats is not None:
            self._computed.append(seconds / max(1, len(batch.reqs)))
        elif not _has_prompts(batch) and (batch.reqs or max(everywhere, default=0)):
            self._decode.append(seconds)

    def own(self) -> list[int]:
        """This rank's figures, `width` of 0 or more."""
        if not self._decode:
            return [0] * self.width
        step, cost = median(self._decode), 0.0
        if self._computed:
            most = MOST_SAMPLE * median(self._computed)
            cost = fmean(min(most, seconds) for seconds in self._computed)
        return [round(UNIT * seconds / step) for seconds in (cost, self._transfer_s() or 0.0)]

    def take(self, figures: list[int]) -> None:
        """All ranks go by these from now on."""
        self.cost, self.prefill = figures

    def decoded(self, requests: int) -> None:
        """A decode step of ``requests`` is launched; 0: nobody decodes."""
        self.steps += 1
        self._since = self._since + 1 if requests else 0
        full = FULL * self.cost * ONE_IN // self._one_in(requests)
        self.level = min(full, self.level + self._earned(requests)) if requests else full

    def spend(self, steps: int) -> None:
        """A remainder of so many steps has been admitted, beside requests that decode."""
        self.level, self._since = self.level - steps * self.cost, 0

    def wait(self, steps: int, requests: int) -> int | None:
        """Decode steps until a remainder of so many steps may begin; None: prefill is sooner.

        Or later by less than what the ``requests`` that decode would lose, in `WORTH`. If nothing is known of prefill,
        only a remainder that need not wait is computed here.
        """
        if not self.cost or (self._since >= FORGOTTEN and self.level >= 0):
            return 0
        waits = -(-max(0, -self.level) // self._earned(requests))
        if not waits and not self.prefill:
            return 0
        return waits if UNIT * waits + steps * self._lost(requests) <= self.prefill else None

    def is_slow(self, requests: int) -> bool:
        """Whether prefill takes many times as long as a step here."""
        return bool(self.cost) and self.prefill >= SLOW * self._lost(requests)

    def _lost(self, requests: int) -> int:
        """By a step over prompts: its time, and that of the ``requests`` that wait for it, in `WORTH`."""
        return self.cost + self.cost * requests // WORTH

    def _earned(self, requests: int) -> int:
        """With a decode step of ``requests``."""
        return max(1, UNIT * max(requests, MANY) // (self._one_in(requests) * self._sharers * requests))

    def _one_in(self, requests: int) -> int:
        return ONE_IN_SLOW if self.is_slow(requests) else ONE_IN


class OtherRanks:
    """The DP ranks that step together with this one, by what the engine tells all of each step.

    decoding: requests of the rank that decodes the most of them, this one included, as far as is known; 0 where ranks
    do not step together, and where the engine tells none of the others (DeepEP with --moe-dense-tp-size 1).
    """

    def __init__(self) -> None:
        self.decoding = 0
        # Whether there are any.
        self.together = False

    def idle(self) -> None:
        """The loop has nothing to do, on any of them."""
        self.decoding = 0

    def note_step(self, batch: Any, result: Any = None) -> None:
        """The result of ``batch`` has been processed. A rank that computes prompts counts these, and not requests."""
        everywhere = batch.global_num_tokens or ()
        self.together = len(everywhere) > 1
        if everywhere and not _has_prompts(batch):
            self.decoding = max(everywhere)
