"""Requests that prefill has refused and a decode worker without the flag still asks for.

The engine replaces such a prompt by one token, and both workers complete the request: decode answers its client only
when that token arrives. Here prefill answers its client at once, and completes the request if decode asks for it.

Decode asks the ranks in different steps, but they must queue the request in the same one. So the receiving rank
announces it, as it does for lost requests.

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

# Requests kept. A count, not a time, because ranks' clocks differ.
REMEMBERED = 1024


@dataclass
class AskedReqs:
    """Rooms of refused requests that decode has asked for, from the receiving rank to all ranks of a prefill."""

    rooms: list[int]


class RefusedPairs:
    """Refused requests by room. All ranks of a prefill have the same, since they receive the same in the same order."""

    def __init__(self) -> None:
        self._reqs: OrderedDict[int, Req] = OrderedDict()

    def keep(self, req: Req) -> None:
        """Keep a request that has been answered; its prompt is one token. The oldest is dropped if full."""
        # Its original prompt is not needed.
        req.origin_input_ids_unpadded, req.origin_input_text = req.origin_input_ids, ""
        # Its client was answered, so its adapter may be unloaded; its other features could fail requests in its batch.
        # Nor may the token's KV, computed by the base model, be found under the adapter's key in a tree.
        req.lora_id = req.extra_key = None
        req.custom_logit_processor = req.token_type_ids = None
        req.return_hidden_states = req.return_routed_experts = False
        # The engine has cleared ``return_logprob`` only, but reads these of all requests in a batch with logprobs.
        req.top_logprobs_num, req.token_ids_logprob = 0, None
        remember(self._reqs, req.bootstrap_room, req, REMEMBERED)

    def __contains__(self, room: int) -> bool:
        return room in self._reqs

    def take(self, room: int) -> Req | None:
        """Remove and return the request of ``room``; None if there is none."""
        return self._reqs.pop(room, None)

    def asked(self, asked: Mapping[int, Mapping[str, Any]], live: Container[int]) -> list[int]:
        """Rooms of kept requests that a decode worker without the flag has asked for.

        asked: decode ranks' requests by room and session. live: rooms of other live requests.
        """
        # Runs in each step, so over the smaller set. In one expression, since a thread adds to ``asked``.
        rooms = [room for room in self._reqs.keys() & asked.keys() if asked.get(room) and room not in live]
        # Not if a decode worker with the flag asked; it was notified. Copied, for the same reason.
        return [room for room in rooms if not names_prefix(list(asked.get(room, {}).values()))]
