"""Separates prompts with an ``extra_key`` in KV events, and drops logprobs that prefill was not asked for.

See ``mem_cache/kv_event_namespaces.py`` and ``utils.py``.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.utils import drop_unasked_logprobs
from sglang.srt.mem_cache.decode_radix_cache import add_layer
from sglang.srt.mem_cache.kv_event_namespaces import NamespacedRadixCache

__all__ = ["DecodeTransferQueue"]

add_layer(NamespacedRadixCache)


class DecodeTransferQueue(engine.DecodeTransferQueue):
    """Transfers that bring a request no logprobs of another."""

    def _commit_transfer_to_req(self, decode_req: engine.DecodeRequest) -> bool:
        """Drops logprobs that prefill was not asked for, see `drop_unasked_logprobs`."""
        done = super()._commit_transfer_to_req(decode_req)
        if done and not decode_req.is_aborted:
            drop_unasked_logprobs(decode_req.req)
        return done
