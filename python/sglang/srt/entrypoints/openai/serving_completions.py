"""/v1/completions with ``echo``.

Upstream: none is known.
"""

from __future__ import annotations

from functools import cache, partial

from sglang.srt.entrypoints.openai import serving_completions as engine

__all__ = ["OpenAIServingCompletion"]


class OpenAIServingCompletion(engine.OpenAIServingCompletion):
    """Completions that answer ``logprobs=0``: the logprob of each token and no alternatives."""

    def _convert_to_internal_request(self, request, raw_request=None):
        """With ``echo`` the prompt's logprobs are asked for also where ``logprobs`` is 0, and a stream is all sent."""
        adapted, request = super()._convert_to_internal_request(request, raw_request)
        if request.echo and request.stream:
            # The engine cuts what it has sent, with the prompt, from an answer that has none.
            adapted.echo_of = cache(partial(self._get_echo_text, request))
        if request.echo and request.logprobs is not None:
            adapted.logprob_start_len = 0
            # The engine looks them up in the answer, which has none with logprobs=0.
            adapted.needs_top_logprobs = True
        return adapted, request
