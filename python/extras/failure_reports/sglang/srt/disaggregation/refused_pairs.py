"""Requests that prefill has refused, and that a decode worker without the flag asks for all the same.

The engine gives such a request a prompt of one token, and both workers go through with it: decode answers its client
when that has come, and hears of no refusal. Prefill answers at once here, and goes through with it if it is asked.

Ranks are asked in different steps, and must queue the request in the same one. So the rank that receives for all of
them says it, as it says which requests are lost.

Upstream: none is known; the bare engine queues every such request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.common.delta_sender import names_prefix
from sglang.srt.disaggregation.common.rooms import remember

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["AskedReqs", "RefusedPairs"]

# Requests that are remembered: by their number and not by a clock, which would differ between ranks.
REMEMBERED = 1024


@dataclass
class AskedReqs:
    """From the rank that receives to all ranks of a prefill: rooms of refused requests that decode has asked for."""

    rooms: list[int]


class RefusedPairs:
    """Refused requests, by room. All ranks of a prefill have the same: they are given the same in the same order."""

    def __init__(self) -> None:
        self._reqs: OrderedDict[int, Req] = OrderedDict()

    def keep(self, req: Req) -> None:
        """Remember a request that has been answered; its prompt is one token. The oldest is forgotten first."""
        # Nobody looks at the prompt that it had.
        req.origin_input_ids_unpadded, req.origin_input_text = req.origin_input_ids, ""
        # Its client has been answered, so its adapter may be unloaded; what else it asked for would fail others too.
        # Nor may the token's KV, which is the model's own then, be found under the adapter's name in a tree.
        req.lora_id = req.extra_key = None
        req.custom_logit_processor = req.token_type_ids = None
        req.return_hidden_states = req.return_routed_experts = False
        # The engine has cleared ``return_logprob`` only, and asks these of all in a batch with one who wants logprobs.
        req.top_logprobs_num, req.token_ids_logprob = 0, None
        remember(self._reqs, req.bootstrap_room, req, REMEMBERED)

    def __contains__(self, room: int) -> bool:
        """Whether the request of ``room`` is remembered."""
        return room in self._reqs

    def take(self, room: int) -> Req | None:
        """Remove and return the request of ``room``; None if there is none."""
        return self._reqs.pop(room, None)

    def asked(self, asked: Mapping[int, Mapping[str, Any]], live: Container[int]) -> list[int]:
        """The rooms of those that a decode worker without the flag has asked for.

        asked: what decode ranks have asked for, by room and name. live: rooms that are another request's.
        """
        # In each step of a prefill, so by the shorter of the two. In one go: a thread adds to what is asked for.
        rooms = [room for room in self._reqs.keys() & asked.keys() if asked.get(room) and room not in live]
        # Not if a decode worker with the flag has asked, which has been told. Copies, too.
        return [room for room in rooms if not names_prefix(list(asked.get(room, {}).values()))]
