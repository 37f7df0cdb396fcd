"""Keeps KV that the draft model has not computed out of the tree.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

__all__ = ["keep_undrafted_out"]


def keep_undrafted_out(batch: Any, result: Any) -> None:
    """Exclude tokens without draft KV from the tree.

    Without overlap, the draft model computes a step's accepted tokens at the step's end, except for requests that end:
    their slots hold KV of rejected drafts.
    """
    if batch.spec_algorithm.is_none() or batch.is_spec_v2:
        return
    for req, accepted in zip(batch.reqs, result.accept_length_per_req_cpu or (), strict=False):
        if req.finished():
            # Tokens beyond that are freed.
            req.kv_committed_len -= accepted + 1
