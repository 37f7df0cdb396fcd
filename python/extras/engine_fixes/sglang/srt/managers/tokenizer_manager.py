"""Applies the amendments of `entrypoints/openai/serving_completions.py` to answers.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Passes each answer to the request's ``amend``."""

    def generate_request(self, obj, request=None):
        """Adds the call of ``amend``."""
        amend = vars(obj).pop("amend", None)
        answers = super().generate_request(obj, request)
        return answers if amend is None else _amended(answers, amend)


async def _amended(answers, amend):
    async for out in answers:
        for item in out if isinstance(out, list) else [out]:
            amend(item)
        yield out
