"""Chooses the DP rank of a decode worker by cached prefix.

Upstream: sgl-project/sglang#26561 (open), which goes by digests that the ranks report.
"""

from __future__ import annotations

import time
from enum import Enum

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers import data_parallel_controller as engine
from sglang.srt.managers import io_struct
from sglang.srt.managers.prefix_balance import PrefixBalance

__all__ = ["DataParallelController", "LoadBalanceMethod"]

LONGEST_PREFIX = "longest_prefix"
# Longest age of a rank's report, seconds.
REPORT_S = 5.0
# Messages after which ranks have dropped their trees.
FLUSHES = (
    io_struct.FlushCacheReqInput,
    io_struct.ReleaseMemoryOccupationReqInput,
    io_struct.UpdateWeightFromDiskReqInput,
    io_struct.UpdateWeightsFromDistributedReqInput,
    io_struct.UpdateWeightsFromIPCReqInput,
    io_struct.UpdateWeightsFromTensorReqInput,
)


class LoadBalanceMethod(Enum):
    """The engine's methods, and LONGEST_PREFIX as an alias of its fallback ROUND_ROBIN."""

    ROUND_ROBIN = engine.LoadBalanceMethod.ROUND_ROBIN.value
    FOLLOW_BOOTSTRAP_ROOM = engine.LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM.value
    TOTAL_REQUESTS = engine.LoadBalanceMethod.TOTAL_REQUESTS.value
    TOTAL_TOKENS = engine.LoadBalanceMethod.TOTAL_TOKENS.value
    LONGEST_PREFIX = ROUND_ROBIN

    @classmethod
    def from_str(cls, method: str) -> LoadBalanceMethod:
        """As the engine's."""
        try:
            return cls[method.upper()]
        except KeyError:
            raise ValueError(f"Invalid load balance method: {method}") from None


class DataParallelController(engine.DataParallelController):
    """With ``--load-balance-method longest_prefix``: sends each request to the rank chosen by `PrefixBalance`."""

    balance: PrefixBalance | None = None

    def __init__(self, server_args, port_args, run_scheduler_process_func) -> None:
        """Adds the method, once the ranks' pool sizes are known."""
        super().__init__(server_args, port_args, run_scheduler_process_func)
        if server_args.load_balance_method == LONGEST_PREFIX:
            held = self.max_total_num_tokens
            if server_args.enable_hierarchical_cache:
                # Evicted KV is still in host memory; an estimate if its size is given in GB.
                held = int(held * server_args.hicache_ratio)
            self.balance = PrefixBalance(len(self.workers), held, server_args.page_size)
            self.dispatching = self.longest_prefix_scheduler

    def longest_prefix_scheduler(self, req) -> None:
        """Send a request to the rank with the longest prefix that is not too full.

        Requests without tokens, and warm-ups, go round-robin: a warm-up has to reach each rank, and leaves no KV.
        """
        assert self.balance is not None
        token_ids = getattr(req, "input_ids", None)
        if not token_ids or getattr(req, "bootstrap_host", None) == FAKE_BOOTSTRAP_HOST:
            self.round_robin_scheduler(req)
            return
        # The scheduler refuses keys that are no strings. The clock is that of the ranks' reports.
        key, now = repr((getattr(req, "extra_key", None), getattr(req, "lora_id", None))), time.perf_counter()
        if self.maybe_external_dp_rank_routing(req):
            self.balance.given(req.routed_dp_rank, token_ids, key, now)
            return
        usable = self.status if any(self.status) else [True] * len(self.workers)
        self.workers[self.balance.choose(token_ids, key, usable, now)].send_pyobj(req)

    def handle_load_update_req(self, obj) -> None:
        """Passes each rank's load on."""
        super().handle_load_update_req(obj)
        if self.balance is not None:
            now = time.perf_counter()
            for load in obj.loads:
                # Clocks of other hosts are not comparable.
                at = load.ts_tic if 0 <= now - load.ts_tic < REPORT_S else now
                self.balance.report(load.dp_rank, load.num_tokens, at)

    def send_control_message(self, obj) -> None:
        """After a flush no rank holds anything."""
        super().send_control_message(obj)
        if self.balance is not None and isinstance(obj, FLUSHES):
            self.balance.forget()
