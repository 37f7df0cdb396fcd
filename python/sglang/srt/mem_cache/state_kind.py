"""What the requests of a model have beside their KV pages: of most models nothing. An extra adds what else there is.

Upstream: none is known; sgl-project/sglang#27770 (merged) and #32732 (open) keep it in trees of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.cache_support import DECODE, CacheKind

if TYPE_CHECKING:
    import numpy as np
    import torch
    from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, LiveReqs
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

__all__ = ["NO_NEED", "NO_STATE", "NOTHING_KEPT", "Kept", "Need", "StateKind", "kind_of", "kinds", "register"]


class Need(NamedTuple):
    """What one request takes of a pool beside that of KV.

    now: for its prompt. soon: with the reserved decode steps. at_length: at most, until its last token.
    """

    now: int
    soon: int
    at_length: int


class Kept:
    """What admission must leave alone of such a pool, with each of its admissions; here there is none.

    growth: what live requests will take in the near future.
    """

    growth: int = 0

    def plus(self, need: Need) -> Kept:
        """With one more request on its way to decode."""
        return self

    def with_need(self, need: Need) -> int:
        """What must be there for a request to be admitted."""
        return 0


NO_NEED, NOTHING_KEPT = Need(0, 0, 0), Kept()


class StateKind:
    """What requests have beside KV, of one decode rank, as a `DecodeRadixCache` has it in ``state``. Here nothing.

    An extra registers the kinds that it has, by which a worker's tree is made. What a retracted request saves is of its
    overlay of ``managers/schedule_batch.py``; what prefill sends when decode holds all, of that of
    ``disaggregation/prefill.py``.
    """

    #: Its row of the table of what is refused, and what its layers are called there.
    support: CacheKind = DECODE
    layers = "full attention"
    #: In messages, in the plural.
    word: str | None = None
    #: Whether what is free of it is part of `Memory`. Then it has an allocator, ``pool``, and takes slots that prefill
    #: writes to by ``alloc``.
    has_pool = False
    pool: Any
    alloc: Any

    # ---- at the start ----

    @classmethod
    def is_of(cls, runner: Any) -> bool:
        """Whether the model of a model runner has it."""
        return True

    @classmethod
    def take_over(cls, engines: RadixCache, scheduler: Any) -> DecodeRadixCache:
        """A decode tree that has it, for the pools of the tree that the engine has built."""
        raise NotImplementedError

    # ---- memory ----

    def available(self, running: Iterable[Req] = ()) -> int:
        """What is free of its pool, with what can be had of ``running`` requests at once."""
        return 0

    def need(self, req: Req, num_tokens: int, reserved: int) -> Need:
        """What ``req`` takes with KV of ``num_tokens`` tokens. reserved: decode steps for which there is to be room."""
        return NO_NEED

    def kept(self, live: LiveReqs, reserved: int) -> Kept:
        """What admission must leave alone in this state. It takes a look at each live request."""
        return NOTHING_KEPT

    def take(self, req: Req, num_tokens: int, plan: AdmissionPlan, delta: torch.Tensor) -> None:
        """Give ``req`` what ``plan`` says. delta: its KV slots beyond the prefix, int64. What raises ends a worker."""

    # ---- transfers ----

    def targets(self, req: Req, table: torch.Tensor) -> torch.Tensor:
        """On the device, what `indices` is made of. table: the slots of the prompt."""
        return table[:0]

    def indices(self, targets: np.ndarray) -> list[int] | None:
        """What prefill is to write to, as the engine's messages have it; None where there is nothing. The same for a
        prompt of which decode holds much or all."""
        return None

    # ---- a flush around requests that stay ----

    def held(self, slots: torch.Tensor) -> Any:
        """What the request of these slots has."""
        return None

    def reserve(self, req: Req, slots: torch.Tensor, held: Any) -> None:
        """Take that back out of a pool that has been cleared, for as many ``slots``."""

    # ---- self-check ----

    def faults(self) -> list[str]:
        """How its pool contradicts that no request is here."""
        return []


NO_STATE = StateKind()
_kinds: list[type[StateKind]] = []


def register(kind: type[StateKind]) -> None:
    """Have workers whose model has it get its tree. An extra does so when its ``managers/scheduler.py`` is imported."""
    _kinds.append(kind)


def kinds() -> Sequence[type[StateKind]]:
    """All that are registered."""
    return _kinds


def kind_of(runner: Any) -> type[StateKind]:
    """What the model of a decode worker's model runner has."""
    return next((kind for kind in _kinds if kind.is_of(runner)), StateKind)
