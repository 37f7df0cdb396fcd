"""What a worker of a pair says of the requests that it has, in its state and as gauges.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.prefix_reader import tokens_above
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters
from sglang.srt.observability.worker_gauges import InHand, WorkerGauges, counts, in_hand, oldest

__all__ = ["SchedulerGaugesMixin", "kept_for_copies"]

logger = logging.getLogger(__name__)

# Seconds between two audits of an idle decode worker, of which the second comes only if anything has happened.
AUDIT_S = 60.0
# Contradictions that a line of the log names.
FAULTS_NAMED = 10
# The engine's scheduler comes behind.
Base: Any = object


def kept_for_copies(tree: DecodeRadixCache) -> int:
    """Tokens of the pool that copies to and from a tier keep, with what lies above them."""
    return tokens_above(tree.tier.nodes_in_use()) + tree.tier.unreturned_tokens


class SchedulerGaugesMixin(Base):
    """Counts requests by state, and writes the gauges of a worker with --enable-metrics."""

    # The engine's, of which each scheduler has its own from its start on.
    enable_metrics = False
    _gauges: WorkerGauges | None = None
    # When tree and pools were last audited, and how they were.
    _audited_at = 0.0
    _audited: tuple[Any, ...] | None = None
    # What the last audit has found.
    _faults: list[str] | None = None

    def _in_pair(self) -> bool:
        return self.disaggregation_mode != DisaggregationMode.NULL

    def state_of_requests(self) -> dict[str, Any]:
        """How many requests are in each state, and the oldest of them; empty without disaggregation."""
        if not self._in_pair():
            return {}
        found = in_hand(self)
        decodes = self.disaggregation_mode == DisaggregationMode.DECODE
        return {"requests": counts(found, decodes), "oldest": oldest(found)}

    def publish_gauges(self) -> None:
        """Write the gauges, if it is time to. Called in every turn of the loop, idle ones too."""
        if not (self.enable_metrics and self._in_pair()):
            return
        if self._gauges is None:
            self._gauges = WorkerGauges(KvTransferCounters.get(self.server_args).labels)
        if not self._gauges.is_due():
            return
        found = in_hand(self)
        self._gauges.write_requests(found)
        self._gauges.write_pools(self.pools().places())
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._publish_decode(self._gauges, found)

    def _publish_decode(self, gauges: WorkerGauges, found: list[InHand]) -> None:
        held = [each.req for each in found if each.state == "quarantined"]
        # An error may have come before it got any memory.
        gauges.write_quarantine(sum(req.kv_allocated_len for req in held if req.req_pool_idx is not None))
        tree = self.tree_cache
        if not isinstance(tree, DecodeRadixCache):
            return
        KvTransferCounters.get(self.server_args).tree(tree.evictable_size(), tree.protected_size())
        gauges.write_copying(kept_for_copies(tree))
        # It takes a look at every slot of the tree, which nobody should wait for.
        if time.monotonic() - self._audited_at > AUDIT_S and self.rests():
            self.audit_at_rest()

    def audit_at_rest(self) -> list[str]:
        """What the audit of an idle decode worker with the flag finds; nothing is audited twice in the same state."""
        pools = self.pools()
        mark = pools.mark()
        if self._faults is None or mark != self._audited:
            self._audited, self._audited_at = mark, time.monotonic()
            self.publish_audit(pools.audit())
        assert self._faults is not None
        return self._faults

    def publish_audit(self, faults: list[str] | None) -> None:
        """Write how many faults an audit has found, and log them if they are others; None where there was no audit.

        Each TP rank audits itself, and only the first says of itself what it has found.
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
