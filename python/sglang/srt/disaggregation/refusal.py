"""A request that one worker of a pair refuses before any handshake, and how the other one learns of it.

The router gives a request to both. Mostly both refuse it for the same reason. Where only one does (its limits are
smaller, or the request's rid is in use there), the other would wait for its peer until it times out.

Upstream: none is known by which a worker tells its peer; sgl-project/sglang#30325 (open) ends prefill's own side.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.common.authentication import SignedRequests
from sglang.srt.disaggregation.peer_calls import PeerCalls, TooManyCalls
from sglang.srt.disaggregation.room_notes import RoomNotes, is_room
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

__all__ = [
    "REFUSED_RANK_ROUTE",
    "REFUSED_ROUTE",
    "RefusedReq",
    "RefusedRooms",
    "blames_request",
    "is_at_fault",
    "listen",
    "name_rank",
    "rooms_refused",
    "take_refusal",
    "tell_prefill",
    "tell_prefills",
    "words_for_decode",
]

# On a prefill's bootstrap server: what decode tells it, and what prefill's own processes do.
REFUSED_ROUTE = "/refused_room"
REFUSED_RANK_ROUTE = "/refused_dp_rank"
# Refusals that are remembered, for a request that comes after its refusal, and seconds for which they are. The router
# sends to both workers at once; who uses a room anew later means another request.
REMEMBERED, REMEMBERED_S = 16384, 10.0
# Of a request that is refused, prompts whose rooms the other worker is told of; and rooms, with those of samples.
MOST_PROMPTS, MOST_ROOMS = 256, 256 + 4096
# Of a reason; it comes from another worker.
MOST_CHARACTERS = 1000
# Seconds that a prefill has to answer.
ANSWER_S = 5.0

# How the reason begins that prefill notifies decode of where the request itself is at fault; and how decode takes it.
AT_FAULT = "the request is refused: "
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

_tellers = PeerCalls("tell-refusal")
_listeners: list[Callable[[int, str], None]] = []


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
        super().__init__(REMEMBERED, REMEMBERED_S)

    def reason(self, room: int | None) -> str | None:
        """Why, or None if it was not refused of late."""
        return self.of(room)


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


def rooms_refused(obj: Any, served: Iterable[Any], decodes: bool) -> Iterator[tuple[int, Any, Any]]:
    """The rooms of a refused request that the other worker is told of, each with host and port of its prefill.

    Of the first prompts, before their samples, and None for what the request does not say. served: requests that are
    being served; their rooms are theirs, and this request was a copy. decodes: whether decode refuses it.
    """
    rooms = getattr(obj, "bootstrap_room", None)
    if rooms is None:
        return
    hosts, ports = obj.bootstrap_host, obj.bootstrap_port
    live = {getattr(other, "bootstrap_room", None) for other in served}
    most = MOST_ROOMS if decodes else MOST_PROMPTS
    at = list(enumerate(rooms[:most] if isinstance(rooms, list) else [rooms]))
    if getattr(obj, "samples", 0) and decodes and not obj.announced:
        # Prefill knows only of the rooms of prompts.
        at = [(i * obj.samples, room) for i, room in enumerate(obj.request_rooms)]
        if getattr(obj, "unreached", False):
            # Or it has heard of the samples, and its answer was late. In a stream one that fails ends no other.
            each = range(obj.samples if obj.stream else 1)
            at += [(i + j, rooms[i + j]) for i, _ in at[:most] for j in each]
    for i, room in at[:most]:
        if is_room(room) and room not in live:
            yield room, _of_prompt(hosts, i), _of_prompt(ports, i)


def _of_prompt(values: Any, i: int) -> Any:
    """The value of one prompt, where each may have its own; None where a list is too short."""
    return values if not isinstance(values, list) else values[i] if i < len(values) else None


def listen(listener: Callable[[int, str], None]) -> None:
    """Have ``listener`` called with each room that decode refuses, on the bootstrap server's thread."""
    _listeners.append(listener)


