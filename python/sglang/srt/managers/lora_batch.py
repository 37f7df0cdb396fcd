"""Which requests a decode batch has room for, when each has a LoRA adapter.

Upstream: sgl-project/sglang#39332 (merged), which asks before KV is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["held_back", "joining", "split_by_adapter"]


@contextmanager
def held_back(scheduler: Any) -> Iterator[None]:
    """Meanwhile the scheduler's waiting queue has only requests whose adapter fits beside those that run.

    Others wait with their KV, and those of a running adapter go before them, as in the engine's own scheduling of
    prefills.
    """
    fits = scheduler.tp_worker.model_runner.lora_manager.validate_lora_batch
    scheduler.waiting_queue, waiting = split_by_adapter(scheduler.waiting_queue, scheduler.running_batch.reqs, fits)
    try:
        yield
    finally:
        scheduler.waiting_queue = [*scheduler.waiting_queue, *waiting]


def split_by_adapter(
    waiting: Sequence[Any], running: Iterable[Any], fits: Callable[[set[str | None]], bool]
) -> tuple[list[Any], list[Any]]:
    """The waiting requests whose adapter fits beside those of ``running``, and the rest; both in their order.

    fits: whether these adapters can be loaded at once.
    """
    ready: list[Any] = []
    left: list[Any] = []
    joins = joining(running, fits)
    for req in waiting:
        (ready if joins(req) else left).append(req)
    return ready, left


def joining(running: Iterable[Any], fits: Callable[[set[str | None]], bool]) -> Callable[[Any], bool]:
    """Asked of one request after the other: whether its adapter fits beside those of ``running`` and of all before it
    that did."""
    adapters = {req.lora_id for req in running}

    def joins(req: Any) -> bool:
        if req.lora_id not in adapters and not fits({req.lora_id} | adapters):
            return False
        adapters.add(req.lora_id)
        return True

    return joins
