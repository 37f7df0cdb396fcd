"""Includes decode's prefix in the engine's count of cached tokens.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Counts decode's prefix."""

    def collect_metrics(self, state: engine.ReqState, recv_obj, i: int) -> None:
        """Counts decode's prefix of an ended request as cached on `device`.

        The engine counts only the parts that it knows. The client's answer is unchanged.
        """
        parts = getattr(recv_obj, "cached_tokens_details", None) if state.finished else None
        if parts and parts[i] and "decode_prefix" in parts[i]:
            more = recv_obj.cached_tokens[i] - sum(parts[i].get(source, 0) for source in ("device", "host", "storage"))
            parts[i] = parts[i] | {"device": parts[i].get("device", 0) + max(more, 0)}
        super().collect_metrics(state, recv_obj, i)
