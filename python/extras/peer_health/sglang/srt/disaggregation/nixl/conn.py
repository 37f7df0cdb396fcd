"""NIXL on prefill: learns which requests wait on decode.

Upstream: none is known.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.nixl import conn as engine

__all__ = ["NixlKVManager"]


class NixlKVManager(engine.NixlKVManager):
    """Takes decode's reports of waiting requests."""

    def _on_message(self, frames: list[bytes]) -> None:
        if frames[0] != engine.GUARD or not self.waiting.take(frames[1:]):
            super()._on_message(frames)

    def heard_until(self, info: Any) -> float:
        """Notes requests of decode workers without the flag, which send no reports."""
        if not info.names_prefix:
            self.waiting.silent_peer_at = time.monotonic()
        return super().heard_until(info)
