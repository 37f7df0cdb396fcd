"""Notifies the other worker of a pair when a request is refused before the scheduler has it.

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

# The engine's tokenizer manager follows in the MRO.
Base: Any = object


def reason_of(error: Exception) -> str:
    """An error's text for another worker, truncated: it may contain a whole image."""
    said = error.detail if isinstance(error, HTTPException) else str(error)
    return str(said or repr(error))[:MOST_CHARACTERS]


class RefusedRequests(Base):
    """Notifies the other worker of requests that only this one refuses."""

    def init_disaggregation(self) -> None:
        """Adds the route for requests that decode refuses, on prefill."""
        super().init_disaggregation()
        self.refused_rooms = refusal.RefusedRooms()
        # States of each live request, by the request's identity.
        self.own_states: dict[int, dict[str, Any]] = {}
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            listen(refusal.REFUSED_ROUTE, partial(self._on_loop, self._refuse_rooms))

    async def generate_request(self, obj, request=None):
        """Handles a refusal: notify the peer, end the batch's other prompts, clean up."""
        states: dict[str, Any] = {}
        self.own_states[id(obj)] = states
        try:
            async for out in super().generate_request(obj, request):
                yield out
        except Exception as e:
            # Any error, not only the client's: e.g. an image that only the peer can fetch.
            # Not if all states were sent, or answered because decode computes the prompts.
            known = states and all(state.sent or state.finished for state in states.values())
            refused = not known and self._is_refusal(e)
            end_others = refused or self._ends_others(obj)
            # Before the abort; otherwise the peer would learn only of that.
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
        """Whether the other worker is notified of ``error``, which ended a request before the scheduler had it."""
        return not isinstance(error, HTTPException)

    def _ends_others(self, obj) -> bool:
        """Whether other prompts of a request end when the scheduler fails one of them."""
        return False

    def _rooms_of(self, obj) -> Iterator[tuple[Any, Any, Any]]:
        """The rooms of a request, for a report to the other worker."""
        return refusal.rooms_of(obj, getattr(obj, "bootstrap_room", None))

    async def _abort_once_told(self, told: list[Future], states: dict[str, Any]) -> None:
        await asyncio.gather(*map(asyncio.wrap_future, told), return_exceptions=True)
        self._abort_sent(states)

    def _abort_sent(self, states: dict[str, Any]) -> None:
        """Abort those that were sent to the scheduler."""
        for rid, state in states.items():
            if state.sent and self.rid_to_state.get(rid) is state:
                self.abort_request(rid)

    def _check_room(self, room: int | None) -> None:
        """Raise ValueError if decode has refused this room. Aggregated servers accept any value as room."""
        if self.disaggregation_mode == DisaggregationMode.NULL:
            return
        if (reason := self.refused_rooms.reason(room)) is not None:
            raise ValueError(reason)

    def _req_stats_init(self, obj, request=None) -> None:
        """Records the states that belong to this request; none of them is sent yet."""
        rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
        try:
            super()._req_stats_init(obj, request)
        finally:
            # The engine also makes states for samples, from objects of its own. It may have raised before some.
            states = {rid: self.rid_to_state[rid] for rid in rids if rid in self.rid_to_state}
            self.own_states.get(id(obj), {}).update(states)

    def _send_one_request(self, tokenized_obj) -> None:
        """Adds a last check for decode's refusal before the scheduler has the request."""
        try:
            self._check_room(getattr(tokenized_obj, "bootstrap_room", None))
            if self._is_answered(tokenized_obj):
                return
            super()._send_one_request(tokenized_obj)
        except Exception:
            # A sample's state is not recorded as the request's own.
            self.rid_to_state.pop(tokenized_obj.rid, None)
            raise
        self._note_sent(tokenized_obj.rid)

    def _send_batch_request(self, tokenized_objs) -> None:
        """Adds the same check for a batch."""
        for tokenized_obj in tokenized_objs:
            self._check_room(getattr(tokenized_obj, "bootstrap_room", None))
        tokenized_objs = [one for one in tokenized_objs if not self._is_answered(one, of_batch=True)]
        if tokenized_objs:
            super()._send_batch_request(tokenized_objs)
        for tokenized_obj in tokenized_objs:
            self._note_sent(tokenized_obj.rid)

    def _is_answered(self, tokenized_obj, of_batch: bool = False) -> bool:
        """Whether an extra has answered a request that is about to be sent.

        of_batch: it is sent with others.
        """
        return False

    def _note_sent(self, rid: str) -> None:
        if rid in self.rid_to_state:
            self.rid_to_state[rid].sent = True

    # ---- adapters ----

    async def _release_adapters(self, lora_ids: list[str | None] | None) -> None:
        """Release adapters of requests that were not sent. The engine does not, so they could never be unloaded."""
        if lora_ids:
            await self.lora_registry.release(lora_ids)

    def _handle_batch_output(self, recv_obj) -> None:
        """Releases the adapter of an ended request once; reports decode's refusal as the reason of a failure.

        The engine releases it here and again when a failure is answered. That makes its user count negative, and an
        unload waits for 0. The scheduler may learn of a refusal only after its transfer has failed.
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
        """Releases the adapter of a request that was aborted in a queue, which the engine does not.

        Skips requests that were answered, e.g. because decode computes the prompt; the engine would end the worker.
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
        """Notify the other worker that the rooms of this request are refused here.

        own: the request's states. A room of another live request is skipped, since this one was a copy. at_fault: as in
        `refusal.RefusedReq`. Returns, on decode, futures that are done once prefill knows.
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
        refusal.name_rank(self.server_args, rooms, dp_rank=0)  # All ranks were notified.
        return []

    def _on_loop(self, call: Callable, *args: Any, **said: Any) -> None:
        """Run ``call`` on the event loop; for the bootstrap server's thread. The first request makes the loop."""
        if self.event_loop is None:
            raise NotNow("this prefill has not served any request yet")
        self.event_loop.call_soon_threadsafe(partial(call, *args, **said))

    def _refuse_rooms(self, rooms: list[int], reason: str) -> None:
        for room in rooms:
            logger.info("Decode has refused room %s: %s", room, reason)
            self.refused_rooms.note(room, reason)
            self.send_to_scheduler.send_pyobj(refusal.RefusedReq(room, reason, by_decode=True))
