"""Which requests one step of admission looks at, by prefix, and what the TP ranks agree on of it.

Upstream: none is known.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.schedule import READY, Agreed, Schedule, Window, takes_prefix
from sglang.srt.disaggregation.decode_radix.tp_agreement import CANDIDATES
from sglang.srt.disaggregation.prefix_policy import Candidate, PrefixEntry, PrefixPolicy, admission_order
from sglang.srt.mem_cache.tier import NO_TIER

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.tp_agreement import Agreement

__all__ = ["PrefixSchedule"]


class PrefixSchedule(Schedule):
    """Puts the requests of one queue in the order of a policy by prefix."""

    _policy: PrefixPolicy

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The last order of admission, and the state in which it was found.
        self._ordered: tuple[tuple, list[int]] | None = None
        # What the tree held of a window, by rank, and the state in which it did.
        self._digested: tuple[tuple, int] = ((), 0)
        # Whether the trees of all ranks hold the same of all of a step's window: if not, others may be candidates in
        # the next step.
        self.alike = True

    def version(self) -> tuple[int, ...]:
        return (*super().version(), self._policy.watches.leader_version)

    # ---- what is decided, by one rank or by several ----

    def decide(self, window: Window) -> Agreed:
        for i in self._follow(window, alone=True):
            self._policy.give_up(window.entries[i])
        return super().decide(window)

    def agree(self, window: Window, polls: Sequence[int]) -> Agreed | None:
        self._policy.expired.note(window.entries, self._follow(window, alone=False))
        return super().agree(window, polls)

    def _compared(self, order: list[int], entries: Sequence[Any]) -> tuple[list[int], str]:
        """Of those that wait for nobody; of the others it must be the same for which transfer they do."""
        picked = list(islice((i for i in order if not entries[i].coming), CANDIDATES))
        chosen = set(picked)
        line = [(i, entries[i].coming) for i in order if i in chosen or entries[i].coming]
        return picked, f"{line};{self._policy.watches.leader_version}"

    def _digest(self, entries: list[Any]) -> int:
        """What this rank's tree and host memory hold of all of a window, see `_held`."""
        tree = self._tree
        seen = self.version(), tree.evictable_size(), tree.protected_size(), entries
        if self._digested[0] != seen or tree.tier is not NO_TIER:
            held = array("q", [figure for entry in entries for figure in self._figures(entry)])
            self._digested = seen, zlib.crc32(held.tobytes())
        return self._digested[1]

    def _learn(self, entries: Sequence[Any], told: Agreement) -> None:
        super()._learn(entries, told)
        if self._policy.may_follow:
            for entry, capable in zip(entries, told.capable, strict=True):
                entry.takes_prefix = bool(capable)

    def _candidates(self, window: Window, told: Agreement, same: dict[int, bool]) -> list[tuple[DecodeRequest, bool]]:
        """All of the window where the trees are alike, as with one rank alone."""
        self.alike = told.alike
        if not told.alike:
            return super()._candidates(window, told, same)
        return [(window.requests[i], bool(told.capable[i])) for i in self._order(window)]

    def _follow(self, window: Window, alone: bool) -> list[int]:
        """Find out for each request that is ready whether it waits for the transfer of another.

        alone: whether there is one rank, which need not be agreed with on whose prefill takes a prefix. Returns the
        indices of those that by this rank's clock have waited long enough.
        """
        policy = self._policy
        entries: Sequence[Any] = window.entries
        if not policy.may_follow:
            policy.stop_following(entries)
            return []
        now, expired = time.monotonic(), []
        for i, decode_req in enumerate(window.requests):
            if decode_req.phase is not READY:
                continue
            entry = entries[i]
            if alone:
                entry.takes_prefix = takes_prefix(decode_req)
            try:
                if policy.find_leader(entry, now):
                    expired.append(i)
            except Exception as e:
                decode_req.mark_failed(e)
        return expired

    # ---- the order ----

    def _order(self, window: Window) -> list[int]:
        requests, entries = window.requests, window.entries
        ready = [i for i, dr in enumerate(requests) if dr.phase is READY]
        if len(ready) < 2:
            return ready
        # The same requests, of which the same wait for others, and the same tree: the same order.
        tree = self._tree
        coming = [entries[i].coming for i in ready] if self._policy.may_follow else []
        sizes = tree.evictable_size(), tree.protected_size()
        seen: tuple[Any, ...] = (self.version(), *sizes, ready, coming, entries)
        if self._ordered is None or self._ordered[0] != seen:
            candidates = [self._candidate(requests[i], entries[i]) for i in ready]
            self._ordered = seen, [ready[n] for n in admission_order(candidates, self._policy.max_overtaken)]
        return self._ordered[1]

    def _candidate(self, decode_req: DecodeRequest, entry: PrefixEntry) -> Candidate:
        try:
            return self._policy.candidate(entry, len(decode_req.req.origin_input_ids))
        except Exception as e:
            decode_req.mark_failed(e)
            return Candidate(entry.arrival, entry.priority, 0, 0, 0, 0, entry.overtaken)
