"""Ollama's routes, which no pair serves: decode says so.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.entrypoints.ollama import serving as engine
from sglang.srt.managers.request_admission import check_route

__all__ = ["OllamaServing"]


class OllamaServing(engine.OllamaServing):
    """The endpoints of Ollama's API."""

    async def handle_chat(self, request, raw_request):
        """Adds a refusal on decode with the flag, of status 400. The engine answers 500, and streams nothing."""
        check_route(self.tokenizer_manager.server_args, "Ollama's chat")
        return await super().handle_chat(request, raw_request)

    async def handle_generate(self, request, raw_request):
        """Adds the same. A request without a prompt, with which Ollama's clients begin, asks for no token."""
        if (request.prompt or "").strip() or (request.system or "").strip():
            check_route(self.tokenizer_manager.server_args, "Ollama's generate")
        return await super().handle_generate(request, raw_request)
