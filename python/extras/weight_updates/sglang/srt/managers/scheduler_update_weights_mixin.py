"""Postpones weight updates of a prefill or decode worker until no request is left.

An update flushes, and the engine ends if a flush is refused. The tokenizer manager sends an update when all clients
have been answered or have disconnected. But their requests may still be here: an aborted one in transfer, a step in
flight. While the engine is paused it does not wait for any, and the loops of prefill and decode do not pause. So an
update waits here. The tokenizer manager sends no new requests meanwhile.

Upstream: none is known that waits; sgl-project/sglang#25372 (merged) retracts requests of a pair before an update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler_update_weights_mixin as engine

logger = logging.getLogger(__name__)

__all__ = ["SchedulerUpdateWeightsMixin"]


@dataclasses.dataclass(frozen=True)
class Postponed:
    """A postponed update and its message.

    memory: whether it releases memory, also that of requests that have not begun, and pages in quarantine.
    """

    update: Callable[[Any], Any]
    recv_req: Any
    flushes: bool
    memory: bool = False


@dataclasses.dataclass
class StageVote:
    """Whether all pipeline stages were idle in one turn of their loops; known some turns later.

    A stage gets a turn's messages after the stage before has ended that turn, so it cannot be waited for within it.
    """

    all_idle: torch.Tensor
    reduction: dist.Work
    turns_left: int
    # Whether no message has arrived since.
    quiet: bool = True


class SchedulerUpdateWeightsMixin(engine.SchedulerUpdateWeightsMixin):
    """All ranks of a prefill or decode worker update in the same turn, when none has a request.

    Ranks wait for each other in an update. With DP attention or pipeline stages they become idle in different turns: a
    rank that updated alone would wait for one in another collective.
    """

    # In order of arrival; equal on all ranks, which get the same messages.
    postponed_updates: tuple[Postponed, ...] = ()
    stage_vote: StageVote | None = None

    def update_weights_from_disk(self, recv_req):
        """Waits until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_disk, recv_req)

    def update_weights_from_distributed(self, recv_req):
        """Waits until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_distributed, recv_req)

    def update_weights_from_tensor(self, recv_req):
        """Waits until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_tensor, recv_req)

    def update_weights_from_ipc(self, recv_req):
        """Waits until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_ipc, recv_req)

    def release_memory_occupation(self, recv_req):
        """Waits until no rank has a request: the engine's ends if one is left."""
        return self._when_idle(Postponed(super().release_memory_occupation, recv_req, flushes=True, memory=True))

    def resume_memory_occupation(self, recv_req):
        """Waits for postponed updates before it."""
        return self._when_idle(Postponed(super().resume_memory_occupation, recv_req, flushes=False))

    def _update_when_idle(self, update: Callable[[Any], Any], recv_req):
        return self._when_idle(Postponed(update, recv_req, recv_req.flush_cache))

    def _when_idle(self, one: Postponed):
        """Run it now or, on a worker of a pair, once no rank has a request. Returns None if postponed.

        One that does not flush waits for postponed ones only.
        """
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return one.update(one.recv_req)
        if not self.postponed_updates and (not one.flushes or (self.pp_size == 1 and self._ranks_are_idle(one))):
            return self._do_update(one)
        logger.info("A weight update waits for the last request")
        self.postponed_updates = (*self.postponed_updates, one)
        return None

    def update_if_idle(self, recv_reqs: Sequence[Any] = ()) -> None:
        """Run postponed updates if no rank has a request. Called in each turn of the loop, with its messages.

        All ranks enter the collectives in the same turn, since they have the same postponed updates.
        """
        while self.postponed_updates:
            one, *rest = self.postponed_updates
            if one.flushes:
                idle = self._ranks_are_idle(one) if self.pp_size == 1 else self._stages_are_idle(recv_reqs)
                if not idle:
                    return
            self.postponed_updates = tuple(rest)
            self.send_to_tokenizer.send_output(self._do_update(one), one.recv_req)

    def _can_flush(self) -> bool:
        """Whether there is no request.

        The engine's check misses retracted requests and pipeline stages' batches in flight.
        """
        self.end_step_of_none()
        queue = getattr(self, "disagg_decode_prealloc_queue", None)
        if queue is not None and queue.retracted_queue:
            return False
        if self.pp_size > 1 and any(batch is not None for batch in self.mbs):
            return False
        return self.is_fully_idle()

    def _ranks_are_idle(self, one: Postponed) -> bool:
        with self._not_begun_set_aside(one):
            idle = torch.tensor([int(self._can_flush() and not (one.memory and self.has_quarantine()))])
        if self.tp_size > 1:
            # With DP attention, over all DP ranks.
            dist.all_reduce(idle, op=dist.ReduceOp.MIN, group=self.tp_cpu_group)
        return bool(idle)

    def _do_update(self, one: Postponed):
        with self._not_begun_set_aside(one):
            return one.update(one.recv_req)

    @contextlib.contextmanager
    def _not_begun_set_aside(self, one: Postponed) -> Iterator[None]:
        """On prefill, leave out requests that have not begun: they hold nothing that a flush frees.

        They may wait for a paused decode worker, which goes on after this update. Not with pipeline stages, which could
        begin them between their vote and the update.
        """
        if self.disaggregation_mode != DisaggregationMode.PREFILL or self.pp_size > 1 or one.memory:
            yield
            return
        bootstrap = self.disagg_prefill_bootstrap_queue
        not_begun, bootstrap.queue = bootstrap.queue, []
        if one.flushes and getattr(self.tree_cache, "ongoing_prefetch", None):
            # Prefetches for them count as work, and would bring KV of the old weights.
            for req in not_begun:
                self.tree_cache.release_aborted_request(req.rid)
        try:
            yield
        finally:
            bootstrap.queue = not_begun

    def _stages_are_idle(self, recv_reqs: Sequence[Any]) -> bool:
        """Whether no stage has a request; all stages get the answer in the same turn, some turns after their vote.

        It is so if all were idle in one turn and no message has arrived since. The last stage is fewer turns behind the
        first than there are batches in flight, so all have voted when the answer is due.
        """
        vote = self.stage_vote
        if vote is None:
            idle = torch.tensor([int(self._can_flush())])
            group = self.world_group.cpu_group
            reduction = dist.all_reduce(idle, op=dist.ReduceOp.MIN, group=group, async_op=True)
            self.stage_vote = StageVote(idle, reduction, self.pp_loop_size)
            return False
        vote.turns_left -= 1
        vote.quiet = vote.quiet and not recv_reqs
        if vote.turns_left:
            return False
        vote.reduction.wait()
        self.stage_vote = None
        return vote.quiet and bool(vote.all_idle)
