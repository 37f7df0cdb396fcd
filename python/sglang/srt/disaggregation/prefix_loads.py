"""What brings prefixes from outside the worker before a request's handshake counts as done.

That is a PegaFlow server, or a storage below host memory; a worker has one of them at most.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.pegaflow.tree import PegaFlowTree

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

__all__ = ["PrefixLoads"]


class PrefixLoads:
    """The requests that wait for it."""

    def __init__(self, tree: DecodeRadixCache):
        self._pegaflow = tree if isinstance(tree, PegaFlowTree) else None
        self._storage = None if tree.tier is None else tree.tier.storage

    def begin(self, decode_req: DecodeRequest) -> None:
        """Begin to bring what is not here of the prompt of a new request, whose entry is in its queue."""
        req, entry = decode_req.req, decode_req.entry
        try:
            if self._pegaflow is not None:
                self._pegaflow.prefetch(req.rid, req.origin_input_ids, req.extra_key, req.priority or 0)
            if self._storage is not None:
                self._storage.fetch(req.rid, entry.watch, entry.host_watch, len(req.origin_input_ids))
        except Exception as e:
            # On all ranks: they hash the same.
            decode_req.lose(e)

    def is_done(self, decode_req: DecodeRequest) -> bool:
        """Whether a request waits for nothing."""
        if self._pegaflow is not None:
            return self._pegaflow.check_prefetch_progress(decode_req.req.rid)
        return self._storage is None or self._storage.is_done(decode_req.req.rid)

    def leave(self, decode_req: DecodeRequest) -> None:
        """A request has been admitted, or is gone."""
        if self._pegaflow is not None:
            self._pegaflow.release_aborted_request(decode_req.req.rid)
        if self._storage is not None:
            self._storage.leave(decode_req.req.rid)
