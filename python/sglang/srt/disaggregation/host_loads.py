"""What requests that are admitted get out of host memory, beside what their prefill sends or decode computes.

Upstream: none is known that keeps a promise to prefill; sgl-project/sglang#30322 tells of a later release's that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.deferred_release import let_go

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_admission import QueueEntry
    from sglang.srt.disaggregation.decode_agreement import Ranks
    from sglang.srt.mem_cache.host_tier.tier import HostTier
    from sglang.srt.mem_cache.prefix_reader import PrefixPeek

__all__ = ["HostLoads"]

logger = logging.getLogger(__name__)


class HostLoads:
    """The loads of one rank."""

    def __init__(self, tier: HostTier, rows: Any, ranks: Ranks | None = None):
        """rows: the pool of requests' rows. ranks: that agree on whether a load has begun; None for one alone."""
        self._tier, self._rows, self._ranks = tier, rows, ranks

    def found(self, entry: QueueEntry, found: PrefixPeek) -> PrefixPeek:
        """What host memory has of a prompt that waits, if that is more than was ``found`` in the tree."""
        return self._tier.found(entry.host_watch, found.length)

    def found_of(self, token_ids: Sequence[int], extra_key: str | None, found: PrefixPeek) -> PrefixPeek:
        """The same of tokens that nobody watches."""
        return self._tier.found_of(token_ids, extra_key, found.length)

    def lock(self, decode_req: DecodeRequest, held: int) -> None:
        """Keep what a request is about to be admitted with, of which the tree has ``held`` tokens."""
        stored = decode_req.entry.stored
        if stored.length:
            decode_req.load = self._tier.lock(stored, held)
            self._tier.host.raise_priority(decode_req.load.node, decode_req.req.priority or 0)

    def begin(self, decode_req: DecodeRequest, held: int) -> int:
        """Begin to copy to the pages of a request, on all ranks or none: without it, its prefill is asked for more.

        held: tokens that the tree has. Returns how many decode has then, with what is being copied. One collective for
        each load, where there are several ranks; all come here with the same plans.
        """
        if not decode_req.entry.stored.length:
            return held
        req, load, error = decode_req.req, decode_req.load, None
        assert load is not None
        try:
            self._tier.load(load, self._rows.req_to_token[req.req_pool_idx, load.start : load.end].long())
        except Exception as e:
            error = e
        begun = error is None
        if self._ranks is not None:
            begun = self._ranks.are_alike([begun]) and begun
        if begun:
            req.load_start, req.host_prefix_len = load.start, load.end
            if self._tier.storage is not None:
                req.from_storage = self._tier.storage.brought(req.rid, load.start, load.end)
            return load.end
        logger.error(
            "KV of %s is not copied from host memory: it comes as if it were not there", req.rid, exc_info=error
        )
        self._tier.failed_loads += 1
        decode_req.entry.local = False
        let_go(decode_req, self._tier.tree)
        return held
