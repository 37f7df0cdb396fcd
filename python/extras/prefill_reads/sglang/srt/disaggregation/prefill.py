"""Prefill that reads a part of a prompt's KV from decode before it computes the rest; see decode_reads.py.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation import prefill as engine
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.decode_reads import DecodeRead, DecodeReads, agree_on_reads, make_reads
from sglang.srt.disaggregation.kv_weights import know_weights
from sglang.srt.mem_cache.known_prefixes import is_plain

if TYPE_CHECKING:
    import torch.distributed as dist
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["PrefillBootstrapQueue", "poll_and_all_reduce_attn_cp_tp_group"]


def poll_and_all_reduce_attn_cp_tp_group(
    pollers: list, attn_cp_cpu_group: dist.ProcessGroup, attn_tp_cpu_group: dist.ProcessGroup
) -> list[int]:
    """Starts and ends reads on all ranks by the agreed polls."""
    polls = utils.poll_and_all_reduce_attn_cp_tp_group(pollers, attn_cp_cpu_group, attn_tp_cpu_group)
    return agree_on_reads(pollers, polls)


class PrefillBootstrapQueue(engine.PrefillBootstrapQueue):
    """Reads from decode before a request begins."""

    # None without the option.
    reads: DecodeReads | None = None

    def _init_kv_manager(self):
        """Adds the KV's weights and the reads."""
        manager = know_weights(super()._init_kv_manager(), self.scheduler)
        if isinstance(manager, CommonKVManager):
            self.reads = make_reads(self.scheduler, manager)
        return manager

    def add(self, req: Req, num_kv_heads: int) -> None:
        """Adds the read to the request's sender."""
        super().add(req, num_kv_heads)
        if self.reads is not None and isinstance(req.disagg_kv_sender, CommonKVSender) and is_plain(req):
            req.disagg_kv_sender.reading = DecodeRead(self.reads, req)

    def pop_bootstrapped(self, return_failed_reqs: bool = False, rids_to_check: list[str] | None = None):
        """First releases reads of requests that are no longer queued."""
        if self.reads is not None:
            self._turn_reads(self.reads)
        return super().pop_bootstrapped(return_failed_reqs, rids_to_check)

    def _turn_reads(self, reads: DecodeReads) -> None:
        scheduler = self.scheduler
        # Requests in transfer do not count as running: a transfer may hang for as long as decode waits.
        runs = scheduler.last_batch or scheduler.chunked_req
        groups = scheduler.attn_cp_cpu_group, scheduler.attn_tp_cpu_group
        reads.turn(
            self.queue,
            scheduler.waiting_queue,
            bool(scheduler.waiting_queue) and not runs,
            lambda pollers: utils.poll_and_all_reduce_attn_cp_tp_group(pollers, *groups),
        )
