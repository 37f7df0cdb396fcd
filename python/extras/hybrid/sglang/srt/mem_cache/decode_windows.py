"""Window arithmetic of decode workers for models with sliding-window layers.

Such a model has two pools: for full-attention and for sliding-window layers. The decode tree holds slots of the first
only. So the delta of each prompt includes its window, in both pools, and the tree may hold what comes before.

All figures are tokens; those of memory are whole pages.

Upstream: sgl-project/sglang#27770 (merged).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang.srt.mem_cache.state_kind import Kept, Need

__all__ = ["Windows", "WindowsKept"]


@dataclass(frozen=True)
class WindowsKept(Kept):
    """Window tokens that admission must keep free; each admission is added.

    growth: by live requests in the near future. lacks: of the request that needs most to its end, beyond what it has
    (running ones have all that running requests hold). resumes: for retracted requests. retractable: freed by
    retracting all running requests.
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
        """Tokens to keep free."""
        return max(self.growth, self.lacks - self.retractable) + self.resumes


class Windows(NamedTuple):
    """size: tokens that a token attends to before itself. page_size: tokens."""

    size: int
    page_size: int

    def start(self, num_tokens: int) -> int:
        """Start of the window of the token after ``num_tokens`` tokens, rounded down to a page.

        As the engine's messages have it: prefill sends the pages from here to the prompt's end.
        """
        return max(0, num_tokens - self.size) // self.page_size * self.page_size

    def held(self, num_tokens: int) -> int:
        """Tokens that a request of ``num_tokens`` tokens needs."""
        return self._whole(num_tokens) - self.start(num_tokens)

    @property
    def most(self) -> int:
        """The most that a request of any length needs.

        A window that starts within a page, and the page that the next step opens while a step in flight may still read
        the token before.
        """
        return self._whole(self.size + 1) + 2 * self.page_size

    def need(self, num_tokens: int, left: int, reserved: int) -> Need:
        """The need of a request with ``num_tokens`` tokens that may generate ``left`` more.

        reserved: decode steps to have memory for at admission.
        """
        start = self.start(num_tokens)
        soon, at_length = (
            min(self.most, self._whole(num_tokens + more) - start) for more in (min(left, reserved), left)
        )
        return Need(self._whole(num_tokens) - start, soon, at_length)

    def _whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size
