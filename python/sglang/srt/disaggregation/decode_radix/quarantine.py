"""Memory of failed requests is released when no prefill can write to it any more, and stays theirs through a flush.

Upstream: sgl-project/sglang#35049 and #35360 (merged, off by default), which #38961 (open) mends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.decode_radix.tp_agreement import agreed_polls, is_alone
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.decode_radix_cache import reserve

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
    from sglang.srt.mem_cache.tier import Tier

__all__ = ["Writers", "abort_transfer", "flush_around", "let_go", "poll_transfers", "release"]

logger = logging.getLogger(__name__)


class Writers:
    """Polls as done when no prefill can write to a failed request's pages any more.

    Until then as transferring, if nothing is being copied to these out of host memory any more.
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
    """What the ranks of ``group`` have agreed on in one reduction: a poll of each transfer, and who leaves quarantine.

    What is being saved to the ``tier`` is agreed on with it.
    """
    pollers = [*queue, *map(Writers, quarantine), *tier.begin_step(group, alone=is_alone(group))]
    polls = agreed_polls(pollers, group) if pollers else []
    written = polls[len(queue) : len(queue) + len(quarantine)]
    tier.end_step(polls[len(queue) + len(quarantine) :])
    for decode_req, poll in zip(quarantine, written, strict=True):
        # It may be long, and what was to be copied is locked in host memory. Over on all ranks, it is let go of on all
        # of them in this step.
        if poll == KVPoll.Transferring:
            let_go(decode_req, tier)
    return polls[: len(queue)], [dr for dr, poll in zip(quarantine, written, strict=True) if poll == KVPoll.Success]


def abort_transfer(decode_req: DecodeRequest) -> None:
    """Abort a request whose transfer failed here or on another rank, and ask prefill to stop writing for it."""
    req = decode_req.req
    reason = decode_req.failure_reason()
    message = f"Decode transfer failed for request {req.rid} (bootstrap_room={req.bootstrap_room}){reason}"
    logger.error(message)
    prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    decode_req.fail()


def release(decode_req: DecodeRequest, tree: Any, buffers: Any) -> None:
    """Give back what a failed request holds: KV, and its metadata buffer of ``buffers``.

    Nothing enters the tree: part of it may never have been written. What is computed here has no buffer.
    """
    let_go(decode_req, tree.tier)
    release_kv_cache(decode_req.req, tree, is_insert=False)
    if decode_req.metadata_buffer_index != -1:
        buffers.free(decode_req.metadata_buffer_index)
    decode_req.advance(Phase.RELEASED)


def let_go(decode_req: DecodeRequest, tier: Tier) -> None:
    """Let go of what a request has counted on in a tier, when nothing is copied for it any more."""
    load, decode_req.load = decode_req.load, None
    if load is not None:
        load.wait()
        tier.let_go(load)


class _Delta(NamedTuple):
    """Slots of a request beyond its prefix, int64, whole pages; and what it has beside them, see `StateKind.held`."""

    slots: torch.Tensor
    beside: Any


def flush_around(reqs: Sequence[Req], rows: Any, tree: DecodeRadixCache, flush: Callable[[], bool]) -> bool:
    """Flush the pools of a worker that has no other requests; ``reqs`` keep row, delta and what is beside it.

    rows: the pool of these. flush: clears tree and pools; what it returns is returned, and if False nothing changes.
    """
    deltas = [_delta(req, rows, tree) for req in reqs]
    if not flush():
        return False
    for req, delta in zip(reqs, deltas, strict=True):
        _keep(req, delta, rows, tree)
    return True


def _delta(req: Req, rows: Any, tree: DecodeRadixCache) -> _Delta:
    page = tree.page_size
    end = pages(req.kv_allocated_len, page) * page
    slots = rows.req_to_token[req.req_pool_idx, req.cache_protected_len : end].clone()
    return _Delta(slots, tree.state.held(slots))


def _keep(req: Req, delta: _Delta, rows: Any, tree: DecodeRadixCache) -> None:
    """Take what ``req`` had out of pools that have been cleared.

    Its prefix went with the tree; what is left of it is the delta, which begins a sequence of its own.
    """
    length = req.kv_allocated_len - req.cache_protected_len
    slots = delta.slots[:length]
    rows.reserve(req)
    rows.req_to_token[req.req_pool_idx, :length] = slots
    reserve(tree.pool, slots)
    tree.state.reserve(req, slots, delta.beside)
    req.kv_allocated_len = req.kv_committed_len = length
    req.last_node, req.cache_protected_len = tree.root_node, 0
    tree.inc_lock_ref(req.last_node)
