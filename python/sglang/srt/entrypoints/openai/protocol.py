"""What cannot be read of a chat request is the client's error.

Upstream: none is known.
"""

from __future__ import annotations

from pydantic import model_validator
from sglang.srt.entrypoints.openai import protocol as engine

__all__ = ["ChatCompletionRequest"]


class ChatCompletionRequest(engine.ChatCompletionRequest):
    """A request to /v1/chat/completions; one of another form is refused with status 400."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values, handler):
        """As the engine's validators, which look into its parts as if each had its type, and raise otherwise."""
        try:
            return handler(values)
        except (AttributeError, LookupError, TypeError) as e:
            raise ValueError(f"The request cannot be read: {type(e).__name__}: {e}") from e
