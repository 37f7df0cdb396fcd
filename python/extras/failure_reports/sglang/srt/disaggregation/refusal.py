"""A request that one worker of a pair refuses before any handshake, and how the other one learns of it.

The router gives a request to both. Mostly both refuse it for the same reason. Where only one does (its limits are
smaller, or the request's rid is in use there), the other would wait for its peer until it times out.

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

# On a prefill's bootstrap server: what decode tells it, and what prefill's own processes do.
REFUSED_ROUTE, REFUSED_RANK_ROUTE = "/refused_room", "/refused_dp_rank"
add_route(REFUSED_ROUTE, reason=str)
add_route(REFUSED_RANK_ROUTE, dp_rank=int)
# Where decode asks which DP ranks have its rooms.
RANKS_ROUTE = "/query_dp_ranks"
# Seconds for which a refusal is remembered, for a request that comes after it. The router sends to both workers at
# once; who uses a room anew later means another request.
REMEMBERED_S = 10.0
# Rooms of a refused request that the other worker is told of.
MOST_ROOMS = 256 + 4096

# How decode takes the reason of a request that is itself at fault.
_TOLD_AT_FAULT = f"prefill reported: {AT_FAULT}"
# What the engine says where another prefill, or this one a little later, may serve the request.
_PASSES = (
    "Aborted by AbortReq",
    "Grammar preprocessing timed out",
    "Duplicate request IDs detected: ",
    # Decode has it, or it had refused the request itself: prefill was restarted since it was loaded, or unloads it.
    "LoRA adapter that has never been loaded",
    "LoRA adapters are not loaded",
    "Failed to implicitly load LoRA adapter",
)


@dataclass
class RefusedReq:
    """To prefill's scheduler: a room that decode has refused, or this prefill itself.

    at_fault: of what this prefill has refused, whether the request itself is: decode answers its client 400 then, as
    prefill has, and not 500, after which a router asks other workers.
    """

    room: int
    reason: str
    by_decode: bool
    at_fault: bool = False


class RefusedRooms(RoomNotes[str]):
    """Why rooms were refused of late."""

    def __init__(self) -> None:
        super().__init__(REMEMBERED_S)

    def reason(self, room: int | None) -> str | None:
        """Why, or None if it was not refused of late."""
        return self.of(room)


class RefusedRanks:
    """Which DP ranks of this prefill know of rooms that were refused before a sender could say which rank has them."""

    def __init__(self) -> None:
        # Decode asks for them as soon as it has the request.
        self._ranks: RoomNotes[int] = RoomNotes()

    def note(self, rooms: Sequence[int], dp_rank: int) -> None:
        """A process of this prefill says it (`name_rank`). Raises ValueError for what is no rank."""
        if dp_rank < 0:
            raise ValueError("dp_rank must be 0 or more")
        for room in rooms:
            self._ranks.note(room, dp_rank)

    def find(self, rooms: Iterable[int]) -> dict[str, int]:
        """The ranks of those of ``rooms`` that are known here."""
        found = {str(room): self._ranks.of(int(room)) for room in rooms}
        return {room: rank for room, rank in found.items() if rank is not None}

    @web.middleware
    async def add(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Add them to what the engine answers of its senders, whose ranks go before these."""
        reply = await handler(request)
        if request.path != RANKS_ROUTE or reply.status != 200 or not isinstance(reply, web.Response):
            return reply
        asked, known = await request.json(), json.loads(reply.text or "{}")
        found = self.find(asked["bootstrap_rooms"])
        return web.json_response({**found, **known}) if found.keys() - known.keys() else reply


def blames_request(why: Exception | str) -> bool:
    """Whether a request that is refused is itself at fault, and not the state that this worker is in.

    why: the reason, or the error that it has ended in, of which ValueError is the engine's for a client's.
    """
    if isinstance(why, Exception) and not isinstance(why, ValueError):
        return False
    return not any(words in str(why) for words in _PASSES)


def words_for_decode(refused: RefusedReq) -> str:
    """Why decode's request for KV fails that asks for what this prefill has refused."""
    return f"{AT_FAULT}{refused.reason}" if refused.at_fault else refused.reason


def is_at_fault(reason: str) -> bool:
    """Whether a transfer has failed, for ``reason``, since prefill says that the request itself is at fault."""
    return _TOLD_AT_FAULT in reason


def rooms_of(obj: Any, rooms: Any, each: int = 1) -> Iterator[tuple[Any, Any, Any]]:
    """The ``rooms`` of a request, a list or one, each with host and port of its prefill. None for what it does not say.

    each: of a list, the request has as many hosts for every room.
    """
    for i, room in enumerate(rooms if isinstance(rooms, list) else [] if rooms is None else [rooms]):
        yield room, _of_prompt(obj.bootstrap_host, i * each), _of_prompt(obj.bootstrap_port, i * each)


def rooms_refused(rooms: Iterable[tuple[Any, Any, Any]], served: Iterable[Any]) -> Iterator[tuple[int, Any, Any]]:
    """Those ``rooms_of`` a refused request that the other worker is told of.

    served: requests that are being served; their rooms are theirs, and this request was a copy.
    """
    live = {getattr(other, "bootstrap_room", None) for other in served}
    return (one for one in islice(rooms, MOST_ROOMS) if is_room(one[0]) and one[0] not in live)


def _of_prompt(values: Any, i: int) -> Any:
    """The value of one prompt, where each may have its own; None where a list is too short."""
    return values if not isinstance(values, list) else values[i] if i < len(values) else None


def tell_prefill(host: str, port: int, rooms: Sequence[int], reason: str) -> Future[None]:
    """Tell a prefill, without waiting for it, that decode has refused ``rooms``; returns what is done when it knows."""
    addr = NetworkAddress(host, port).to_host_port_str()
    return tell(addr, REFUSED_ROUTE, rooms, reason=reason[:MOST_CHARACTERS])


def tell_prefills(rooms: Iterable[tuple[int, Any, Any]], port: int, reason: str) -> list[Future[None]]:
    """Tell each prefill, in one message, which of ``rooms`` decode has refused. port: where a request names none.

    rooms: as of `rooms_refused`. Returns as `tell_prefill`, of all that are told.
    """
    of_prefill: defaultdict[tuple[Any, Any], list[int]] = defaultdict(list)
    for room, host, its_port in rooms:
        if host and host != FAKE_BOOTSTRAP_HOST:
            of_prefill[host, its_port or port].append(room)
    return [tell_prefill(*address, refused, reason) for address, refused in of_prefill.items()]


def name_rank(args: Any, rooms: Sequence[int], dp_rank: int, host: str | None = None) -> None:
    """Tell this prefill's bootstrap server, without waiting for it, which DP rank knows that ``rooms`` are refused.

    Decode has to ask that rank to hear it, and only the sender of a request that is served says which it is. Nothing is
    told where decode knows it by the room. args: the worker's options. host: where the server is, if not here.
    """
    if not rooms or args.dp_size == 1 or args.load_balance_method == "follow_bootstrap_room":
        return
    addr = NetworkAddress(host or args.host, args.disaggregation_bootstrap_port).to_host_port_str()
    tell(addr, REFUSED_RANK_ROUTE, rooms, dp_rank=dp_rank)
