"""Windows of a decode worker whose model keeps the KV of some layers for a sliding window only: the arithmetic.

Such a model has two pools, one for layers with full attention and one for those with a window. The decode tree holds
slots of the first only. So of every prompt the window is a part of what prefill is asked for, in both pools, and what
the tree may hold of it ends where the window begins.

Plain data in and out. All figures are tokens; those of memory are whole pages.

Upstream: sgl-project/sglang#27770 (merged).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NO_WINDOW", "WindowNeed", "Windows"]


class WindowNeed(NamedTuple):
    """What one request takes of the window pool.

    now: for its prompt. soon: with the reserved decode steps. at_length: at most, until its last token.
    """

    now: int
    soon: int
    at_length: int


NO_WINDOW = WindowNeed(0, 0, 0)


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

    def need(self, num_tokens: int, left: int, reserved: int) -> WindowNeed:
        """What a request with ``num_tokens`` tokens takes that may generate ``left`` more.

        reserved: decode steps for which there is to be room when it is admitted.
        """
        start = self.start(num_tokens)
        soon, at_length = (
            min(self.most, self._whole(num_tokens + more) - start) for more in (min(left, reserved), left)
        )
        return WindowNeed(self._whole(num_tokens) - start, soon, at_length)

    def _whole(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size
