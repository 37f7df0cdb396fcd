"""Tokenizer manager that reports refusals to the other worker.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers import tokenizer_manager as engine
from sglang.srt.managers.refused_requests import RefusedRequests

__all__ = ["ReqState", "TokenizerManager"]


@dataclass
class ReqState(engine.ReqState):
    """State of one prompt; sent: whether the scheduler has it."""

    sent: bool = False


class TokenizerManager(RefusedRequests, engine.TokenizerManager):
    """Reports refusals to the other worker."""
