"""KV of an answer that the draft model has not seen.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

__all__ = ["keep_undrafted_out"]


def keep_undrafted_out(batch: Any, result: Any) -> None:
    """Keep what the draft model has no KV for out of the tree.

    Without overlap, a step of speculation ends with the draft model taking in what was accepted, but only of requests
    that go on: of those that end with it, the slots of that step hold another draft's KV.
    """
    if batch.spec_algorithm.is_none() or batch.is_spec_v2:
        return
    for req, accepted in zip(batch.reqs, result.accept_length_per_req_cpu or (), strict=False):
        if req.finished():
            # What is allocated beyond is given back.
            req.kv_committed_len -= accepted + 1
