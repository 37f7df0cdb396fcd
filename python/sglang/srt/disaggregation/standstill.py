"""Prefills that stand still: nothing comes of what they have been asked for, though they refuse no connection.

What is bounded by who decodes, and who soon will, must not count what such a prefill owes: a scheduler that hangs would
keep the requests of all other prefills out until the transfers' time-out.

A prefill works in the order in which it is asked, so it is not a request's own wait that says so, which may be behind
thousands of tokens of others, but how long nothing at all has come of it.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.disaggregation.decode_agreement import of_first

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_admission import QueueEntry, Transfers
    from sglang.srt.disaggregation.decode_agreement import Ranks
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["Standstills"]

# Seconds without anything from a prefill: the least, how many times the longest of its transfers of late, and for each
# token of the longest prompt that it has been asked for what a slow one takes.
LEAST_S, FAR, SECONDS_PER_TOKEN = 10.0, 2.0, 1 / 2000
# Of the time between two looks at most so much counts: a worker that was paused itself has seen nothing come.
GAP_S = 2.5
# Prefills that fit into what ranks agree on; of more the others are waited for.
MOST_PREFILLS = 62


class _Sent(NamedTuple):
    """A request that a prefill has been asked for, and how many tokens of it."""

    req: Req
    prefill: Hashable
    tokens: int


class Standstills:
    """Which requests on their way to decode are not to be counted on; the same on all ranks."""

    def __init__(self, transfers: Transfers, ranks: Ranks | None = None):
        """transfers: how long those of each prefill took. ranks: that admit the same; None for one alone."""
        self._transfers, self._ranks = transfers, ranks
        # By their rids, in the order of admission.
        self._sent: dict[str, _Sent] = {}
        # Seconds in which there was a reason to look, and when the last look was, if there still is. Of each prefill
        # that owes something, when something last came of it, or it began to owe.
        self._clock = 0.0
        self._looked_at: float | None = None
        self._heard: dict[Hashable, float] = {}
        self._still: set[Hashable] = set()

    def admitted(self, req: Req, entry: QueueEntry) -> None:
        """``req`` has been admitted, and its prefill is asked for what decode lacks, unless that is computed here."""
        self._sent.pop(req.rid, None)
        if not entry.local:
            self._sent[req.rid] = _Sent(req, entry.prefill, entry.delta)
            self._heard.setdefault(entry.prefill, self._clock)

    def without(
        self, coming: Sequence[Req], look: bool, prefills: Callable[[], set[Hashable]] | None = None
    ) -> Sequence[Req]:
        """Those of ``coming`` that do not wait for a prefill which stands still.

        coming: all that are on their way to decode. look: whether to find out anew which do; on several ranks that is a
        collective, which all come to in the same step. prefills: that those who wait are to ask, None for decode
        itself. Cost: some figures of each request.
        """
        self._take_in(coming)
        self._pass_time(look)
        if look and self._sent:
            self._look()
        if not self._still or (prefills is not None and prefills() <= self._still):
            # Nobody waits but for these: to count on them keeps out nobody else.
            return coming
        sent, still = self._sent, self._still
        return [req for req in coming if req.rid not in sent or sent[req.rid].prefill not in still]

    def _take_in(self, coming: Sequence[Req]) -> None:
        """Forget what has come or failed meanwhile; as all ranks know it, so this needs no agreement."""
        waiting = {req.rid for req in coming if not req.output_ids}
        sent: dict[str, _Sent] = {}
        for rid, one in self._sent.items():
            if rid in waiting:
                sent[rid] = one
            elif one.req.output_ids:
                self._heard[one.prefill] = self._clock
                self._still.discard(one.prefill)
        self._sent = sent
        owing = {one.prefill for one in sent.values()}
        self._heard = {prefill: at for prefill, at in self._heard.items() if prefill in owing}
        self._still &= owing

    def _pass_time(self, look: bool) -> None:
        now = time.monotonic() if look else None
        if now is not None and self._looked_at is not None:
            self._clock += min(now - self._looked_at, GAP_S)
        self._looked_at = now

    def _look(self) -> None:
        longest: dict[Hashable, int] = {}
        for _, prefill, tokens in self._sent.values():
            longest[prefill] = max(tokens, longest.get(prefill, 0))
        asked = list(longest)[:MOST_PREFILLS]
        still = sum(1 << i for i, prefill in enumerate(asked) if self._is_still(prefill, longest[prefill]))
        if self._ranks is not None and self._ranks.size > 1:
            # By the first one's clock, and by what it has measured.
            still = of_first(self._ranks.group, still)
        # What it is asked for meanwhile, however long, is no word of it: see `_take_in`.
        self._still |= {prefill for i, prefill in enumerate(asked) if still >> i & 1}

    def _is_still(self, prefill: Hashable, tokens: int) -> bool:
        """By this rank's clock. tokens: of the longest prompt that ``prefill`` has been asked for."""
        pace = self._transfers.pace(prefill)
        allowed = max(LEAST_S, SECONDS_PER_TOKEN * tokens, 0.0 if pace is None else FAR * pace.longest)
        return self._clock - self._heard[prefill] > allowed
