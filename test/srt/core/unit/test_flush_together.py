"""Flushes, which TP ranks do together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import assert_same
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.tier import NO_TIER
from test_overlap_guard import flush_after_the_last_answer


class Rank(Scheduler):
    """The real handling of these messages. Of the rest, that a rank has requests until some turn of its loop."""

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.DECODE):
        self.disaggregation_mode, self.tree_cache = mode, None
        self.pp_size, self.tp_size = 1, 2
        self.tp_cpu_group = dist.group.WORLD
        self.turn, self.busy_until = 0, 0
        # (turn, what) of all that has been done, and the messages that have been answered.
        self.done: list[tuple[int, str]] = []
        self.answered: list[Any] = []
        self.session_controller = SimpleNamespace(maybe_reap=lambda now: None)
        self._pending_flush, self.draft_worker = None, None
        self.send_to_tokenizer = SimpleNamespace(send_output=lambda answer, to: self.answered.append(to))
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
        self.changes = 0
        self.manager: Any = SimpleNamespace()
        self.offload_tags: set[str] = set()
        noted = {f"update_weights_from_{name}": self._note(name) for name in ("disk", "distributed", "tensor", "ipc")}
        self.tp_worker = SimpleNamespace(**noted)
        self.memory_saver_adapter = SimpleNamespace(pause=self._note("release"), resume=self._note("resume"))
        self.init_request_dispatcher()

    def kv_manager(self) -> Any:
        return self.manager

    def weights_changing(self) -> None:
        self.changes += 1

    def _note(self, name: str) -> Callable[[Any], tuple[bool, str]]:
        def update(_: Any) -> tuple[bool, str]:
            self.done.append((self.turn, name))
            return True, ""

        return update

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return self.turn >= self.busy_until and not self.disagg_prefill_bootstrap_queue.queue

    def flush_cache(self) -> bool:
        # The engine raises where this is refused.
        return self.is_fully_idle()


def flush_by_clocks(
    rank: int, ahead: list[float], idle_from: list[int], with_tier: bool = False, timeout_s: float = 1000
) -> list[tuple]:
    """What comes of a flush, and when. ahead: how far each rank's clock is when it has begun to wait."""
    scheduler, said = Rank(DisaggregationMode.NULL if with_tier else DisaggregationMode.DECODE), []
    scheduler.tree_cache = SimpleNamespace(tier=NO_TIER) if with_tier else None
    scheduler.attn_tp_size, scheduler.attn_tp_cpu_group = 2, dist.group.WORLD
    scheduler.busy_until = idle_from[rank]
    scheduler.send_to_tokenizer.send_output = lambda answer, to: said.append((scheduler.turn, answer.success))
    for scheduler.turn in range(8):
        scheduler.process_input_requests([FlushCacheReqInput(timeout_s=timeout_s)] if scheduler.turn == 1 else [])
        if scheduler.turn == 2 and scheduler._pending_flush is not None:
            waiting, deadline = scheduler._pending_flush
            scheduler._pending_flush = waiting, deadline - ahead[rank]
    return said


@pytest.mark.parametrize(
    "ahead, idle_from, said",
    [
        ([0, 0], [0, 0], [(1, True)]),
        ([0, 0], [4, 4], [(4, True)]),
        ([0, 2000], [5, 5], [(3, False)]),
        # As with pages of one rank that are being saved.
        ([0, 0], [0, 4], [(4, True)]),
        ([2000, 0], [0, 5], [(3, False)]),
    ],
)
@pytest.mark.parametrize("with_tier", [False, True])
def test_tp_ranks_flush_or_give_up_together(pair, ahead, idle_from, said, with_tier):
    """A tree that only one of them has emptied is not that of the other. A server by itself may have a tier."""
    assert assert_same(pair.run(flush_by_clocks, ahead, idle_from, with_tier)) == said


@pytest.mark.parametrize(("idle_from", "flushed"), [([0, 0], True), ([0, 4], False), ([4, 0], False), ([4, 4], False)])
@pytest.mark.parametrize("timeout_s", [0, -1])
def test_tp_ranks_that_do_not_wait_flush_together_or_not_at_all(pair, idle_from, flushed, timeout_s):
    """What prefill may read of the pages of one rank keeps that one alone from being idle."""
    assert assert_same(pair.run(flush_by_clocks, [0, 0], idle_from, False, timeout_s)) == [(1, flushed)]


def test_of_two_ranks_one_flushes_with_a_step_in_flight(monkeypatch):
    """The other one is idle."""
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    flush_after_the_last_answer(2)
