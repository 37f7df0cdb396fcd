"""Requests that cannot be served: they end with their reason, on both workers of a pair.

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

# The engine's scheduler comes behind.
Base: Any = object


class SchedulerRefusalMixin(Base):
    """Takes requests in, refuses those that are known to be wrong, and tells the other worker."""

    # What decode has refused, on prefill.
    refused_rooms = RefusedRooms()
    # What this prefill has refused, and decode without the flag may ask for.
    refused_pairs = RefusedPairs()

    def init_request_dispatcher(self) -> None:
        """Adds messages about requests: refused by the other worker or the tokenizer manager; lost, on prefill."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (RefusedReq, self.handle_refused_request),
                (LostReqs, self.handle_lost_requests),
                (AskedReqs, self.handle_asked_requests),
            ]
        )

    def recv_requests(self) -> list:
        """Adds, on prefill, what the rank that receives for all knows of requests that are here, before all else.

        Which are lost, and which of those that were refused decode has asked for.
        """
        # Elsewhere than on that rank there is no socket.
        socket = self.recv_from_tokenizer
        if self.disaggregation_mode != DisaggregationMode.PREFILL or socket is None:
            return super().recv_requests()
        manager, ahead = self.kv_manager(), socket
        if isinstance(manager, CommonKVManager):
            asked = self.refused_pairs.asked(manager.transfer_infos, manager.rooms.live)
            ahead = MessageAhead(AskedReqs(asked), ahead) if asked else ahead
        # Pipeline stages agree on what they begin.
        lost = self.lost_requests() if self.pp_size == 1 else {}
        self.recv_from_tokenizer = MessageAhead(LostReqs(lost), ahead) if lost else ahead
        try:
            return super().recv_requests()
        finally:
            self.recv_from_tokenizer = socket

    def _split_work_and_control_reqs(self, recv_reqs: list) -> tuple[list, list]:
        """What is lost or asked for goes, as work, to the ranks of one DP rank; control goes to all, from the first.

        On later stages of a prefill nothing does: each DP rank has had all of it from its stage before, and in an abort
        what that has spared.
        """
        if self.disaggregation_mode == DisaggregationMode.PREFILL and self.pp_rank > 0:
            return recv_reqs, []
        work, control = super()._split_work_and_control_reqs(recv_reqs)
        own = [one for one in control if isinstance(one, (LostReqs, AskedReqs))]
        return own + work, [one for one in control if not isinstance(one, (LostReqs, AskedReqs))]

    def refuse_message(self, recv_req, error: Exception) -> str:
        """Adds that the other worker is told."""
        reason = super().refuse_message(recv_req, error)
        self._tell_peer(recv_req, reason, at_fault=blames_request(error))
        return reason

    def _add_request_to_queue(self, req, is_retracted: bool = False) -> None:
        """Refuses at once a request that is known to be wrong (its grammar, its logprobs).

        The engine has it shake hands with a prompt of one token, which prefill does only if a decode worker without the
        flag asks for it.
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
        # Of another request of this room.
        self.refused_pairs.take(req.bootstrap_room)
        super()._add_request_to_queue(req, is_retracted)

    def handle_refused_request(self, recv_req: RefusedReq) -> None:
        """Fail what is here of a room that decode has refused, or comes later; tell decode of one refused here."""
        if self.disaggregation_mode != DisaggregationMode.PREFILL:
            return
        manager = self.kv_manager()
        if not recv_req.by_decode:
            if isinstance(manager, CommonKVManager):
                manager.refuse_room(recv_req.room, words_for_decode(recv_req), recv_req.room in self.refused_pairs)
            return
        self.refused_rooms.note(recv_req.room, recv_req.reason)
        # Decode asks for nothing.
        self.refused_pairs.take(recv_req.room)
        for req in self.grammar_manager.grammar_queue:
            if req.bootstrap_room == recv_req.room:
                req.set_finish_with_abort(recv_req.reason)
        sender = manager.rooms.live.get(recv_req.room) if isinstance(manager, CommonKVManager) else None
        if sender is not None:
            sender.fail(recv_req.reason)
            sender.poll()

    def stream_output_generation(self, reqs, return_logprob, skip_req=None, is_idle_batch=False) -> None:
        """On prefill, the failure of a request that decode has refused is the client's error, as it is on decode.

        Of those that have been answered before their KV was sent nothing more is told.
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
        """Go through with requests that were refused here, in the same step on all ranks: decode waits for them."""
        for room in recv_req.rooms:
            req = self.refused_pairs.take(room)
            if req is not None:
                # Its client has been answered, and the engine answers nobody twice.
                req.finished_reason = None
                self._take_in(req, False)

    def _keep_refused(self, req) -> None:
        """Keep a refused request of a pair, on prefill; not one whose batch would need embeddings for its one token."""
        if self.disaggregation_mode == DisaggregationMode.PREFILL and req.bootstrap_room:
            if req.bootstrap_host != FAKE_BOOTSTRAP_HOST and req.input_embeds is None:
                self.refused_pairs.keep(req)

    def _tell_peer(self, req, reason: str, at_fault: bool = False) -> None:
        """Tell the other worker of a pair that this one has refused ``req``, a Req or the message of one.

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
        """On prefill: say, once for all of its ranks, which DP rank has refused ``room``."""
        manager = self.kv_manager()
        if not host or not isinstance(manager, CommonKVManager) or self.refused_rooms.reason(room) is not None:
            return
        if manager.attn_tp_rank == manager.attn_cp_rank == manager.pp_rank == 0:
            # As it is registered.
            rank = manager.attn_dp_rank if manager.system_dp_size == 1 else manager.system_dp_rank
            name_rank(manager.server_args, [room], rank, host)
