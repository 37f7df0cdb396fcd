"""Messages to workers that may not read them: nobody waits until they do.

Upstream: sgl-project/sglang#31144 (merged), which bounds the wait.
"""

from __future__ import annotations


class NotTaken(Exception):
    """A peer has not read for so long that nothing more can be queued for it."""

    def __init__(self, endpoint: str):
        super().__init__(f"{endpoint} takes no messages: it stands still, or the way to it is cut")
