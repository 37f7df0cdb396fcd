"""Why a request has failed, for the rank that answers its client.

The ranks of a worker agree that a request has failed, each knows for itself why, and most of them do not. The first one
answers the client; so it hears of the others what it does not know. Only in steps in which something has failed: there
all ranks are told so by the reduction of their polls, and meet in one more collective.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_agreement import is_alone
from sglang.srt.observability.failure_causes import ELSEWHERE, cause_of

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest

__all__ = ["hear_reasons", "hear_reasons_of_senders"]


def told_by_all(own: list[str], group: dist.ProcessGroup) -> list[list[str]]:
    """What each rank of ``group`` says; a collective, but for a rank alone."""
    if is_alone(group):
        return [own]
    told: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, own, group=group)
    return told


def first_known(reasons: Sequence[str]) -> int | None:
    """The first rank that knows a reason of its own; None if there is none."""
    return next((n for n, reason in enumerate(reasons) if cause_of(reason) != ELSEWHERE), None)


def hear_reasons(requests: Sequence[DecodeRequest], polls: Sequence[int], group: dist.ProcessGroup) -> None:
    """Have the first rank of ``group`` lose those of ``requests`` that have failed for what another rank knows.

    polls: what all ranks have polled of each. All ranks come here in the same step, with the same requests. The first
    counts the cause that it tells, and none of the others counts the request.
    """
    if KVPoll.Failed not in polls or is_alone(group):
        return
    failed = [dr for dr, poll in zip(requests, polls, strict=False) if poll == KVPoll.Failed]
    told = told_by_all([decode_req.failure_reason().removeprefix(": ") for decode_req in failed], group)
    if dist.get_rank(group) != 0:
        return
    for decode_req, *reasons in zip(failed, *told, strict=True):
        known = first_known(reasons)
        if known:
            decode_req.lose(f"{reasons[known]} (on TP rank {known})")


def hear_reasons_of_senders(
    senders: Sequence[Any], polls: Sequence[int], groups: Mapping[str, dist.ProcessGroup]
) -> None:
    """Have those of ``senders``, on prefill, that have failed elsewhere only end here for what the other rank knows.

    polls: what all ranks have polled of each. groups: by what their ranks are called; what the ranks of one have told
    each other they tell those of the next. All of them come here in the same step, with the same requests. With
    pipeline stages they do so again, until all stages know that it has failed: what one knew they have told by then.
    Senders that do not say why they failed, as those of warm-ups, are left as they are.
    """
    if KVPoll.Failed not in polls:
        return
    failed = [
        sender
        for sender, poll in zip(senders, polls, strict=True)
        if poll == KVPoll.Failed and not getattr(sender, "reason_told", False)
    ]
    if not failed:
        return
    heard = [_reason_of(sender) for sender in failed]
    for name, group in groups.items():
        told = told_by_all(heard, group)
        for place, reasons in enumerate(zip(*told, strict=True)):
            known = first_known(reasons)
            if known is not None and cause_of(heard[place]) == ELSEWHERE:
                heard[place] = f"{reasons[known]} (on {name} rank {known})"
    for sender, reason in zip(failed, heard, strict=True):
        # If one rank knows a reason, all do now; else one of them may learn it before the stages are done.
        sender.reason_told = cause_of(reason) != ELSEWHERE
        if sender.reason_told and hasattr(sender, "failure_reason"):
            # It changes nothing where it has failed by itself.
            sender.hear(reason)


def _reason_of(sender: Any) -> str:
    """As far as this rank knows; empty if it does not."""
    return (sender.failure_reason() or "") if hasattr(sender, "failure_reason") else ""
