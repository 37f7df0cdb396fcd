"""Windows of a decode worker whose model keeps the KV of some layers for a sliding window only: the arithmetic.

Such a model has two pools, one for layers with full attention and one for those with a window. The decode tree holds
slots of the first only. So of every prompt the window is a part of what prefill is asked for, in both pools, and what
the tree may hold of it ends where the window begins.

Plain data in and out. All figures are tokens; those of memory are whole pages.

Upstream: sgl-project/sglang#27770 (merged).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang.srt.mem_cache.state_kind import Kept, Need

__all__ = ["Windows", "WindowsKept"]


@dataclass(frozen=True)
class WindowsKept(Kept):
    """What admission must leave alone of windows, in sums to which an admission adds its own.

    growth: what live requests will take in the near future. lacks: what the neediest needs to its end, beyond what it
    has if it does not run yet: one that runs can have what all that run hold. resumes: for those that wait to come
    back. retractable: what retracting all that run brings.
    """

    growth: int = 0
    lacks: int = 0
    resumes: int = 0
    retractable: int = 0

    def plus(self, need: Need) -> WindowsKept:
        return replace(
            self, growth=self.growth + need.soon - need.now, lacks=max(self.lacks, need.at_length - need.now)
        )

    def with_need(self, need: Need) -> int:
        return max(need.soon, need.at_length - self.retractable) + self.tokens

    @property
    def tokens(self) -> int:
        """What must be left."""
        return max(self.growth, self.lacks - self.retractable) + self.resumes


class Windows(NamedTuple):
    """size: tokens before a token that it attends to. page_size: tokens."""

    size: int
    page_size: int

    def start(self, num_tokens: int) -> int:
        """Where the window of the token that follows ``num_tokens`` others begins, rounded down to a page.

        As in the engine's messages: prefill sends the pages from here to the end of the prompt.
        """
        return max(0, num_tokens - self.size) // self.page_size * self.page_size

    def held(self, num_tokens: int) -> int:
        """What a request with ``num_tokens`` tokens needs."""
        return self._whole(num_tokens) - self.start(num_tokens)

    @property
    def most(self) -> int:
        """The most that a request needs to go on, however long it gets.

        A window that begins in the middle of a page, and the page that the next step opens, under whose feet a step in
        flight may still read the token before.
        """
        return self._whole(self.size + 1) + 2 * self.page_size

    def need(self, num_tokens: int, left: int, reserved: int) -> Need:
        """What a request with ``num_tokens`` tokens takes that may generate ``left`` more.

        reserved: decode steps for which there is to be room when it is admitted.
        """
        start = self.start(num_tokens)
        soon, at_length = (
            min(self.most, self._whole(num_tokens + more) - start) for more in (min(left, reserved), left)
        )
        return Need(self._whole(num_tokens) - start, soon, at_length)

    def _whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size
