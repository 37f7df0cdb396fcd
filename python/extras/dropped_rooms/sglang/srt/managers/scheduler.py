"""A prefill's scheduler that removes requests which decode computes itself.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender
from sglang.srt.disaggregation.dropped_rooms import COMPUTED, ComputedReq
from sglang.srt.disaggregation.room_notes import RoomNotes
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler as engine
from sglang.utils import TypeBasedDispatcher

__all__ = ["Scheduler"]


class Scheduler(engine.Scheduler):
    """Removes requests in the same step on all ranks."""

    # By rid: rooms of requests that were answered before they reached the scheduler.
    answered: RoomNotes[int] = RoomNotes()

    def init_request_dispatcher(self) -> None:
        """Adds the message."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(ComputedReq, self.handle_computed_request)])

    def _take_in(self, req, is_retracted: bool) -> None:
        """Leaves out a request that has been answered."""
        prefill, room = self.disaggregation_mode == DisaggregationMode.PREFILL, req.bootstrap_room
        if prefill and room is not None and self.answered.of(req.rid) == room:
            self.answered.take(req.rid)
            # A note of another request of this room.
            self.refused_pairs.take(room)
            req.time_stats.trace_ctx.abort()
            return
        super()._take_in(req, is_retracted)

    def handle_computed_request(self, recv_req: ComputedReq) -> None:
        """Remove the request of a room that decode computes; its client has been answered."""
        if self.disaggregation_mode != DisaggregationMode.PREFILL:
            return
        if not self.has_request(recv_req.rid):
            # With DP attention this message and a rank's requests take different ways, in any order.
            self.answered.note(recv_req.rid, recv_req.room)
        self.drop_computed(recv_req.room)

    def drop_computed(self, room: int) -> None:
        """Remove the request of a room that decode computes, in the same step on all ranks.

        If decode has asked for its KV, it ends as soon as nothing is being written for it.
        """
        waiting = self.grammar_manager.grammar_queue
        waiting[:] = [req for req in waiting if req.bootstrap_room != room]
        queue = self.disagg_prefill_bootstrap_queue
        manager = queue.kv_manager
        # Equal on all ranks; decode's requests for KV may have reached some only.
        dropped = [req for req in queue.queue if req.bootstrap_room == room]
        queue.queue = [req for req in queue.queue if req.bootstrap_room != room]
        was_asked = isinstance(manager, CommonKVManager) and room in manager.transfer_infos
        sender = manager.rooms.live.get(room) if was_asked else None
        if sender is not None:
            sender.fail(COMPUTED)
            sender.poll()
        for req in dropped:
            if sender is not None:
                # Its sender is no longer polled.
                self._end_lost(req, sender.take_reason())
                self.stream_output([req], req.return_logprob)
            elif isinstance(req.disagg_kv_sender, CommonKVSender):
                req.disagg_kv_sender.drop()
                req.time_stats.trace_ctx.abort()
            if self.enable_hicache_storage:
                self.tree_cache.release_aborted_request(req.rid)

    def has_request(self, rid: str) -> bool:
        """Whether a request is in any queue or step; equal on all ranks."""
        queued = self.grammar_manager.grammar_queue, self.disagg_prefill_bootstrap_queue.queue, self.waiting_queue
        computed = [req for req in (self.chunked_req, *self._in_flight()) if req is not None]
        return any(req.rid == rid for reqs in (*queued, computed, self.disagg_prefill_inflight_queue) for req in reqs)

    def _count_lost(self, req, reason: str) -> None:
        """Except requests that decode computes: they have not failed."""
        if reason != COMPUTED:
            super()._count_lost(req, reason)
