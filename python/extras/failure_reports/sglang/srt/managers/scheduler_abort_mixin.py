"""Aborts only the requested rid, not other requests whose rids begin with it.

The engine aborts those too; it once did so for the samples of one request, which are now aborted by their own rids. The
others belong to other clients: an abort of "1" would end "10" to "19". Both workers of a pair must spare the same
requests: if only decode aborts, prefill writes to pages that were reallocated; if only prefill aborts, decode waits.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.common.delta_sender import names_prefix
from sglang.srt.disaggregation.decode_radix import tp_agreement
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.utils.network import NetworkAddress

__all__ = ["SchedulerAbortMixin"]

# The engine's scheduler follows in the MRO.
Base: Any = object


class SchedulerAbortMixin(Base):
    """Aborts one rid; of rids that begin with it, only those that the other worker aborts too."""

    # Length of the longest rid received: no rid is longer than that, so most aborts need no search.
    longest_rid = 0

    def handle_generate_request(self, recv_req) -> None:
        """Records the longest rid."""
        self.longest_rid = max(self.longest_rid, len(recv_req.rid))
        super().handle_generate_request(recv_req)

    def abort_request(self, recv_req) -> None:
        """Spares requests with longer rids if the peer spares them too, on prefill and on decode with the flag.

        Decode workers with the flag do, and prefills that support a decode prefix.
        """
        rid, everything = recv_req.rid, recv_req.abort_all or not recv_req.rid
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        spares = prefill or isinstance(self.tree_cache, DecodeRadixCache)
        spared: list[Any] = []
        if spares and not everything and len(rid) < self.longest_rid:
            spared = _spared_by_prefill(self, recv_req) if prefill else _spared_by_decode(self, rid)
        with _hidden(spared):
            super().abort_request(recv_req)


@contextmanager
def _hidden(reqs: Sequence[Any]) -> Iterator[None]:
    """Hide the rids of ``reqs`` from the engine."""
    rids = [req.rid for req in reqs]
    for req in reqs:
        req.rid = ""
    try:
        yield
    finally:
        for req, rid in zip(reqs, rids, strict=True):
            req.rid = rid


def _is_longer(req: Any, rid: str) -> bool:
    return len(req.rid) > len(rid) and req.rid.startswith(rid)


def _longer(reqs: Sequence[Any], rid: str) -> list[Any]:
    return [req for req in reqs if _is_longer(req, rid)]


def _in_steps(scheduler: Any) -> list[Any]:
    """Requests of the batches that the engine's abort searches."""
    batch, current = scheduler.running_batch, scheduler.cur_batch
    return batch.reqs if current is None or current is batch else [*batch.reqs, *current.reqs]


def _spared_by_prefill(scheduler: Any, recv_req: Any) -> list[Any]:
    """Requests with longer rids that belong to decode workers with the flag.

    If decode has not asked for a request yet, whether any such decode worker has contacted this prefill decides.
    Pipeline stages learn this at different times: the first decides and adds the spared rids to the message, which the
    others read. All are spared in an abort that is not a client's.
    """
    rid, manager = recv_req.rid, scheduler.disagg_prefill_bootstrap_queue.kv_manager
    known = isinstance(manager, CommonKVManager)
    heard = known and manager.rooms.has_met_flag

    def is_spared(req: Any) -> bool:
        sender = req.disagg_kv_sender
        asked = sender.state.asked if isinstance(sender, CommonKVSender) else {}
        if not asked and known:
            with manager.rooms.lock:
                asked = dict(manager.transfer_infos.get(req.bootstrap_room, {}))
        return names_prefix(asked.values()) if asked else heard

    bootstrap, inflight = scheduler.disagg_prefill_bootstrap_queue.queue, scheduler.disagg_prefill_inflight_queue
    queued = scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue, bootstrap, inflight
    longer = [req for reqs in (*queued, _in_steps(scheduler)) for req in _longer(reqs, rid)]
    if scheduler.pp_size > 1 and scheduler.pp_rank > 0:
        said = getattr(recv_req, "spared", None)
        return longer if said is None else [req for req in longer if req.rid in said]
    spared = _agreed(longer, is_spared, (scheduler.attn_tp_cpu_group, scheduler.attn_cp_cpu_group))
    recv_req.spared = {req.rid for req in spared}
    return spared


def _spared_by_decode(scheduler: Any, rid: str) -> list[Any]:
    """Requests with longer rids whose prefill supports a decode prefix, or is no longer involved."""
    prealloc, transfer = scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue
    manager = prealloc.kv_manager
    queued = *prealloc.queue, *transfer.queue
    coming = {id(dr.req): dr for dr in queued if _is_longer(dr.req, rid)}
    computed = [dr.req for source in transfer.hooks.source for dr in source().taken()]
    here = scheduler.waiting_queue, prealloc.retracted_queue, computed, _in_steps(scheduler)
    spared = [req for reqs in here for req in _longer(reqs, rid)]

    def is_spared(req: Any) -> bool:
        decode_req = coming.get(id(req))
        if decode_req is not None:
            return decode_req.phase is Phase.LOCAL or getattr(decode_req.kv_receiver, "peer_takes_prefix", True)
        if req.bootstrap_host in (None, FAKE_BOOTSTRAP_HOST):
            return True
        addr = NetworkAddress(req.bootstrap_host, req.bootstrap_port).to_host_port_str()
        return not isinstance(manager, CommonKVManager) or manager.prefills.of(addr).takes_prefix

    asked_for = [dr.req for dr in coming.values()] + _longer(scheduler.grammar_manager.grammar_queue, rid)
    return spared + _agreed(asked_for, is_spared, [prealloc.gloo_group])


def _agreed(reqs: Sequence[Any], is_spared: Callable[[Any], bool], groups: Sequence[Any]) -> list[Any]:
    """Those of ``reqs`` that any rank spares. Ranks have the same requests, but may know different peers."""
    if not reqs:
        return []
    said = ["spared" if is_spared(req) else "" for req in reqs]
    for group in groups:
        said = [max(of_one) for of_one in zip(*tp_agreement.told_by_all(said, group), strict=True)]
    return [req for req, word in zip(reqs, said, strict=True) if word]
