"""Options that the OpenAI endpoints share.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.entrypoints.openai import serving_base as engine

__all__ = ["OpenAIServingBase"]


class OpenAIServingBase(engine.OpenAIServingBase):
    """An endpoint whose keys may be lists, as their types say: one for each prompt."""

    def _compute_extra_key(self, request):
        """Adds lists to the engine's strings: the salt and the key of each prompt are put together."""
        keys = [getattr(request, name, None) for name in ("cache_salt", "extra_key")]
        if not any(isinstance(key, list) for key in keys):
            return super()._compute_extra_key(request)
        lengths = {len(key) for key in keys if isinstance(key, list)}
        if len(lengths) > 1:
            raise ValueError("cache_salt and extra_key have different numbers of entries.")
        size = lengths.pop()
        columns = [key if isinstance(key, list) else [key or ""] * size for key in keys]
        return ["".join(parts) for parts in zip(*columns, strict=True)]
