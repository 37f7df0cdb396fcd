"""A grammar that cannot be compiled fails only its own request.

Upstream: none is known that catches every error; sgl-project/sglang#4578 (closed) did.
"""

from __future__ import annotations

import logging

from sglang.srt.constrained import base_grammar_backend as engine

logger = logging.getLogger(__name__)

__all__ = ["BaseGrammarBackend"]


class BaseGrammarBackend(engine.BaseGrammarBackend):
    """A grammar backend that does not raise for a client's input."""

    def _init_value_dispatch(self, key, require_reasoning):
        """Treats every exception as an invalid grammar; those that the engine does not catch end the scheduler."""
        try:
            return super()._init_value_dispatch(key, require_reasoning)
        except Exception as e:
            logger.error("Cannot compile %s grammar", key[0], exc_info=e)
            return engine.InvalidGrammarObject(f"{type(e).__name__}: {e}")
