"""Why a request has failed, for the rank that answers its client.

The ranks of a decode worker agree that a request has failed, each knows for itself why, and most of them do not. The
first one answers the client; so it hears of the others what it does not know. Only in steps in which something has
failed: there all ranks are told so by the reduction of their polls, and meet in one more collective.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_agreement import is_alone
from sglang.srt.observability.failure_causes import ELSEWHERE, cause_of

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest

__all__ = ["hear_reasons"]


def hear_reasons(requests: Sequence[DecodeRequest], polls: Sequence[int], group: dist.ProcessGroup) -> None:
    """Have the first rank of ``group`` lose those of ``requests`` that have failed for what another rank knows.

    polls: what all ranks have polled of each. All ranks come here in the same step, with the same requests. The first
    counts the cause that it tells, and none of the others counts the request.
    """
    if KVPoll.Failed not in polls or is_alone(group):
        return
    failed = [dr for dr, poll in zip(requests, polls, strict=False) if poll == KVPoll.Failed]
    own = [decode_req.failure_reason().removeprefix(": ") for decode_req in failed]
    told: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, own, group=group)
    if dist.get_rank(group) != 0:
        return
    for decode_req, *reasons in zip(failed, *told, strict=True):
        known = next((n for n, reason in enumerate(reasons) if cause_of(reason) != ELSEWHERE), 0)
        if known:
            decode_req.lose(f"{reasons[known]} (on TP rank {known})")
