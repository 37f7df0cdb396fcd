"""Scheduler of a worker whose model has index keys.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.managers import scheduler as engine
from sglang.srt.mem_cache import state_kind
from sglang.srt.mem_cache.index_pages import IndexPages

__all__ = ["Scheduler"]

state_kind.STATE_KINDS.append(IndexPages)


class Scheduler(engine.Scheduler):
    """Registers index pages."""
