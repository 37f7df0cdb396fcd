"""Requests that one worker of a pair refuses before any handshake, and how it notifies the other.

The router sends a request to both. Usually both refuse it for the same reason. If only one does (lower limits, or a rid
in use there), the other would wait for its peer until it times out.

Upstream: none is known by which a worker tells its peer; sgl-project/sglang#30325 (open) ends prefill's own side.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.delta_sender import AT_FAULT
from sglang.srt.disaggregation.peer_calls import MOST_CHARACTERS, add_route, tell
from sglang.srt.disaggregation.room_notes import RoomNotes, is_room
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.utils.network import NetworkAddress

__all__ = [
    "RANKS_ROUTE",
    "REFUSED_RANK_ROUTE",
    "REFUSED_ROUTE",
    "RefusedRanks",
    "RefusedReq",
    "RefusedRooms",
    "blames_request",
    "is_at_fault",
    "name_rank",
    "rooms_of",
    "rooms_refused",
    "tell_prefill",
    "tell_prefills",
    "words_for_decode",
]

# Routes of a prefill's bootstrap server: for decode, and for prefill's own processes.
REFUSED_ROUTE, REFUSED_RANK_ROUTE = "/refused_room", "/refused_dp_rank"
add_route(REFUSED_ROUTE, reason=str)
add_route(REFUSED_RANK_ROUTE, dp_rank=int)
# The engine's route by which decode queries the DP ranks of its rooms.
RANKS_ROUTE = "/query_dp_ranks"
# Seconds for which a refusal applies to a request that arrives later. The router sends to both workers at once; a later
# use of the room is another request.
REMEMBERED_S = 10.0
# Rooms of a refused request that the other worker is notified of, at most.
MOST_ROOMS = 256 + 4096

# Prefix of reasons on decode for requests at fault.
_TOLD_AT_FAULT = f"prefill reported: {AT_FAULT}"
# The engine's messages for requests that another prefill, or this one later, may serve.
_PASSES = (
    "Aborted by AbortReq",
    "Grammar preprocessing timed out",
    "Duplicate request IDs detected: ",
    # Decode has the adapter, or would have refused: this prefill was restarted since it was loaded, or is unloading it.
    "LoRA adapter that has never been loaded",
    "LoRA adapters are not loaded",
    "Failed to implicitly load LoRA adapter",
)


@dataclass
class RefusedReq:
    """To prefill's scheduler: a room that decode or this prefill has refused.

    at_fault: whether the request itself is at fault, if this prefill refused it. Decode then answers 400, as prefill
    does, and not 500, on which a router tries other workers.
    """

    room: int
    reason: str
    by_decode: bool
    at_fault: bool = False


class RefusedRooms(RoomNotes[str]):
    """Reasons of recently refused rooms."""

    def __init__(self) -> None:
        super().__init__(REMEMBERED_S)

    def reason(self, room: int | None) -> str | None:
        """The reason, or None if the room was not refused recently."""
        return self.of(room)


class RefusedRanks:
    """DP ranks of this prefill that know refused rooms for which no sender has registered a rank."""

    def __init__(self) -> None:
        # Decode queries them as soon as it has the request.
        self._ranks: RoomNotes[int] = RoomNotes()

    def note(self, rooms: Sequence[int], dp_rank: int) -> None:
        """Called by a process of this prefill (`name_rank`). Raises ValueError for an invalid rank."""
        if dp_rank < 0:
            raise ValueError("dp_rank must be 0 or more")
        for room in rooms:
            self._ranks.note(room, dp_rank)

    def find(self, rooms: Iterable[int]) -> dict[str, int]:
        """The known ranks of ``rooms``."""
        found = {str(room): self._ranks.of(int(room)) for room in rooms}
        return {room: rank for room, rank in found.items() if rank is not None}

    @web.middleware
    async def add(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Add the ranks to the engine's answer; ranks of its senders take precedence."""
        reply = await handler(request)
        if request.path != RANKS_ROUTE or reply.status != 200 or not isinstance(reply, web.Response):
            return reply
        asked, known = await request.json(), json.loads(reply.text or "{}")
        found = self.find(asked["bootstrap_rooms"])
        return web.json_response({**found, **known}) if found.keys() - known.keys() else reply


