"""Weight updates of a prefill or decode worker: they flush, and the engine ends where a flush is refused.

The tokenizer manager sends an update when all clients have been answered or have left. What they left may still be
here: an aborted request whose transfer has not ended, a step in flight. And while the engine is paused it waits for
nobody, and the loops of prefill and decode do not pause. So an update waits here until no request is left. Nothing new
comes meanwhile: the tokenizer manager keeps it back.

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
    """What waits until no request is left: what does it, and for which message.

    memory: whether it takes the memory away, also from requests that have not begun and pages in quarantine.
    """

    update: Callable[[Any], Any]
    recv_req: Any
    flushes: bool
    memory: bool = False


@dataclasses.dataclass
class StageVote:
    """Whether all pipeline stages were idle in one turn of their loops, which they learn some turns later.

    A stage is given the messages of a turn when the one before it has ended its own, so it cannot be waited for within
    that turn.
    """

    all_idle: torch.Tensor
    reduction: dist.Work
    turns_left: int
    # Whether nothing has come since.
    quiet: bool = True


class SchedulerUpdateWeightsMixin(engine.SchedulerUpdateWeightsMixin):
    """Has all ranks of a prefill or decode worker do an update in the same turn, when none of them has a request.

    Ranks wait for each other in an update. With DP attention they become idle in different turns, and so do pipeline
    stages: who updated alone would wait for one that is in another collective.
    """

    # What waits, in the order in which it came. The same on all ranks, which are sent the same.
    postponed_updates: tuple[Postponed, ...] = ()
    stage_vote: StageVote | None = None

    def update_weights_from_disk(self, recv_req):
        """Puts it off until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_disk, recv_req)

    def update_weights_from_distributed(self, recv_req):
        """Puts it off until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_distributed, recv_req)

    def update_weights_from_tensor(self, recv_req):
        """Puts it off until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_tensor, recv_req)

    def update_weights_from_ipc(self, recv_req):
        """Puts it off until no rank has a request."""
        return self._update_when_idle(super().update_weights_from_ipc, recv_req)

    def release_memory_occupation(self, recv_req):
        """Puts the engine's off, which ends where a request is left, until no rank has one."""
        return self._when_idle(Postponed(super().release_memory_occupation, recv_req, flushes=True, memory=True))

    def resume_memory_occupation(self, recv_req):
        """Has the engine's wait for what came before it."""
        return self._when_idle(Postponed(super().resume_memory_occupation, recv_req, flushes=False))

    def _update_when_idle(self, update: Callable[[Any], Any], recv_req):
        return self._when_idle(Postponed(update, recv_req, recv_req.flush_cache))

    def _when_idle(self, one: Postponed):
        """Do it now or, on a worker of a pair, when no rank has a request to flush under; None means later.

        One that does not flush waits for no request, but does not overtake those that wait.
        """
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return one.update(one.recv_req)
        if not self.postponed_updates and (not one.flushes or (self.pp_size == 1 and self._ranks_are_idle(one))):
            return self._do_update(one)
        logger.info("A weight update waits for the last request")
        self.postponed_updates = (*self.postponed_updates, one)
        return None

    def update_if_idle(self, recv_reqs: Sequence[Any] = ()) -> None:
        """Do what waits if no rank has a request any more. Called in each turn of the loop, with what has come in it.

        All ranks enter the collectives in the same turn: what waits is the same on all of them.
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
        """Whether no request is here.

        Of those that have been retracted, and of batches under way at pipeline stages, the engine does not think.
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
            # With DP attention, of all DP ranks.
            dist.all_reduce(idle, op=dist.ReduceOp.MIN, group=self.tp_cpu_group)
        return bool(idle)

    def _do_update(self, one: Postponed):
        with self._not_begun_set_aside(one):
            return one.update(one.recv_req)

    @contextlib.contextmanager
    def _not_begun_set_aside(self, one: Postponed) -> Iterator[None]:
        """Leave out, on prefill, requests that have not begun: they hold nothing that is flushed.

        What they wait for may be a decode worker that is paused, and goes on when this update has been done.
        Pipeline stages could begin them between their vote and the update.
        """
        if self.disaggregation_mode != DisaggregationMode.PREFILL or self.pp_size > 1 or one.memory:
            yield
            return
        bootstrap = self.disagg_prefill_bootstrap_queue
        not_begun, bootstrap.queue = bootstrap.queue, []
        if one.flushes and getattr(self.tree_cache, "ongoing_prefetch", None):
            # What the engine's tree fetches for them counts as work. It would be of the weights before.
            for req in not_begun:
                self.tree_cache.release_aborted_request(req.rid)
        try:
            yield
        finally:
            bootstrap.queue = not_begun

    def _stages_are_idle(self, recv_reqs: Sequence[Any]) -> bool:
        """Whether no stage has a request; all of them learn so in the same turn of theirs, some turns after they vote.

        Where none had one in the same turn, and nothing has come since, none has one. The last stage is behind the
        first by less turns than there are batches under way, so that all have voted when the answer is asked for.
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
