"""Serves requests: the other worker hears of what is refused.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.refused_requests import RefusedRequests

__all__ = ["ReqState", "TokenizerManager"]


@dataclass
class ReqState(engine.ReqState):
    """The state of one prompt, which knows whether the scheduler has been told of it."""

    sent: bool = False


class TokenizerManager(RefusedRequests, engine.TokenizerManager):
    """Tells the other worker of what is refused."""
