"""Completes the answers of requests that say how; see `entrypoints/openai/serving_completions.py`.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Gives each answer to who asked to amend it."""

    def generate_request(self, obj, request=None):
        """Adds the ``amend`` of a request."""
        amend = vars(obj).pop("amend", None)
        answers = super().generate_request(obj, request)
        return answers if amend is None else _amended(answers, amend)


async def _amended(answers, amend):
    async for out in answers:
        for item in out if isinstance(out, list) else [out]:
            amend(item)
        yield out
