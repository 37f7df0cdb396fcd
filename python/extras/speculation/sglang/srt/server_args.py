"""Options refused with speculative decoding.

Upstream: none is known.
"""

from __future__ import annotations

import logging

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import draft_support  # noqa: F401
from sglang.srt.mem_cache.cache_support import FLAG

__all__ = ["ServerArgs"]

logger = logging.getLogger(__name__)


class ServerArgs(engine.ServerArgs):
    """Checks options for speculative decoding."""

    def _handle_pd_disaggregation(self) -> None:
        """Turns grammars off if decode drafts."""
        super()._handle_pd_disaggregation()
        drafts = self.disaggregation_decode_enable_radix_cache and self.speculative_algorithm is not None
        if drafts and self.grammar_backend != "none":
            self.grammar_backend = "none"
            logger.warning(
                "Grammars (json_schema, regex, ebnf, structural_tag) are not verified together with %s and speculative "
                "decoding: requests with one are refused.",
                FLAG,
            )
