"""Decides which remainders of prompts decode computes, and when: a token bucket, and one comparison with prefill.

A prefill step delays the next token of all decoding requests. So decode steps earn credit, a share of their own time,
and each remainder costs its share of its steps. A remainder waits while the bucket is overdrawn, or goes to prefill if
that is sooner. Once admitted, it waits for at most the expected number of decode steps.

Times are integers, in 1/1000 of a decode step. All ranks use the first rank's figures, so they decide alike.

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
#: Prefill steps get 1/ONE_IN of the time of decode steps with MANY or more requests; with fewer requests the share is
#: larger, since together they lose the same time.
ONE_IN, MANY = 20, 8
#: Their share if prefill takes SLOW times as long as a step here; the limit of debt is then MORE_DEBT times larger.
ONE_IN_SLOW, SLOW, MORE_DEBT = 4, 4, 8
WORTH = 16  #: A first token one second sooner may delay others' next tokens by so many seconds in sum.
FULL = 2  #: Prefill steps that a full bucket pays for; scaled with the share.
#: Samples kept; cap of a sample as a multiple of the median; decode steps after which a cost counts as unknown.
KEPT, MOST_SAMPLE, FORGOTTEN = 32, 4, 500


class Policy(NamedTuple):
    """Limits in tokens, the same on all ranks.

    most: of a remainder. slice: of a step while other requests decode. step: of a step while none does. debt: tokens
    of a conversation that decode has computed and prefill has never seen. paced: whether the bucket limits steps;
    False if the operator gives a number of tokens.
    """

    most: int
    slice: int
    step: int
    debt: int
    paced: bool = False

    @classmethod
    def of(cls, asked: str) -> Policy | None:
        """The policy for ``--disaggregation-decode-local-prefill``; None if off. Raises ValueError."""
        if asked in ("off", "false"):
            # YAML turns "off" into "false".
            return None
        if asked == "auto":
            return AUTO
        if not (asked.isdecimal() and int(asked)):
            raise ValueError(f"--disaggregation-decode-local-prefill is {asked!r}: give off, auto or 1 token or more.")
        most = int(asked)
        return cls(most, AUTO.slice, step=max(AUTO.step, most), debt=max(AUTO.debt, most))

    def within(self, most: int, slices: bool) -> Policy:
        """The policy with at most ``most`` tokens in a step, and in a remainder without slices."""
        longest = self.most if slices else min(self.most, most)
        return self._replace(step=min(self.step, most), slice=min(self.slice, most), most=longest)


AUTO = Policy(most=128, slice=64, step=2048, debt=512, paced=True)  #: A chat turn has fewer than 128 tokens.


def _has_prompts(batch: Any) -> bool:
    """Whether a step computes prompts, on this or another DP rank of the joint step."""
    return bool(getattr(batch, "is_extend_in_batch", False))


class ShortTransfers:
    """Durations of recent transfers from prefills, from admission to commit."""

    KEPT = 8
    # Shorter transfers take as long as this many tokens.
    LEAST_TOKENS = 256
    # Older transfers do not reflect prefill's present load.
    LATE_S = 30.0

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=self.KEPT)

    def done(self, tokens: int, seconds: float) -> None:
        """A transfer of ``tokens`` tokens was committed ``seconds`` after its admission."""
        self._last.append((time.monotonic(), seconds / max(tokens, self.LEAST_TOKENS)))

    def short(self) -> float | None:
        """Seconds of a short transfer from any prefill; None without a recent one."""
        since = time.monotonic() - self.LATE_S
        found = [seconds_per_token for at, seconds_per_token in self._last if at > since]
        return median(found) * self.LEAST_TOKENS if found else None


class Bucket:
    """Token bucket for prefill steps. transfer_s: seconds of recent short transfers; None if unknown."""

    width = 2

    def __init__(self, transfer_s: Callable[[], float | None] = lambda: None):
        self._transfer_s = transfer_s
        # End of the last step; None after the loop was idle.
        self._ended: float | None = None
        self._decode, self._computed = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        # Agreed by all ranks: time of a request in a prefill step, and of prefill; 0: unknown.
        self.cost = self.prefill = 0
        self.level = self.steps = self._since = 0
        self._sharers = 1  # DP ranks in a joint step: each waits for the steps of all.

    def idle(self) -> None:
        """The loop is idle: the time until the next result is not a step's."""
        self._ended = None

    def note_step(self, batch: Any, result: Any = None, now: float | None = None) -> None:
        """The result of ``batch`` was processed; its time counts from the result before."""
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
        """This rank's figures: `width` numbers >= 0."""
        if not self._decode:
            return [0] * self.width
        step, cost = median(self._decode), 0.0
        if self._computed:
            most = MOST_SAMPLE * median(self._computed)
            cost = fmean(min(most, seconds) for seconds in self._computed)
        return [round(UNIT * seconds / step) for seconds in (cost, self._transfer_s() or 0.0)]

    def take(self, figures: list[int]) -> None:
        """Apply the figures agreed by all ranks."""
        self.cost, self.prefill = figures

    def decoded(self, requests: int) -> None:
        """A decode step of ``requests`` requests is launched; 0: none decodes."""
        self.steps += 1
        self._since = self._since + 1 if requests else 0
        full = FULL * self.cost * ONE_IN // self._one_in(requests)
        self.level = min(full, self.level + self._earned(requests)) if requests else full

    def spend(self, steps: int) -> None:
        """A remainder of ``steps`` steps was admitted beside decoding requests."""
        self.level, self._since = self.level - steps * self.cost, 0

    def wait(self, steps: int, requests: int) -> int | None:
        """Decode steps until a remainder of ``steps`` steps may begin; None: send it to prefill.

        It goes to prefill if that is sooner, or later by less than the ``requests`` decoding would lose, by `WORTH`.
        If prefill's time is unknown, only a remainder that need not wait is computed here.
        """
        if not self.cost or (self._since >= FORGOTTEN and self.level >= 0):
            return 0
        waits = -(-max(0, -self.level) // self._earned(requests))
        if not waits and not self.prefill:
            return 0
        return waits if UNIT * waits + steps * self._lost(requests) <= self.prefill else None

    def is_slow(self, requests: int) -> bool:
        """Whether prefill takes `SLOW` times as long as a step here."""
        return bool(self.cost) and self.prefill >= SLOW * self._lost(requests)

    def _lost(self, requests: int) -> int:
        """Cost of a prefill step: its time, and that of the ``requests`` that wait for it, by `WORTH`."""
        return self.cost + self.cost * requests // WORTH

    def _earned(self, requests: int) -> int:
        """Credit of a decode step of ``requests`` requests."""
        return max(1, UNIT * max(requests, MANY) // (self._one_in(requests) * self._sharers * requests))

    def _one_in(self, requests: int) -> int:
        return ONE_IN_SLOW if self.is_slow(requests) else ONE_IN


class OtherRanks:
    """DP ranks that step jointly with this one, from the engine's figures of each step.

    decoding: the largest number of decoding requests on any rank, this one included, as far as known; 0 if ranks do
    not step jointly or the engine does not exchange the figures (DeepEP with --moe-dense-tp-size 1).
    """

    def __init__(self) -> None:
        self.decoding = 0
        # Whether there are other ranks.
        self.together = False

    def idle(self) -> None:
        """All ranks are idle."""
        self.decoding = 0

    def note_step(self, batch: Any, result: Any = None) -> None:
        """The result of ``batch`` was processed. For steps over prompts the engine counts tokens, not requests."""
        everywhere = batch.global_num_tokens or ()
        self.together = len(everywhere) > 1
        if everywhere and not _has_prompts(batch):
            self.decoding = max(everywhere)
