"""How TP ranks keep the list of saves under way the same, within the reduction that transfers need anyway.

What the trees of the ranks hold could differ until the next step of admission finds out. So nothing that is polled goes
by it: a save that a rank has begun is polled from the next step on, if all have begun the same. That they tell each
other with a digest, as bytes and the bytes' complements: the least of both add up to 255
where all are the same. It is reduced while something may be to come, which is so on all ranks after each insert.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.base import KVPoll

if TYPE_CHECKING:
    from sglang.srt.mem_cache.host_tier.saves import Saves, Saving

__all__ = ["SavesStep"]

logger = logging.getLogger(__name__)

DIGEST_BYTES = 4
FULL = 255


class _Byte(NamedTuple):
    """Polls as a number."""

    value: int

    def poll(self) -> int:
        return self.value


class SavesStep:
    """One step of the saves of a rank: made before the reduction, `end` after it."""

    def __init__(self, saves: Saves, alone: bool):
        """Begins saves. alone: whether there is one rank."""
        saves.turn()
        self._saves, looking = saves, saves.looking
        self._begun: list[Saving] = saves.start() if looking else []
        if alone:
            saves.take(self._begun)
            self._begun, looking = [], False
        self._polled = list(saves.under_way)
        self._digest = _digest(self._begun, len(saves.to_come)) if looking else []

    def pollers(self) -> list[Any]:
        """What the ranks are to poll together, as many on each."""
        return [*self._polled, *self._digest]

    def end(self, polls: Sequence[int]) -> None:
        """Take in what the ranks have agreed on of the pollers."""
        if self._digest and _is_same(polls[len(self._polled) :]):
            self._saves.take(self._begun)
        elif self._digest:
            logger.error(
                "TP ranks differ in what they would copy to host memory. What was to be copied on this rank, %d begun "
                "and %d to come, is copied when it is used again.",
                len(self._begun),
                len(self._saves.to_come),
            )
            self._saves.give_up(self._begun)
        for saving, poll in zip(self._polled, polls, strict=False):
            if poll != KVPoll.Transferring:
                self._saves.end(saving, saved=poll == KVPoll.Success)


def _digest(begun: Sequence[Saving], to_come: int) -> list[_Byte]:
    line = [(saving.held, len(saving.slots), saving.rest, saving.key.token_ids[:1]) for saving in begun]
    digest = zlib.crc32(f"{line};{to_come}".encode()).to_bytes(DIGEST_BYTES, "big")
    return [_Byte(one) for byte in digest for one in (byte, FULL - byte)]


def _is_same(least: Sequence[int]) -> bool:
    return all(a + b == FULL for a, b in zip(least[::2], least[1::2], strict=True))