def take_refusal(told: Any) -> None:
    """Take what decode has told of rooms that it has refused. Raises ValueError for what cannot be meant."""
    said: dict[str, Any] = told if isinstance(told, dict) else {}
    # An earlier version says one.
    rooms: Any = said.get("rooms", [said.get("room")])
    reason = said.get("reason")
    # At most as many as decode tells of one request.
    named = isinstance(rooms, list) and 0 < len(rooms) <= MOST_ROOMS and all(map(is_room, rooms))
    if not named or not isinstance(reason, str):
        raise ValueError("a refusal has rooms and a reason")
    # JSON may hold half a character, with which no client could be answered.
    reason = reason[:MOST_CHARACTERS].encode(errors="replace").decode()
    for listener in _listeners:
        for room in rooms:
            listener(room, reason)


def tell_prefill(host: str, port: int, rooms: Sequence[int], reason: str) -> Future | None:
    """Tell a prefill, without waiting for it, that decode has refused ``rooms``. One without the package has no ear.

    Returns what is done when it has been told, or could not be; None where nobody is told.
    """
    if host == FAKE_BOOTSTRAP_HOST:
        return None
    # The first by itself is what an earlier version hears.
    said = {"room": rooms[0], "rooms": list(rooms), "reason": reason[:MOST_CHARACTERS]}
    return _tell(host, port, REFUSED_ROUTE, said, f"that decode has refused room {_named(rooms)}")


def tell_prefills(rooms: Iterable[tuple[int, Any, Any]], port: int, reason: str) -> list[Future]:
    """Tell each prefill, in one word, which of ``rooms`` decode has refused. port: where a request names none.

    rooms: as of `rooms_refused`. Returns as `tell_prefill`, of all that are told.
    """
    of_prefill: defaultdict[tuple[Any, Any], list[int]] = defaultdict(list)
    for room, host, its_port in rooms:
        if host:
            of_prefill[host, its_port or port].append(room)
    calls = [tell_prefill(*address, refused, reason) for address, refused in of_prefill.items()]
    return [call for call in calls if call is not None]


def name_rank(args: Any, rooms: Sequence[int], dp_rank: int, host: str | None = None, to_all: bool = False) -> None:
    """Tell this prefill's bootstrap server, without waiting for it, which DP rank knows that ``rooms`` are refused.

    Decode has to ask that rank to hear it, and only the sender of a request that is served says which it is. Nothing is
    told where decode knows it by the room. args: the worker's options. host: where the server is, if not here. to_all:
    decode workers without the flag may ask that rank too: they are given the one token of such a request.
    """
    if not rooms or args.dp_size == 1 or args.load_balance_method == "follow_bootstrap_room":
        return
    said = {"rooms": list(rooms), "dp_rank": dp_rank, "to_all": to_all}
    what = f"which DP rank has refused room {_named(rooms)}"
    _tell(host or args.host, args.disaggregation_bootstrap_port, REFUSED_RANK_ROUTE, said, what)


def _tell(host: str, port: int, route: str, said: Mapping[str, Any], what: str) -> Future | None:
    """Say it to a bootstrap server, without waiting. what: for the log. Returns None if too much waits to be said."""
    url = NetworkAddress(host, port).to_url() + route

    def tell() -> None:
        try:
            SignedRequests().post(url, json=said, timeout=ANSWER_S)
        except Exception as e:
            logger.warning("Could not tell %s:%s %s, for which the other worker waits: %s", host, port, what, e)

    try:
        return _tellers.submit((host, port), tell)
    except TooManyCalls:
        logger.warning("Too many refusals wait to be told, and %s:%s is not told %s", host, port, what)
        return None


def _named(rooms: Sequence[int]) -> str:
    return str(rooms[0]) if len(rooms) == 1 else f"{rooms[0]} and {len(rooms) - 1} more"
