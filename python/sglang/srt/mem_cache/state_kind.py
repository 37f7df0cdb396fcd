"""What requests have besides KV pages, such as mamba slots: nothing unless an extra registers it.

Upstream: none is known; sgl-project/sglang#27770 (merged) and #32732 (open) keep it in trees of
their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.cache_support import DECODE, CacheKind

if TYPE_CHECKING:
    import numpy as np
    import torch
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, LiveReqs
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache


class Need(NamedTuple):
    """What one request takes from a pool other than KV's.

    now: for its prompt. soon: with the reserved decode steps. at_length: at most, until it ends.
    """

    now: int
    soon: int
    at_length: int


class Kept:
    """What admission must leave free in such a pool; here nothing.

    growth: what live requests will take soon.
    """

    growth: int = 0

    def plus(self, need: Need) -> Kept:
        """With one more admitted request."""
        return self

    def with_need(self, need: Need) -> int:
        """What must be free to admit a request."""
        return 0


NO_NEED, NOTHING_KEPT = Need(0, 0, 0), Kept()


class StateKind:
    """What requests have besides KV on one decode rank: ``DecodeRadixCache.state``. Here nothing.

    An extra registers its kinds; the kind of the model builds the worker's tree. The extra's
    overlay of ``managers/schedule_batch.py`` saves it at a retraction; its overlay of
    ``disaggregation/prefill.py`` sends it when decode holds the whole prompt.
    """

    #: Its row in the table of refused options, and the name of its layers there.
    support: CacheKind = DECODE
    layers = "full attention"
    #: Its plural in messages; None if the engine's RadixCache serves its models.
    word: str | None = None
    #: Whether `Memory` includes its free capacity. Then it has an allocator, ``pool``, and
    #: ``alloc``, which takes the slots that prefill writes to; and its own `available`, `need` and
    #: `kept`, or `take` would end the worker.
    has_pool = False
    pool: Any
    alloc: Any

    # ---- start-up ----

    @classmethod
    def is_of(cls, runner: Any) -> bool:
        """Whether the model of ``runner`` has it."""
        return True

    @classmethod
    def take_over(cls, engines: RadixCache, scheduler: Any) -> DecodeRadixCache | None:
        """Build a tree of its own for the pools of ``engines``; None if `beside` is enough."""
        return None

    @classmethod
    def beside(cls, tree: DecodeRadixCache) -> StateKind:
        """What requests have besides the KV of ``tree``."""
        return NO_STATE

    # ---- memory ----

    def available(self, running: Iterable[Req] = ()) -> int:
        """What is free in its pool or can be taken from ``running`` requests at once."""
        return 0

    def need(self, req: Req, num_tokens: int, reserved: int) -> Need:
        """What ``req`` takes with ``num_tokens`` tokens and ``reserved`` decode steps."""
        return NO_NEED

    def kept(self, live: LiveReqs, reserved: int) -> Kept:
        """What admission must leave free. Cost: a look at each live request."""
        return NOTHING_KEPT

    def take(self, req: Req, num_tokens: int, plan: AdmissionPlan, delta: torch.Tensor) -> None:
        """Allocate as ``plan`` says. delta: new KV slots, int64. An exception ends the worker.

        The extra frees it: in `cache_finished_req` of a layer of the tree, or in ``free`` of the
        req_to_token pool.
        """

    # ---- transfers ----

    def targets(self, req: Req, table: torch.Tensor) -> torch.Tensor:
        """The input of `indices`, on the device. table: the slots of the prompt."""
        return table[:0]

    def indices(self, targets: np.ndarray) -> list[int] | None:
        """What prefill writes to (or None), however much of the prompt decode holds."""
        return None

    # ---- audit ----

    def faults(self) -> list[str]:
        """Faults of its pool on a worker without requests."""
        return []


NO_STATE = StateKind()
#: All kinds. An extra appends its own when its ``managers/scheduler.py`` is imported.
STATE_KINDS: list[type[StateKind]] = []


def kind_of(runner: Any) -> type[StateKind]:
    """The kind of the model of ``runner``."""
    return next((kind for kind in STATE_KINDS if kind.is_of(runner)), StateKind)
