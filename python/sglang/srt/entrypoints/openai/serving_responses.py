"""/v1/responses, which no pair serves: decode says so.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.entrypoints.openai import serving_responses as engine
from sglang.srt.managers.request_admission import check_route

__all__ = ["OpenAIServingResponses"]


class OpenAIServingResponses(engine.OpenAIServingResponses):
    """The endpoints of OpenAI's responses."""

    async def create_responses(self, request, raw_request=None):
        """Adds a refusal on decode with the flag, of status 400. The engine breaks off what is streamed."""
        check_route(self.tokenizer_manager.server_args, "/v1/responses")
        return await super().create_responses(request, raw_request)
