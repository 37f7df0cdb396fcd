"""Order of one admission step by prefix, and what TP ranks agree on for it.

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
    """Orders the requests of one queue by `PrefixPolicy`."""

    _policy: PrefixPolicy

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The last order of admission, and the state it depends on.
        self._ordered: tuple[tuple, list[int]] | None = None
        # Digest of this rank's matches, and the state it depends on.
        self._digested: tuple[tuple, int] = ((), 0)
        # Whether all ranks hold the same for the whole window; otherwise the next step may have other candidates.
        self.alike = True

    def version(self) -> tuple[int, ...]:
        return (*super().version(), self._policy.watches.leader_version)

    # ---- decisions, of one rank or several ----

    def decide(self, window: Window) -> Agreed:
        for i in self._follow(window, alone=True):
            self._policy.give_up(window.entries[i])
        return super().decide(window)

    def agree(self, window: Window, polls: Sequence[int]) -> Agreed | None:
        self._policy.expired.note(window.entries, self._follow(window, alone=False))
        return super().agree(window, polls)

    def _compared(self, order: list[int], entries: Sequence[Any]) -> tuple[list[int], str]:
        """Compares matches of requests that wait for no transfer, and the leaders' tokens of those that do."""
        picked = list(islice((i for i in order if not entries[i].coming), CANDIDATES))
        chosen = set(picked)
        line = [(i, entries[i].coming) for i in order if i in chosen or entries[i].coming]
        return picked, f"{line};{self._policy.watches.leader_version}"

    def _digest(self, entries: list[Any]) -> int:
        """Digest of what this rank's tree and host memory hold of the window, see `_held`."""
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
        """The whole window if all trees hold the same, as with one rank."""
        self.alike = told.alike
        if not told.alike:
            return super()._candidates(window, told, same)
        return [(window.requests[i], bool(told.capable[i])) for i in self._order(window)]

    def _follow(self, window: Window, alone: bool) -> list[int]:
        """Find for each ready request the transfer that it waits for.

        alone: there is one rank, so capabilities need no agreement. Returns the indices of requests that have reached
        their wait limit by this rank's clock.
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
        # Reuse the order while requests, waits and tree stay the same.
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
