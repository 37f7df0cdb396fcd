"""Exchange of speculation settings between the workers of a pair.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt import server_args
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.drafts import check_drafts, describe_draft
from sglang.srt.disaggregation.common.prefill_peers import CHECKS

__all__ = ["CommonKVBootstrapServer"]

CHECKS.append(check_drafts)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Announces what its prefill drafts with."""

    async def _capabilities(self) -> dict[str, Any]:
        """Adds the algorithm and the draft model, if any."""
        answer = await super()._capabilities()
        # Arguments of the server's process.
        args = server_args._global_server_args
        drafts = getattr(args, "speculative_algorithm", None)
        draft_model = await asyncio.to_thread(describe_draft, args) if drafts else ""
        return answer | {name: said for name, said in (("drafts", drafts), ("draft_model", draft_model)) if said}
