"""/v1/completions with ``echo``.

Upstream: none is known.
"""

from __future__ import annotations

from functools import partial

from sglang.srt.entrypoints.openai import serving_completions as engine

__all__ = ["OpenAIServingCompletion"]


class OpenAIServingCompletion(engine.OpenAIServingCompletion):
    """Completions that support ``logprobs=0``: the logprob of each token without alternatives."""

    def _convert_to_internal_request(self, request, raw_request=None):
        """With ``echo``, requests the prompt's logprobs also for ``logprobs=0``; streams keep their whole text."""
        adapted, request = super()._convert_to_internal_request(request, raw_request)
        if request.echo:
            adapted.amend = partial(self._amend, request, {})
        if request.echo and request.logprobs is not None:
            adapted.logprob_start_len = 0
        return adapted, request

    def _amend(self, request, echoes, answer) -> None:
        """Add fields that the engine reads from ``answer``, and the prompt that it cuts off. echoes: of a stream."""
        if request.logprobs is not None:
            answer["meta_info"].setdefault("input_top_logprobs", [])
        place = answer.get("index", 0)
        if place in echoes:
            answer["text"] = echoes[place] + answer["text"]
        elif request.stream:
            echoes[place] = self._get_echo_text(request, place)
