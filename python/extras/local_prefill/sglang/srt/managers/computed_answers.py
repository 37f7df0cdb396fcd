"""Prefill's answers to clients whose prompts decode computes: an empty one, at once.

Upstream: none is known.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.disaggregation.dropped_rooms import ComputedReq
from sglang.srt.disaggregation.peer_calls import add_route
from sglang.srt.disaggregation.room_notes import RoomNotes, is_room

__all__ = ["COMPUTED_ROUTE", "ComputedAnswers"]

# Route of a prefill's bootstrap server for decode's notifications.
COMPUTED_ROUTE = "/computed_room"
add_route(COMPUTED_ROUTE)


class ComputedAnswers:
    """Ends requests in a prefill's tokenizer manager, on its event loop."""

    def __init__(self, manager: Any):
        self._manager = manager
        # Notified rooms whose requests have not arrived or been sent to the scheduler. Each is for one request: a later
        # request may reuse the room.
        self.rooms: RoomNotes[bool] = RoomNotes()
        # Rids of live requests by room. Their states own the set; two requests may have the same room.
        self._rids: WeakValueDictionary[int, set[str]] = WeakValueDictionary()

    def note(self, room: int) -> None:
        """Decode computes ``room``: answer its requests and cancel them in the scheduler, now or on arrival."""
        rids, states = self._rids.get(room, ()), self._manager.rid_to_state
        waiting = [(rid, state) for rid in rids if getattr(state := states.get(rid), "rids", None) is rids]
        waiting = [(rid, state) for rid, state in waiting if state.sent and not state.finished]
        for rid, state in waiting:
            self._manager.send_to_scheduler.send_pyobj(ComputedReq(room, rid))
            self._end(rid, state, state.prompt_tokens)
        if not waiting:
            self.rooms.note(room, True)

    def answers(self, tokenized_obj: Any, of_batch: bool = False) -> bool:
        """Whether a request that is about to be sent is answered already.

        of_batch: it is sent with others; the engine looks up the states of all of them afterwards.
        """
        rid, state = tokenized_obj.rid, self._manager.rid_to_state.get(tokenized_obj.rid)
        room: Any = getattr(tokenized_obj, "bootstrap_room", None)
        # An aggregated server accepts any value as room.
        if state is None or not is_room(room):
            return False
        prompt_tokens = len(getattr(tokenized_obj, "input_ids", None) or ())
        if self.rooms.take(room):
            if of_batch:
                asyncio.get_running_loop().call_soon(self._end, rid, state, prompt_tokens)
            else:
                self._end(rid, state, prompt_tokens)
            return True
        # It is sent next, on this thread.
        state.prompt_tokens, state.rids = prompt_tokens, self._rids.setdefault(room, set())
        state.rids.difference_update([one for one in state.rids if one not in self._manager.rid_to_state])
        state.rids.add(rid)
        return False

    def _end(self, rid: str, state: Any, prompt_tokens: int) -> None:
        manager, obj = self._manager, state.obj
        if manager.rid_to_state.get(rid) is not state:
            # Its batch has been cancelled since.
            return
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "cached_tokens": 0,
            "reasoning_tokens": 0,
            "weight_version": manager.server_args.weight_version,
        }
        if getattr(obj, "return_logprob", False):
            texts = obj.return_text_in_logprobs and not manager.server_args.skip_tokenizer_init
            manager.add_logprob_to_meta_info(meta, state, obj.top_logprobs_num, obj.token_ids_logprob, texts)
        state.finished = True
        state.time_stats.set_finished_time()
        meta["e2e_latency"] = state.time_stats.get_e2e_latency()
        del manager.rid_to_state[rid]
        if manager.server_args.enable_lora and obj.lora_path and state.sent:
            asyncio.create_task(manager._release_adapters([obj.lora_id]))
            obj.lora_path = None
        state.out_list.append({"text": state.text, "output_ids": [], "meta_info": meta})
        if hasattr(manager, "_remember"):
            # With the extra `ended_requests`.
            manager._remember(rid, state, None)
        state.event.set()
