"""Marks prefixes that a prefill has sent, see ``mem_cache/known_prefixes.py``.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation import decode as engine
from sglang.srt.mem_cache.decode_radix_cache import add_layer
from sglang.srt.mem_cache.known_prefixes import KnowingRadixCache, note_known

__all__ = ["DecodeTransferQueue"]

add_layer(KnowingRadixCache)


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Marks transferred prefixes in the tree."""

    def _poll_transfers(self) -> list[Any]:
        arrived = super()._poll_transfers()
        for req in arrived:
            note_known(req.last_node)
        return arrived
