"""The requests that wait for admission on a decode worker, and what the tree holds of them.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.hooks import NO_HOOKS, DecodeHooks, Hooks
from sglang.srt.mem_cache.prefix_reader import NOTHING, PrefixPeek

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_radix.hooks import DeltaSource
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache


@dataclasses.dataclass(eq=False, slots=True)
class QueueEntry:
    """The state of a waiting request.

    arrival: its number. priority: lower goes first. prefill: the worker that computes its prompt.
    keys: its prompt from `PrefixReader.keys_of`; None for a warm-up, which shares nothing.
    """

    arrival: int
    priority: int
    prefill: Hashable
    keys: Sequence[Any] | None = None
    extra_key: str | None = None
    # What the tree held of the prompt at the last lookup, and the tree's state then.
    found: PrefixPeek = NOTHING
    found_in: Hashable = None
    # Whether a source other than prefill may bring the delta, agreed on by all TP ranks; and the
    # source that does.
    lets_source: bool = False
    source: DeltaSource | None = None
    # Its prompt in host memory while it waits; and the part to load, if longer than the tree's.
    host_watch: Any = None
    stored: PrefixPeek = NOTHING
    # When it was admitted, and the tokens of its delta.
    admitted_at: float = 0.0
    delta: int = 0

    @property
    def local(self) -> bool:
        """Whether a source other than its prefill brings its delta."""
        return self.source is not None


class AdmissionPolicy:
    """Keeps the entries of waiting requests. An extra may replace it."""

    @classmethod
    def of(cls, server_args: Any, tree: DecodeRadixCache) -> AdmissionPolicy:
        """The policy that the worker's options ask for."""
        return cls(tree)

    def __init__(self, tree: DecodeRadixCache):
        self.tree = tree
        self.hooks: Hooks[DecodeHooks] = NO_HOOKS
        # Requests that have left; equal on all TP ranks in each step.
        self.departures = 0
        self._arrivals = itertools.count()

    # ---- events ----

    def enter(
        self,
        token_ids: Sequence[int] | None,
        extra_key: str | None,
        priority: int,
        prefill: Hashable,
    ) -> QueueEntry:
        """Add a request to the queue. token_ids: its prompt, None for a warm-up."""
        entry = self._entry(token_ids, extra_key, priority, prefill)
        for entered in self.hooks.entered:
            entered(entry)
        if token_ids is not None:
            entry.host_watch = self.tree.tier.watch(token_ids, extra_key)
        return entry

    def _entry(
        self,
        token_ids: Sequence[int] | None,
        extra_key: str | None,
        priority: int,
        prefill: Hashable,
    ) -> QueueEntry:
        keys = (
            None if token_ids is None else self.tree.reader.keys_of(self.tree.shareable(token_ids))
        )
        return QueueEntry(next(self._arrivals), priority, prefill, keys, extra_key)

    def leave(self, entry: QueueEntry) -> None:
        """The request will not be admitted, or its delta is in the tree or lost."""
        self.departures += 1
        for left in self.hooks.left:
            left(entry)
        entry.keys, entry.found, entry.found_in = None, NOTHING, None
        self._leave_host(entry)

    def _leave_host(self, entry: QueueEntry) -> None:
        """Stop following the request's prompt in host memory."""
        if entry.host_watch is not None:
            self.tree.tier.end_watch(entry.host_watch)
            entry.host_watch = None

    def admitted(self, entry: QueueEntry, delta: int) -> None:
        """The request is admitted and asks for ``delta`` tokens."""
        entry.admitted_at, entry.delta = time.monotonic(), delta
        for admitted in self.hooks.admitted:
            admitted(entry)
        self._leave_host(entry)

    def committed(self, entry: QueueEntry) -> None:
        """The delta of the request is in the tree, or its last prompt step has begun here."""
        for arrived in self.hooks.arrived if entry.keys is not None else ():
            arrived(entry, time.monotonic() - entry.admitted_at)
        self.leave(entry)

    # ---- queries ----

    def find(self, entry: QueueEntry) -> PrefixPeek:
        """What the tree holds of the request's prompt; looked up again if the tree has changed."""
        tree = self.tree
        # An eviction changes the size only.
        state = tree.growth, tree.locks_taken, tree.locks_released, tree.evictable_size()
        if entry.keys is not None and entry.found_in != state:
            entry.found, entry.found_in = tree.peek(entry.keys, entry.extra_key), state
        return entry.found

    def held(self, entry: QueueEntry) -> tuple[int, int]:
        """Prompt tokens that the tree holds, and how many of them no request has locked."""
        found = self.find(entry)
        return found.length, found.evictable

    def on_host(self, entry: QueueEntry) -> int:
        """Tokens from the start of the prompt that host memory has."""
        return 0 if entry.host_watch is None else entry.host_watch.length
