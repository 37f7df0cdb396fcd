"""Which requests a decode batch has room for, also when each has a LoRA adapter.

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
# Where no option says how often a request may be overtaken.
MOST_OVERTAKEN = 32


@contextmanager
def held_back(scheduler: Any) -> Iterator[None]:
    """Meanwhile the scheduler's waiting queue has only requests whose adapter fits beside those that run.

    Others wait with their KV, and those of a running adapter go before them, as in the engine's own scheduling of
    prefills, but not more often than a request may be overtaken.
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
    """Holds back requests whose adapter does not fit, also where a step computes prompts, or retracted ones come back.

    queue: of transfers, which knows the scheduler.
    """

    def __init__(self, queue: Any):
        self._queue = queue

    @classmethod
    def of(cls, queue: Any) -> AdapterHooks | None:
        """Of a worker with LoRA."""
        return cls(queue) if queue.scheduler.server_args.enable_lora else None

    def joins(self) -> Callable[[Any], bool]:
        """Whether its adapter fits beside those that run, and all that wait."""
        turns = AdapterTurns.of(self._queue.scheduler)
        running, waiting = running_and_waiting(self._queue.scheduler)
        # One that has ended with that step needs its adapter no more, which may be unloaded.
        last = [req for in_step in self._queue.hooks.in_step for req in in_step() if not req.finished()]
        fits = turns.joining([*running, *last], waiting)
        for req in turns.in_turn(waiting):
            fits(req)
        return fits

    def may_begin(self) -> Callable[[Any], bool]:
        """Whether its adapter fits beside those that run."""
        return AdapterTurns.of(self._queue.scheduler).joining(*running_and_waiting(self._queue.scheduler))

    def began(self, reqs: Iterable[Any]) -> None:
        """It is nobody's turn because of these any more."""
        AdapterTurns.of(self._queue.scheduler).begin(reqs)


def running_and_waiting(scheduler: Any) -> tuple[list[Any], list[Any]]:
    """Requests whose adapter is in use, those of which decode has computed a part of the prompt among them; and those
    that wait to begin, of every queue, with all that is there for them."""
    of_extras = [begun() for begun in scheduler.disagg_decode_transfer_queue.hooks.begun]
    running = [req for req in scheduler.running_batch.reqs if not req.finished()]
    return (
        [*running, *chain.from_iterable(begun for begun, _ in of_extras)],
        [*scheduler.waiting_queue, *chain.from_iterable(others for _, others in of_extras)],
    )


@dataclass
class AdapterTurns:
    """Whose turn it is where there are more adapters than are loaded at once.

    One that does not fit is overtaken by those of adapters that run. When ``most`` have begun since it was held back,
    its turn has come: the adapter of which fewest requests run takes nobody new until it has run out. That number only
    falls, so the turn comes, and meanwhile the others go on.

    fits: whether these adapters can be loaded at once. began: requests that have begun so far. A request that is held
    back has ``held_back_at``, what that was then. All of it is the same on all ranks that have the same queues.
    """

    fits: Fits
    most: int
    began: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> AdapterTurns:
        """Those of this scheduler, made when first asked for."""
        if getattr(scheduler, "adapter_turns", None) is None:
            fits = scheduler.tp_worker.model_runner.lora_manager.validate_lora_batch
            most = getattr(scheduler.server_args, "disaggregation_decode_max_overtaken", MOST_OVERTAKEN)
            scheduler.adapter_turns = cls(fits, most)
        found: AdapterTurns = scheduler.adapter_turns
        return found

    def joining(self, running: Sequence[Any], waiting: Iterable[Any]) -> Callable[[Any], bool]:
        """Asked of one request after the other: whether its adapter fits beside those of ``running`` and of all before
        it that did. Both of every queue, see `running_and_waiting`."""
        adapters = set(running_adapters := Counter(req.lora_id for req in running))
        begun = set(map(id, running))
        # Who has been held back for longest; of those, who came first.
        first = min(filter(self.is_due, waiting), key=lambda req: req.held_back_at, default=None)
        # Its place is nobody else's.
        kept = set() if first is None else {first.lora_id}
        closed = self._closed(running_adapters, first.lora_id) if first else set()

        def joins(req: Any) -> bool:
            adapter = req.lora_id
            if id(req) in begun:
                # The next slice of its prompt: its adapter runs out with it, not before.
                return True
            if adapter in closed or (adapter not in adapters and not self.fits({adapter} | adapters | kept)):
                if getattr(req, "held_back_at", None) is None:
                    req.held_back_at = self.began
                return False
            adapters.add(adapter)
            return True

        return joins

    def _closed(self, running: Counter[str | None], wanted: str | None) -> set[str | None]:
        """Adapters that take nobody new, so that ``wanted`` fits when they have run out."""
        if self.fits({wanted, *running}):
            return set()
        order = sorted(running, key=lambda adapter: (running[adapter], adapter or ""))
        for adapter in order:
            if self.fits({wanted, *running} - {adapter}):
                return {adapter}
        return set(order)

    def is_due(self, req: Any) -> bool:
        """Whether a request has been held back for as long as one may be."""
        since = getattr(req, "held_back_at", None)
        return since is not None and self.began - since >= self.most

    def in_turn(self, waiting: Iterable[Any]) -> list[Any]:
        """Those whose turn has come first."""
        return sorted(waiting, key=lambda req: req.held_back_at if self.is_due(req) else self.began)

    def begin(self, reqs: Iterable[Any]) -> None:
        """These run from now on."""
        for req in reqs:
            self.began += 1
            req.held_back_at = None
