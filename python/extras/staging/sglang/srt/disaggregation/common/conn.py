"""Whether a prefill asks for each piece of staging memory, as its bootstrap server says.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.common import conn as engine

__all__ = ["CommonKVBootstrapServer"]


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Bootstrap server that says what staging memory its prefill asks for."""

    asks_for_pieces = False

    async def _capabilities(self) -> dict[str, Any]:
        answer = await super()._capabilities()
        # The layout of a staging buffer knows of no stages. And Ascend's server is a Mooncake server.
        pieces = self.asks_for_pieces and self.decode_prefix_version and self.pp_size == 1
        return {"version": answer["version"], "pieces": int(pieces), **answer}
