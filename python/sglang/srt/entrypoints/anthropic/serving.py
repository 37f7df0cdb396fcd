"""/v1/messages, which no pair serves: decode says so.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.entrypoints.anthropic import serving as engine
from sglang.srt.managers.request_admission import check_route

__all__ = ["AnthropicServing"]


class AnthropicServing(engine.AnthropicServing):
    """The endpoints of Anthropic's API."""

    async def handle_messages(self, request, raw_request):
        """Adds a refusal on decode with the flag, of status 400. The engine answers 500, and streams nothing."""
        check_route(self.openai_serving_chat.tokenizer_manager.server_args, "/v1/messages")
        return await super().handle_messages(request, raw_request)
