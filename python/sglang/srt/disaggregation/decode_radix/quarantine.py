"""Quarantine: failed requests keep their memory while a prefill may write to it.

Upstream: sgl-project/sglang#35049 and #35360 (merged, off by default), which #38961 (open) fixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.tp_agreement import agreed_polls, is_alone
from sglang.srt.mem_cache.common import release_kv_cache

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.mem_cache.tier import Tier


class Writers:
    """Polls as Success when no prefill can write to a failed request's pages any more.

    Before that as Transferring, or WaitingForInput while its load is copied from host memory.
    """

    def __init__(self, decode_req: DecodeRequest):
        self.decode_req = decode_req

    def poll(self) -> int:
        if self.decode_req.writers_done():
            return int(KVPoll.Success)
        load = self.decode_req.load
        return int(KVPoll.Transferring if load is None or load.done() else KVPoll.WaitingForInput)


def poll_transfers(
    queue: Sequence[DecodeRequest], quarantine: Sequence[DecodeRequest], tier: Tier, group: Any
) -> tuple[list[int], list[DecodeRequest]]:
    """Reduce over ``group``: the transfers' polls, and the requests that leave quarantine.

    The saves of ``tier`` are part of this reduction.
    """
    pollers = [*queue, *map(Writers, quarantine), *tier.begin_step(group, alone=is_alone(group))]
    polls = agreed_polls(pollers, group) if pollers else []
    written = polls[len(queue) : len(queue) + len(quarantine)]
    tier.end_step(polls[len(queue) + len(quarantine) :])
    for decode_req, poll in zip(quarantine, written, strict=True):
        # The load locks host memory. Its copy is over on all ranks, so all release it now.
        if poll == KVPoll.Transferring:
            let_go(decode_req, tier)
    return polls[: len(queue)], [
        dr for dr, poll in zip(quarantine, written, strict=True) if poll == KVPoll.Success
    ]


def release(decode_req: DecodeRequest, tree: Any, buffers: Any) -> None:
    """Release a failed request's KV and metadata buffer; if computed here, it has none.

    Nothing enters the tree: part of it may never have been written.
    """
    let_go(decode_req, tree.tier)
    release_kv_cache(decode_req.req, tree, is_insert=False)
    if decode_req.metadata_buffer_index != -1:
        buffers.free(decode_req.metadata_buffer_index)
    decode_req.advance(Phase.RELEASED)


def let_go(decode_req: DecodeRequest, tier: Tier) -> None:
    """Release a request's load in a tier, once nothing is copied for it any more."""
    load, decode_req.load = decode_req.load, None
    if load is not None:
        load.wait()
        tier.let_go(load)
