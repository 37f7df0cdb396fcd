"""Chooses requests of a decode batch whose LoRA adapters can be loaded together.

Upstream: sgl-project/sglang#39332 (merged), which asks before KV is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sglang.srt.disaggregation.decode_radix.hooks import DecodeHooks

__all__ = ["AdapterHooks", "AdapterTurns", "held_back", "running_and_waiting"]

Fits = Callable[[set[str | None]], bool]
# Bypass budget if no option sets it.
MOST_OVERTAKEN = 32


@contextmanager
def held_back(scheduler: Any) -> Iterator[None]:
    """Reduce the scheduler's waiting queue to requests whose adapter can be loaded beside the running ones.

    The others wait with their KV. Requests of running adapters bypass them, as in the engine's scheduling of prefills,
    up to the bypass budget.
    """
    turns = AdapterTurns.of(scheduler)
    before = scheduler.waiting_queue
    joins = turns.joining(*running_and_waiting(scheduler))
    scheduler.waiting_queue = ready = [req for req in turns.in_turn(before) if joins(req)]
    try:
        yield
    finally:
        left = {id(req) for req in scheduler.waiting_queue}
        began = {id(req) for req in ready if id(req) not in left}
        turns.begin(req for req in ready if id(req) in began)
        known = {id(req) for req in before}
        scheduler.waiting_queue = [
            *(req for req in before if id(req) not in began),
            *(req for req in scheduler.waiting_queue if id(req) not in known),
        ]


class AdapterHooks(DecodeHooks):
    """Applies the limit of adapters to local prefills and resumed requests too.

    queue: the transfer queue, which has the scheduler.
    """

    def __init__(self, queue: Any):
        self._queue = queue

    @classmethod
    def of(cls, queue: Any) -> AdapterHooks | None:
        """For a worker with LoRA; else None."""
        return cls(queue) if queue.scheduler.server_args.enable_lora else None

    def joins(self) -> Callable[[Any], bool]:
        """Whether a request's adapter can be loaded beside those of running and waiting requests."""
        turns = AdapterTurns.of(self._queue.scheduler)
        running, waiting = running_and_waiting(self._queue.scheduler)
        # A request that ended with that step no longer needs its adapter, which may be unloaded.
        last = [req for in_step in self._queue.hooks.in_step for req in in_step() if not req.finished()]
        fits = turns.joining([*running, *last], waiting)
        for req in turns.in_turn(waiting):
            fits(req)
        return fits

    def may_begin(self) -> Callable[[Any], bool]:
        """Whether a request's adapter can be loaded beside the running ones."""
        return AdapterTurns.of(self._queue.scheduler).joining(*running_and_waiting(self._queue.scheduler))

    def began(self, reqs: Iterable[Any]) -> None:
        """Counts these requests as begun."""
        AdapterTurns.of(self._queue.scheduler).begin(reqs)


def running_and_waiting(scheduler: Any) -> tuple[list[Any], list[Any]]:
    """Requests whose adapter is in use, including partly computed prompts; and requests of all queues that are ready to
    begin."""
    of_extras = [begun() for begun in scheduler.disagg_decode_transfer_queue.hooks.begun]
    running = [req for req in scheduler.running_batch.reqs if not req.finished()]
    return (
        [*running, *chain.from_iterable(begun for begun, _ in of_extras)],
        [*scheduler.waiting_queue, *chain.from_iterable(others for _, others in of_extras)],
    )


@dataclass
class AdapterTurns:
    """Order of requests if there are more adapters than can be loaded at once.

    A held-back request is bypassed by those of running adapters. After ``most`` of these have begun, it is due: the
    adapter with the fewest running requests accepts no new ones until these have ended. Their number only falls, so a
    due request begins eventually, and others continue meanwhile.

    fits: whether adapters can be loaded at once. began: number of requests begun so far. ``held_back_at`` of a
    held-back request is ``began`` at that time. All is the same on ranks with the same queues.
    """

    fits: Fits
    most: int
    began: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> AdapterTurns:
        """The state of this scheduler, created on first use."""
        if getattr(scheduler, "adapter_turns", None) is None:
            fits = scheduler.tp_worker.model_runner.lora_manager.validate_lora_batch
            most = getattr(scheduler.server_args, "disaggregation_decode_max_overtaken", MOST_OVERTAKEN)
            scheduler.adapter_turns = cls(fits, most)
        found: AdapterTurns = scheduler.adapter_turns
        return found

    def joining(self, running: Sequence[Any], waiting: Iterable[Any]) -> Callable[[Any], bool]:
        """Returns a function that is called for one request after another: whether its adapter can be loaded beside
        ``running`` and those accepted before. Both arguments as of `running_and_waiting`."""
        adapters = set(running_adapters := Counter(req.lora_id for req in running))
        begun = set(map(id, running))
        # Held back longest; of equal ones, the first in the queue.
        first = min(filter(self.is_due, waiting), key=lambda req: req.held_back_at, default=None)
        # A slot for its adapter is reserved.
        kept = set() if first is None else {first.lora_id}
        closed = self._closed(running_adapters, first.lora_id) if first else set()

        def joins(req: Any) -> bool:
            adapter = req.lora_id
            if id(req) in begun:
                # The next slice of its prompt: its adapter is in use until it ends.
                return True
            if adapter in closed or (adapter not in adapters and not self.fits({adapter} | adapters | kept)):
                if getattr(req, "held_back_at", None) is None:
                    req.held_back_at = self.began
                return False
            adapters.add(adapter)
            return True

        return joins

    def _closed(self, running: Counter[str | None], wanted: str | None) -> set[str | None]:
        """Adapters that accept no new requests, so that ``wanted`` can be loaded once theirs have ended."""
        if self.fits({wanted, *running}):
            return set()
        order = sorted(running, key=lambda adapter: (running[adapter], adapter or ""))
        for adapter in order:
            if self.fits({wanted, *running} - {adapter}):
                return {adapter}
        return set(order)

    def is_due(self, req: Any) -> bool:
        """Whether a request has used up its bypass budget."""
        since = getattr(req, "held_back_at", None)
        return since is not None and self.began - since >= self.most

    def in_turn(self, waiting: Iterable[Any]) -> list[Any]:
        """``waiting`` with due requests first."""
        return sorted(waiting, key=lambda req: req.held_back_at if self.is_due(req) else self.began)

    def begin(self, reqs: Iterable[Any]) -> None:
        """Count requests that begin now."""
        for req in reqs:
            self.began += 1
            req.held_back_at = None
