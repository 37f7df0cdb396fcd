"""A prefill's capability to ask for each piece of staging memory.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.common import conn as engine

__all__ = ["CommonKVBootstrapServer"]


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Bootstrap server that reports whether its prefill asks for each piece of staging memory."""

    asks_for_pieces = False

    async def _capabilities(self) -> dict[str, Any]:
        answer = await super()._capabilities()
        # Staging layouts do not support pipeline stages.
        pieces = self.asks_for_pieces and self.pp_size == 1
        return {"version": answer["version"], "pieces": int(pieces), **answer}
