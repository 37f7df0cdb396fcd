"""The engine's count of cached tokens has what decode held.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import tokenizer_manager as engine

__all__ = ["TokenizerManager"]


class TokenizerManager(engine.TokenizerManager):
    """Counts what decode held."""

    def collect_metrics(self, state: engine.ReqState, recv_obj, i: int) -> None:
        """Counts what decode held among the cached tokens of a request that has ended, as `device`.

        The engine counts the parts that it knows, and not what their sum lacks. A client is told them as they were.
        """
        parts = getattr(recv_obj, "cached_tokens_details", None) if state.finished else None
        if parts and parts[i] and "decode_prefix" in parts[i]:
            more = recv_obj.cached_tokens[i] - sum(parts[i].get(source, 0) for source in ("device", "host", "storage"))
            parts[i] = parts[i] | {"device": parts[i].get("device", 0) + max(more, 0)}
        super().collect_metrics(state, recv_obj, i)
