"""Prefill workers over NIXL that hear of what waits in decode workers.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.nixl import conn as engine

__all__ = ["NixlKVManager"]


class NixlKVManager(engine.NixlKVManager):
    """Knows which of its rooms wait in decode workers."""

    def _on_message(self, frames: list[bytes]) -> None:
        if frames[0] != engine.GUARD or not self.waiting.take(frames[1:]):
            super()._on_message(frames)

    def heard_until(self, info: Any) -> float:
        """A decode worker without the flag has spoken, too."""
        if not info.names_prefix:
            self.waiting.silent_peer_at = time.monotonic()
        return super().heard_until(info)
