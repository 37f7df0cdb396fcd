"""How often decode takes a step over prompts while other requests wait for it.

Such a step makes one gap between the tokens of all that decode longer, by all of its time. So it is paid for with a
part of the time of their own steps: each decode step earns as much, and the next step over prompts waits until what the
last one took has been earned. However many prompts come, the mean of the others' gaps is no more than that part longer,
but for the first after an idle moment, which gives `AHEAD` steps in advance. Where few decode, the part is larger: few
wait for it.

What a step takes is believed when it is launched and known when it has ended. It is charged what is believed then, and
the rest when the ranks next agree; more than `PROBE` decode steps earn is charged for none, since a pause, or a first
compilation, is not what the next ones take. So the mean is as promised where no step takes more than that.

A remainder that would wait here for longer than prefill takes for a short one is prefill's, and so is one whose first
token would come too little sooner for what all that decode lose by its step. Where prefill takes many times as long, as
behind long prompts, a step is charged a fifth: of four parts of the time of decode steps, one is then for prompts. And
once a request is here, it waits for no more decode steps than it was expected to, whatever has been earned by then.

The first rank measures, and all go by its figures once they have agreed on them; what is counted is the same on all.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.disaggregation.step_time import PS, Parts, StepTimes, StepWatch, has_prompts

__all__ = ["Charge", "Pace", "note_charge"]

# Of the time of decode steps, one part in so many is for steps over prompts, where this many requests or more decode.
# Of fewer it is as much more: together they lose the same time in a second.
ONE_IN, MANY = 20, 8
# A second of one's wait for a first token is worth so many seconds by which others' next tokens are later.
WORTH = 16
# Where prefill takes so many times as long as what is lost by a step, the part is one in so many.
SLOW, ONE_IN_SLOW = 4, 4
# Steps over prompts that have been earned in advance, at most.
AHEAD = 2
# After so many decode steps without one over prompts, one is taken: what is believed of its time may be too much, and
# without a sample that would stay so.
PROBE = 500


class Charge(NamedTuple):
    """For a step over prompts: what is charged when it is launched, and at most, whatever it takes.

    parts: of its time, of `ONE_IN` of which it is charged so many.
    """

    paid: int
    most: int
    parts: int = ONE_IN


def note_charge(batch: Any, charge: Charge | None) -> None:
    """Note with a step over prompts what it has been charged; None: nothing, whatever it takes."""
    # Its copies have the same.
    batch.prefill_stats.charge = charge


class Pace:
    """What steps over prompts may take of one rank's time. Times are picoseconds, in whole numbers.

    transfer_s: seconds that prefill took for short remainders of late; None where that is not known.
    """

    width = 7

    def __init__(self, transfer_s: Callable[[], float | None] = lambda: None):
        self._transfer_s = transfer_s
        self._watch = StepWatch()
        self._decode, self._computed = StepTimes(), StepTimes()
        # What all ranks go by: of a decode step, of a step over prompts by its tokens, of a short transfer; 0: unknown.
        self.decode_step = self.transfer = 0
        self.computed_step = Parts(0, 0, 0)
        # Earned and not spent; less than 0: spent and not earned.
        self.spare = 0
        # What steps have taken beyond what they were charged, until ranks agree on it: by this rank's clock.
        self._owed = 0
        # Decode steps since the last one over prompts, and in all. DP ranks that step together, for each of which all
        # wait.
        self._since, self.steps, self._sharers = 0, 0, 1
        # Tokens of a step over prompts.
        self._slice = 0

    # ---- what is measured ----

    def idle(self) -> None:
        """The loop has nothing to do: the next step's time is not what passes until its end."""
        self._watch.idle()

    def note_step(self, batch: Any, result: Any = None, now: float | None = None) -> None:
        """The result of ``batch`` has been processed. Its time is that since the result before, as clients see it."""
        seconds, everywhere = self._watch.lap(now), batch.global_num_tokens or ()
        self._sharers = max(1, len(everywhere))
        if seconds is None:
            return
        mode = batch.forward_mode
        if mode.is_decode() or mode.is_idle():
            # One in which this rank only waits for others is as long as theirs.
            requests = len(batch.reqs) if mode.is_decode() else max(everywhere, default=0)
            if requests and not has_prompts(batch):
                self._decode.note(requests, 0, seconds)
        elif mode.is_extend() and batch.prefill_stats is not None:
            self._computed.note(batch.prefill_stats.log_input_tokens, 0, seconds)
            charge: Charge | None = getattr(batch.prefill_stats, "charge", None)
            if charge is not None:
                self._owed += min(round(PS * seconds) * charge.parts // ONE_IN, charge.most) - charge.paid

    # ---- what ranks agree on ----

    def own(self) -> list[int]:
        """What this rank makes of it, as `width` figures of 0 or more."""
        step, computed, transfer_s = self._decode.seconds(), self._computed.parts(), self._transfer_s()
        if step is None:
            return [0] * self.width
        believed = [round(PS * step), *(computed or Parts(0, 0, 0)), round(PS * (transfer_s or 0.0))]
        return [*believed, max(0, self._owed), max(0, -self._owed)]

    def take(self, figures: list[int]) -> None:
        """These are what all ranks go by from now on."""
        self.decode_step, self.transfer = figures[0], figures[4]
        self.computed_step = Parts(*figures[1:4])
        self.spare += figures[6] - figures[5]
        self._owed = 0

    # ---- what is counted ----

    def decoded(self, requests: int, slice_tokens: int) -> None:
        """A decode step of ``requests`` is launched; nobody decodes: 0. slice_tokens: of a step over prompts."""
        self._since = self._since + 1 if requests else 0
        self.steps, self._slice = self.steps + 1, slice_tokens
        most = AHEAD * self._cost(slice_tokens)
        if not requests:
            self.spare, self._owed = most, 0
            return
        self.spare += self._earned(requests)
        if self.spare > most:
            # What comes too late to be charged would have been paid with this.
            self._owed -= min(max(0, self._owed), self.spare - most)
            self.spare = most

    def computed(self, tokens: int, requests: int) -> Charge | None:
        """A step over ``tokens`` tokens of prompts is launched, for which ``requests`` wait that decode.

        Returns what it is charged, see `note_charge`; None while nobody waits.
        """
        self._since = 0
        if not requests:
            return None
        charge = Charge(self._charged(tokens, requests), PROBE * self._earned(requests), self._parts(requests))
        self.spare -= charge.paid
        return charge

    @property
    def has_time(self) -> bool:
        """Whether what steps over prompts took has been earned, or there was none for long."""
        return self.spare >= 0 or self._since >= PROBE

    def is_slow(self, requests: int) -> bool:
        """Whether prefill takes many times as long as what is lost by a step here, for which ``requests`` wait."""
        return self._parts(requests) < ONE_IN

    def wait(self, delta: int, queued: int, slice_tokens: int, requests: int) -> int | None:
        """Decode steps until ``delta`` tokens are computed here, behind ``queued`` others; None: prefill is sooner.

        Or sooner by less than what ``requests``, which decode, are later by together, in `WORTH`. Where nothing is
        known of prefill, only without a wait.
        """
        earned = self._earned(requests)
        if not earned or (self._since >= PROBE and not queued):
            return 0
        lacks = (queued + delta - 1) // slice_tokens * self._charged(slice_tokens, requests) - self.spare
        steps = max(0, -(-lacks // earned))
        if not steps and not self.transfer:
            return 0
        sooner = steps * self.decode_step + self._lost(delta, requests) <= self.transfer
        return steps if sooner else None

    def _lost(self, tokens: int, requests: int) -> int:
        """By a step over so many tokens of prompts: its time, and in `WORTH` that of ``requests``, which decode."""
        cost = self._cost(tokens)
        return cost + cost * requests // WORTH

    def _parts(self, requests: int) -> int:
        """Of `ONE_IN`, how many a step over prompts is charged for."""
        lost = self._lost(self._slice, requests)
        return ONE_IN_SLOW if lost and self.transfer >= SLOW * lost else ONE_IN

    def _earned(self, requests: int) -> int:
        """With a decode step of ``requests``."""
        return self.decode_step * max(requests, MANY) // (ONE_IN * self._sharers * max(1, requests))

    def _charged(self, tokens: int, requests: int) -> int:
        """When a step over so many tokens of prompts is launched."""
        return min(self._cost(tokens) * self._parts(requests) // ONE_IN, PROBE * self._earned(requests))

    def _cost(self, tokens: int) -> int:
        """Of such a step, as is believed."""
        return self.computed_step.of(tokens, 0) if any(self.computed_step) else 0
