"""What follows when a request is refused before the scheduler has it: the other worker of a pair refuses it, too.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.peer_calls import MOST_CHARACTERS, NotNow, listen
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq

logger = logging.getLogger(__name__)

__all__ = ["RefusedRequests", "reason_of"]

# The engine's tokenizer manager comes behind.
Base: Any = object


def reason_of(error: Exception) -> str:
    """What an error says, for another worker; an image that could not be read may be all of the message."""
    said = error.detail if isinstance(error, HTTPException) else str(error)
    return str(said or repr(error))[:MOST_CHARACTERS]


class RefusedRequests(Base):
    """Tells the other worker of a request that only this one refuses."""

    def init_disaggregation(self) -> None:
        """Notifies a prefill of requests that decode refuses."""
        super().init_disaggregation()
        self.refused_rooms = refusal.RefusedRooms()
        # The states of each request that is being served, by its identity.
        self.own_states: dict[int, dict[str, Any]] = {}
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            listen(refusal.REFUSED_ROUTE, partial(self._on_loop, self._refuse_rooms))

    async def generate_request(self, obj, request=None):
        """Adds what follows a refusal: the peer is told, others of the batch end, and nothing is left behind."""
        states: dict[str, Any] = {}
        self.own_states[id(obj)] = states
        try:
            async for out in super().generate_request(obj, request):
                yield out
        except Exception as e:
            # Not only the client's errors: an image that cannot be fetched here may be known to the peer.
            # Nor has the scheduler been told of a prompt that decode computes, which has been answered.
            known = states and all(state.sent or state.finished for state in states.values())
            refused = not known and self._is_refusal(e)
            end_others = refused or self._ends_others(obj)
            # First, or the peer would learn only of the others' end.
            told = self._tell_peer(obj, reason_of(e), states, refusal.blames_request(e)) if refused else []
            if end_others and told:
                asyncio.create_task(self._abort_once_told(told, states))
            elif end_others:
                self._abort_sent(states)
            raise
        finally:
            if self.own_states.get(id(obj)) is states:
                del self.own_states[id(obj)]
            if states and self.server_args.enable_lora and obj.lora_id and getattr(obj, "parallel_sample_num", 1) == 1:
                ids = obj.lora_id if isinstance(obj.lora_id, list) else [obj.lora_id]  # As many as states.
                unsent = [uid for uid, state in zip(ids, states.values(), strict=False) if not state.sent]
                await self._release_adapters(unsent)
            for rid, state in states.items():
                if self.rid_to_state.get(rid) is state and (state.finished or not state.sent):
                    del self.rid_to_state[rid]

    def _is_refusal(self, error: Exception) -> bool:
        """Whether the other worker is told of an error by which a request ends that the scheduler does not have."""
        return not isinstance(error, HTTPException)

    def _ends_others(self, obj) -> bool:
        """Whether the other prompts of a request end with one of which the scheduler has said that it failed."""
        return False

    def _rooms_of(self, obj) -> Iterator[tuple[Any, Any, Any]]:
        """The rooms of a request, of which the other worker is told when it is refused."""
        return refusal.rooms_of(obj, getattr(obj, "bootstrap_room", None))

    async def _abort_once_told(self, told: list[Future], states: dict[str, Any]) -> None:
        await asyncio.gather(*map(asyncio.wrap_future, told), return_exceptions=True)
        self._abort_sent(states)

    def _abort_sent(self, states: dict[str, Any]) -> None:
        """Abort those that the scheduler has been told of."""
        for rid, state in states.items():
            if state.sent and self.rid_to_state.get(rid) is state:
                self.abort_request(rid)

    def _check_room(self, room: int | None) -> None:
        """Raise ValueError if decode has refused the request of this room. Aggregated servers take anything for one."""
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return
        if (reason := self.refused_rooms.reason(room)) is not None:
            raise ValueError(reason)

    def _req_stats_init(self, obj, request=None) -> None:
        """Adds a note of the states that are this request's own, and that none has been sent."""
        rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
        try:
            super()._req_stats_init(obj, request)
        finally:
            # The engine makes states for samples too, whose objects are its own. It may have raised between two.
            states = {rid: self.rid_to_state[rid] for rid in rids if rid in self.rid_to_state}
            self.own_states.get(id(obj), {}).update(states)

    def _send_one_request(self, tokenized_obj) -> None:
        """Adds a last look at what decode says of it: from here on the scheduler is told."""
        try:
            self._check_room(getattr(tokenized_obj, "bootstrap_room", None))
            if self._is_answered(tokenized_obj):
                return
            super()._send_one_request(tokenized_obj)
        except Exception:
            # It may be one of the engine's samples, whose state is none of the request's own.
            self.rid_to_state.pop(tokenized_obj.rid, None)
            raise
        self._note_sent(tokenized_obj.rid)

    def _send_batch_request(self, tokenized_objs) -> None:
        """Adds the same for a batch."""
        for tokenized_obj in tokenized_objs:
            self._check_room(getattr(tokenized_obj, "bootstrap_room", None))
        tokenized_objs = [one for one in tokenized_objs if not self._is_answered(one, of_batch=True)]
        if tokenized_objs:
            super()._send_batch_request(tokenized_objs)
        for tokenized_obj in tokenized_objs:
            self._note_sent(tokenized_obj.rid)

    def _is_answered(self, tokenized_obj, of_batch: bool = False) -> bool:
        """Whether a request that is about to be sent need not be, since an extra has answered it.

        of_batch: it is sent with others.
        """
        return False

    def _note_sent(self, rid: str) -> None:
        if rid in self.rid_to_state:
            self.rid_to_state[rid].sent = True

    # ---- adapters ----

    async def _release_adapters(self, lora_ids: list[str | None] | None) -> None:
        """Of requests that were not sent. The engine forgets them, and the adapter can never be unloaded."""
        if lora_ids:
            await self.lora_registry.release(lora_ids)

    def _handle_batch_output(self, recv_obj) -> None:
        """Releases the adapter of an ended request once; one that decode has refused fails for that reason.

        The engine releases it here and, where a request has failed, again when that is answered: the count of users
        is negative then, and an unload waits for 0 for ever. Of a refusal, the scheduler may hear after the transfer
        has failed for it.
        """
        reasons = recv_obj.finished_reasons if len(self.refused_rooms) else ()
        for rid, finish in zip(recv_obj.rids, reasons, strict=False):
            state = self.rid_to_state.get(rid)
            reason = self.refused_rooms.reason(getattr(state.obj, "bootstrap_room", None)) if state else None
            if reason is not None and finish and finish["type"] == "abort":
                finish |= {"message": reason, "status_code": HTTPStatus.BAD_REQUEST}
        adapters = self.server_args.enable_lora
        states = [self.rid_to_state.get(rid) for rid in recv_obj.rids] if adapters else []
        super()._handle_batch_output(recv_obj)
        for state in states:
            if state is not None and state.finished:
                state.obj.lora_path = None

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """A request which was aborted in a queue releases its adapter, which the engine forgets.

        One that has been answered is left alone, as where decode computes its prompt; the engine ends the worker.
        """
        if recv_obj.rid not in self.rid_to_state:
            return
        state = self.rid_to_state.get(recv_obj.rid) if self.server_args.enable_lora else None
        super()._handle_abort_req(recv_obj)
        if state is not None and state.finished and state.obj.lora_path:
            asyncio.create_task(self._release_adapters([state.obj.lora_id]))
            state.obj.lora_path = None

    # ---- the two workers of a pair ----

    def _tell_peer(self, obj, reason: str, own: Mapping | None = None, at_fault: bool = False) -> list[Future]:
        """Tell the other worker that the rooms of this request are refused here.

        own: the request's states. A room of a request that is being served is that one's: this was a copy of it.
        at_fault: as in `refusal.RefusedReq`. Returns, of decode, what is done when prefill has been told.
        """
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return []
        served = [state.obj for rid, state in self.rid_to_state.items() if rid not in (own or {})]
        refused = refusal.rooms_refused(self._rooms_of(obj), served)
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            return refusal.tell_prefills(refused, self.server_args.disaggregation_bootstrap_port, reason)
        rooms = []
        for room, _, _ in refused:
            self.send_to_scheduler.send_pyobj(refusal.RefusedReq(room, reason, by_decode=False, at_fault=at_fault))
            rooms += [room] if self.refused_rooms.reason(room) is None else []
        refusal.name_rank(self.server_args, rooms, dp_rank=0)  # All ranks have been told.
        return []

    def _on_loop(self, call: Callable, *args: Any, **said: Any) -> None:
        """Called on the bootstrap server's thread. Without a warm-up, there is no loop before the first request."""
        if self.event_loop is None:
            raise NotNow("this prefill has served nothing yet")
        self.event_loop.call_soon_threadsafe(partial(call, *args, **said))

    def _refuse_rooms(self, rooms: list[int], reason: str) -> None:
        for room in rooms:
            logger.info("Decode has refused room %s: %s", room, reason)
            self.refused_rooms.note(room, reason)
            self.send_to_scheduler.send_pyobj(refusal.RefusedReq(room, reason, by_decode=True))
