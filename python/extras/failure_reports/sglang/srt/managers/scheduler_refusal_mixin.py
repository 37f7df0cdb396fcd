"""Refuses requests that cannot be served, with the same reason on both workers of a pair.

Upstream: none is known by which a worker tells its peer; sgl-project/sglang#30325 (open) ends prefill's own side.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.lost_requests import LostReqs, MessageAhead
from sglang.srt.disaggregation.refusal import (
    RefusedReq,
    RefusedRooms,
    blames_request,
    name_rank,
    tell_prefill,
    words_for_decode,
)
from sglang.srt.disaggregation.refused_pairs import AskedReqs, RefusedPairs
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode, prepare_abort
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.utils import TypeBasedDispatcher

__all__ = ["SchedulerRefusalMixin"]

# The engine's scheduler follows in the MRO.
Base: Any = object


class SchedulerRefusalMixin(Base):
    """Accepts requests, refuses invalid ones at once, and notifies the other worker."""

    # On prefill: rooms that decode has refused.
    refused_rooms = RefusedRooms()
    # Requests that this prefill has refused and decode without the flag may ask for.
    refused_pairs = RefusedPairs()

    def init_request_dispatcher(self) -> None:
        """Adds messages: requests refused by the other worker or the tokenizer manager; lost and asked, on prefill."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (RefusedReq, self.handle_refused_request),
                (LostReqs, self.handle_lost_requests),
                (AskedReqs, self.handle_asked_requests),
            ]
        )

    def recv_requests(self) -> list:
        """On prefill, the receiving rank puts LostReqs and AskedReqs ahead of the messages that it receives."""
        # Other ranks have no socket.
        socket = self.recv_from_tokenizer
        if self.disaggregation_mode != DisaggregationMode.PREFILL or socket is None:
            return super().recv_requests()
        manager, ahead = self.kv_manager(), socket
        if isinstance(manager, CommonKVManager):
            asked = self.refused_pairs.asked(manager.transfer_infos, manager.rooms.live)
            ahead = MessageAhead(AskedReqs(asked), ahead) if asked else ahead
        # Not with pipeline stages, which agree on the requests that they begin.
        lost = self.lost_requests() if self.pp_size == 1 else {}
        self.recv_from_tokenizer = MessageAhead(LostReqs(lost), ahead) if lost else ahead
        try:
            return super().recv_requests()
        finally:
            self.recv_from_tokenizer = socket

    def _split_work_and_control_reqs(self, recv_reqs: list) -> tuple[list, list]:
        """Sends lost and asked requests as work, to the ranks of one DP rank; control messages go to all.

        Later stages of a prefill distribute nothing: each DP rank has received all from its previous stage, including
        the requests spared by an abort.
        """
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.pp_rank > 0:
            return recv_reqs, []
        work, control = super()._split_work_and_control_reqs(recv_reqs)
        own = [one for one in control if isinstance(one, (LostReqs, AskedReqs))]
        return own + work, [one for one in control if not isinstance(one, (LostReqs, AskedReqs))]

    def refuse_message(self, recv_req, error: Exception) -> str:
        """Adds a report to the other worker."""
        reason = super().refuse_message(recv_req, error)
        self._tell_peer(recv_req, reason, at_fault=blames_request(error))
        return reason

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Refuses an invalid request at once (e.g. its grammar or logprobs).

        The engine would have it shake hands with a prompt of one token. Prefill does that only if a decode worker
        without the flag asks for it.
        """
        back = is_retracted or (isinstance(self.tree_cache, DecodeRadixCache) and req.is_retracted)
        if self.disaggregation_mode != DisaggregationMode.NULL and not back:
            reason = by_decode = self.refused_rooms.reason(req.bootstrap_room)
            if reason is None and isinstance(req.to_finish, FINISH_ABORT):
                reason = req.to_finish.message
            if reason is not None:
                prepare_abort(req, reason, status_code=HTTPStatus.BAD_REQUEST)
                self.stream_output([req], req.return_logprob)
                if by_decode is None:
                    self._keep_refused(req)
                self._tell_peer(req, reason, at_fault=blames_request(reason))
                return
        self._take_in(req, is_retracted)

    def _take_in(self, req, is_retracted: bool) -> None:
        # An earlier refused request of this room.
        self.refused_pairs.take(req.bootstrap_room)
        super()._add_request_to_queue(req, is_retracted)

    def handle_refused_request(self, recv_req: RefusedReq) -> None:
        """Fail requests, present and future, of a room that decode has refused; report one refused here to decode."""
        if self.disaggregation_mode != DisaggregationMode.PREFILL:
            return
        manager = self.kv_manager()
        if not recv_req.by_decode:
            if isinstance(manager, CommonKVManager):
                manager.refuse_room(recv_req.room, words_for_decode(recv_req), recv_req.room in self.refused_pairs)
            return
        self.refused_rooms.note(recv_req.room, recv_req.reason)
        # Decode will not ask for it.
        self.refused_pairs.take(recv_req.room)
        for req in self.grammar_manager.grammar_queue:
            if req.bootstrap_room == recv_req.room:
                req.set_finish_with_abort(recv_req.reason)
        sender = manager.rooms.live.get(recv_req.room) if isinstance(manager, CommonKVManager) else None
        if sender is not None:
            sender.fail(recv_req.reason)
            sender.poll()

    def stream_output_generation(self, reqs, return_logprob, skip_req=None, is_idle_batch=False) -> None:
        """On prefill, answers 400 for a request that decode has refused, as decode does.

        Skips requests that were answered before their KV was sent.
        """
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            told, reqs = reqs, [req for req in reqs if not (req.finished() and req.finished_output)]
            if told and not reqs:
                return
        for req in reqs if len(self.refused_rooms) else ():
            reason = self.refused_rooms.reason(req.bootstrap_room)
            if reason is not None and isinstance(req.finished_reason, FINISH_ABORT):
                req.finished_reason = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")
        super().stream_output_generation(reqs, return_logprob, skip_req, is_idle_batch)

    def handle_asked_requests(self, recv_req: AskedReqs) -> None:
        """Queue refused requests that decode waits for, in the same step on all ranks."""
        for room in recv_req.rooms:
            req = self.refused_pairs.take(room)
            if req is not None:
                # Its client has been answered, and the engine does not answer twice.
                req.finished_reason = None
                self._take_in(req, False)

    def _keep_refused(self, req) -> None:
        """On prefill, keep a refused request of a pair; not with input embeddings, which its one token lacks."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and req.bootstrap_room:
            if req.bootstrap_host != FAKE_BOOTSTRAP_HOST and req.input_embeds is None:
                self.refused_pairs.keep(req)

    def _tell_peer(self, req, reason: str, at_fault: bool = False) -> None:
        """Notify the other worker of a pair that this one has refused ``req``, a Req or its message.

        at_fault: as in `RefusedReq`.
        """
        room, host = req.bootstrap_room, req.bootstrap_host
        if not room or host == FAKE_BOOTSTRAP_HOST:
            return
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.handle_refused_request(RefusedReq(room, reason, by_decode=False, at_fault=at_fault))
            self._name_rank(room, host)
        elif self.disaggregation_mode == DisaggregationMode.DECODE and self.attn_tp_rank == 0 and host:
            tell_prefill(host, req.bootstrap_port or self.server_args.disaggregation_bootstrap_port, [room], reason)

    def _name_rank(self, room: int, host: str | None) -> None:
        """On prefill: report once, for all ranks, which DP rank has refused ``room``."""
        manager = self.kv_manager()
        if not host or not isinstance(manager, CommonKVManager) or self.refused_rooms.reason(room) is not None:
            return
        if manager.attn_tp_rank == manager.attn_cp_rank == manager.pp_rank == 0:
            # As senders register it.
            rank = manager.attn_dp_rank if manager.system_dp_size == 1 else manager.system_dp_rank
            name_rank(manager.server_args, [room], rank, host)