def blames_request(why: Exception | str) -> bool:
    """Whether a refused request is itself at fault, and not the worker's state.

    why: the reason, or the exception; the engine raises ValueError for clients' errors.
    """
    if isinstance(why, Exception) and not isinstance(why, ValueError):
        return False
    return not any(words in str(why) for words in _PASSES)


def words_for_decode(refused: RefusedReq) -> str:
    """The reason with which decode's request for KV fails."""
    return f"{AT_FAULT}{refused.reason}" if refused.at_fault else refused.reason


def is_at_fault(reason: str) -> bool:
    """Whether ``reason``, of a failed transfer, says that the request itself is at fault."""
    return _TOLD_AT_FAULT in reason


def rooms_of(obj: Any, rooms: Any, each: int = 1) -> Iterator[tuple[Any, Any, Any]]:
    """The ``rooms`` of a request (a list or one), each with host and port of its prefill; None where not given.

    each: hosts per room, if the request has a list of hosts.
    """
    for i, room in enumerate(rooms if isinstance(rooms, list) else [] if rooms is None else [rooms]):
        yield room, _of_prompt(obj.bootstrap_host, i * each), _of_prompt(obj.bootstrap_port, i * each)


def rooms_refused(rooms: Iterable[tuple[Any, Any, Any]], served: Iterable[Any]) -> Iterator[tuple[int, Any, Any]]:
    """The rooms of a refused request that the other worker is notified of.

    served: live requests. Their rooms are skipped, since the refused request was a copy.
    """
    live = {getattr(other, "bootstrap_room", None) for other in served}
    return (one for one in islice(rooms, MOST_ROOMS) if is_room(one[0]) and one[0] not in live)


def _of_prompt(values: Any, i: int) -> Any:
    """The value of one prompt if each has its own; None if the list is too short."""
    return values if not isinstance(values, list) else values[i] if i < len(values) else None


def tell_prefill(host: str, port: int, rooms: Sequence[int], reason: str) -> Future[None]:
    """Notify a prefill that decode has refused ``rooms``; returns a future that is done once prefill knows."""
    addr = NetworkAddress(host, port).to_host_port_str()
    return tell(addr, REFUSED_ROUTE, rooms, reason=reason[:MOST_CHARACTERS])


def tell_prefills(rooms: Iterable[tuple[int, Any, Any]], port: int, reason: str) -> list[Future[None]]:
    """Notify each prefill, in one message, of its refused ``rooms``. port: for rooms without one.

    rooms: as of `rooms_refused`. Returns the futures of `tell_prefill`.
    """
    of_prefill: defaultdict[tuple[Any, Any], list[int]] = defaultdict(list)
    for room, host, its_port in rooms:
        if host and host != FAKE_BOOTSTRAP_HOST:
            of_prefill[host, its_port or port].append(room)
    return [tell_prefill(*address, refused, reason) for address, refused in of_prefill.items()]


def name_rank(args: Any, rooms: Sequence[int], dp_rank: int, host: str | None = None) -> None:
    """Report to this prefill's bootstrap server which DP rank knows that ``rooms`` are refused; does not wait.

    Decode must ask that rank for the reason, and only senders of served requests register one. Not needed if decode
    derives the rank from the room. args: the worker's options. host: the server's, if not this one.
    """
    if not rooms or args.dp_size == 1 or args.load_balance_method == "follow_bootstrap_room":
        return
    addr = NetworkAddress(host or args.host, args.disaggregation_bootstrap_port).to_host_port_str()
    tell(addr, REFUSED_RANK_ROUTE, rooms, dp_rank=dp_rank)
