"""Admission by targets for ITL and TTFT; see itl_gate.py and ttft_target.py.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.itl_gate import ItlHooks
from sglang.srt.disaggregation.ttft_target import TtftHooks

__all__: list[str] = []

hooks.register(hooks.DecodeHooks, ItlHooks.of)
hooks.register(hooks.DecodeHooks, TtftHooks.of)
