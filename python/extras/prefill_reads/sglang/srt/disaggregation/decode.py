"""A decode worker that offers its pages to prefill; see offers.py.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

from sglang.srt.disaggregation import decode as engine
from sglang.srt.disaggregation.kv_weights import know_weights
from sglang.srt.disaggregation.offers import OfferingDeltas

__all__ = ["DecodePreallocQueue"]


class DecodePreallocQueue(engine.DecodePreallocQueue):
    """Creates a decode rank's transfer manager."""

    deltas_type = OfferingDeltas

    def _init_kv_manager(self):
        """Adds the KV's weights."""
        return know_weights(super()._init_kv_manager(), self.scheduler)
