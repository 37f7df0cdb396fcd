"""Requests and pools of a worker, in its state and as gauges.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.kv_pool_state import Pools
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.prefix_reader import tokens_above
from sglang.srt.mem_cache.tier import NO_TIER
from sglang.srt.observability import thread_time
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters
from sglang.srt.observability.worker_gauges import InHand, WorkerGauges, counts, in_hand, oldest

__all__ = ["SchedulerGaugesMixin", "kept_for_copies", "places"]

logger = logging.getLogger(__name__)

# Seconds between two audits of an idle decode worker; none without changes.
AUDIT_S = 60.0
# Faults in one log line.
FAULTS_NAMED = 10
# The engine's scheduler follows in the MRO.
Base: Any = object


def kept_for_copies(tree: DecodeRadixCache) -> int:
    """Pool tokens locked by copies to and from a tier, with all tokens above them."""
    return tokens_above(tree.tier.nodes_in_use()) + tree.tier.unreturned_tokens


def held_tokens(pools: Pools) -> int:
    """Tokens that requests hold."""
    return pools.size - pools.available_tokens() - pools.tree.evictable_size()


def places(pools: Pools) -> dict[str, tuple[int, int]]:
    """Size and free places of a worker's pools, by name: tokens, slots and buffers."""
    rows, tree = pools.rows, pools.tree
    found = {"rows": (rows.size + getattr(rows, "pre_alloc_size", 0), len(rows.free_slots))}
    if pools.has_one_kv_pool():
        found["kv"] = pools.size, pools.available_tokens()
    if pools.buffers is not None:
        found["metadata"] = pools.buffers.size, pools.buffers.available_size()
    found |= getattr(tree, "tier", NO_TIER).places()
    if getattr(tree, "windows", None) is not None:
        found["window"] = tree.windows.size, tree.windows.available_size()
    states = getattr(rows, "mamba_pool", None)
    if states is not None:
        found["state"] = states.size, states.available_size()
    return found


def mark(pools: Pools) -> tuple[Any, ...]:
    """Figures that change with every action of a request on a decode worker with the flag, and with a flush.

    A flush resets the lock counts; only the tree's generation and growth always increase.
    """
    tree = pools.tree
    counts = tree.generation, tree.growth, tree.locks_taken, tree.locks_released
    return *counts, tree.evictable_size(), *places(pools).values()


class SchedulerGaugesMixin(Base):
    """Counts requests by state; writes a worker's gauges with --enable-metrics."""

    # Since the last flush: most tokens held by requests at the end of a decode queue step; and the longest such step,
    # or insertion of a request into the queue, seconds.
    kv_used_peak = 0
    longest_queue_step = 0.0
    # The engine's attribute, set at each scheduler's start.
    enable_metrics = False
    _gauges: WorkerGauges | None = None
    # Time and state of the last audit.
    _audited_at = 0.0
    _audited: tuple[Any, ...] | None = None
    # Its faults.
    _faults: list[str] | None = None

    def _in_pair(self) -> bool:
        return self.disaggregation_mode != DisaggregationMode.NULL

    def init_disaggregation(self) -> None:
        """Creates the counters with the rank, before the queues use them."""
        if self.server_args.disaggregation_mode != "null":
            KvTransferCounters.of(self)
        super().init_disaggregation()

    # ---- records since the last flush ----

    def process_decode_queue(self) -> None:
        """Records a step of the decode queue, with or without the flag.

        At its end admitted requests have their pages, and at its start those that ended have freed theirs. So the
        record includes requests of any length.
        """
        began = thread_time.now()
        super().process_decode_queue()
        pools = self.pools()
        if pools.has_one_kv_pool():
            self.kv_used_peak = max(self.kv_used_peak, held_tokens(pools))
        self.longest_queue_step = max(self.longest_queue_step, thread_time.now() - began)

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Records the time of a request's insertion."""
        began = thread_time.now()
        super()._add_request_to_queue(req, is_retracted)
        self.longest_queue_step = max(self.longest_queue_step, thread_time.now() - began)

    def flush_cache(self) -> bool:
        """Resets the records."""
        self.kv_used_peak, self.longest_queue_step = 0, 0.0
        return super().flush_cache()

    # ---- reports ----

    def pool_record(self, idle: bool) -> dict[str, Any]:
        """Adds records, audit and requests; tokens and seconds."""
        more: dict[str, Any] = {"longest_queue_step_s": round(self.longest_queue_step, 3)}
        if self.pools().has_one_kv_pool():
            more = {"used_peak": self.kv_used_peak} | more
        more |= super().pool_record(idle)
        if idle and isinstance(self.tree_cache, DecodeRadixCache):
            more["audit"] = self.audit_at_rest()
        return more | self.state_of_requests()

    def process_input_requests(self, recv_reqs) -> None:
        """Adds, once per turn of every event loop, the worker's gauges."""
        super().process_input_requests(recv_reqs)
        self.publish_gauges()

    def state_of_requests(self) -> dict[str, Any]:
        """Requests by state, and the oldest; empty without disaggregation."""
        if not self._in_pair():
            return {}
        found = in_hand(self)
        decodes = self.disaggregation_mode == DisaggregationMode.DECODE
        return {"requests": counts(found, decodes), "oldest": oldest(found)}

    def publish_gauges(self) -> None:
        """Write the gauges if they are due. Called in every turn of the loop, also when idle."""
        if not (self.enable_metrics and self._in_pair()):
            return
        if self._gauges is None:
            self._gauges = WorkerGauges(KvTransferCounters.get(self.server_args).labels)
        if not self._gauges.is_due():
            return
        found = in_hand(self)
        self._gauges.write_requests(found)
        self._gauges.write_pools(places(self.pools()))
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._publish_decode(self._gauges, found)

    def _publish_decode(self, gauges: WorkerGauges, found: list[InHand]) -> None:
        held = [each.req for each in found if each.state == "quarantined"]
        # A request may fail before it has a slot.
        gauges.write_quarantine(sum(req.kv_allocated_len for req in held if req.req_pool_idx is not None))
        tree = self.tree_cache
        if not isinstance(tree, DecodeRadixCache):
            return
        KvTransferCounters.get(self.server_args).tree(tree.evictable_size(), tree.protected_size())
        gauges.write_copying(kept_for_copies(tree))
        # The audit visits every slot of the tree, so no request may be waiting.
        if time.monotonic() - self._audited_at > AUDIT_S and self.rests():
            self.audit_at_rest()

    def audit_at_rest(self) -> list[str]:
        """Faults of an idle decode worker with the flag; no second audit in the same state."""
        pools = self.pools()
        now = mark(pools)
        if self._faults is None or now != self._audited:
            self._audited, self._audited_at = now, time.monotonic()
            self.publish_audit(pools.audit())
        assert self._faults is not None
        return self._faults

    def publish_audit(self, faults: list[str] | None) -> None:
        """Write the number of faults, and log new ones. None: there was no audit.

        Each TP rank audits itself; only the first reports its faults.
        """
        if faults is None:
            return
        if faults and faults != self._faults:
            more = len(faults) - FAULTS_NAMED
            named = "; ".join([*faults[:FAULTS_NAMED], *([f"and {more} more"] if more > 0 else ())])
            logger.error("The audit of tree and pools has found %d contradictions: %s", len(faults), named)
        self._faults = faults
        if self._gauges is not None:
            self._gauges.write_faults(len(faults))
