"""n > 1 with PD disaggregation: a room for each sample of a prompt, the same on both workers.

The engine gives all samples of a prompt the room of its request, and they are told apart by nothing. Here a request
with n samples of b prompts becomes a batch of n * b prompts before anything else is done with it, each with a room that
follows from that of its request. The first sample that decode admits brings the prompt's KV; the others wait for that
and find it in the tree, so prefill computes the prompt once.

Prefill cannot know from a request which rooms decode will ask for, so decode says it (`announce`) before it asks for
anything. Until then prefill does what the engine does, for a decode worker that says nothing: it warms its cache with a
request of the prompt's own room. That waits for decode to ask for this room, which a decode worker that announces never
does, so in this race nothing can go wrong (`Announcement`).

Upstream: none is known: sgl-project/sglang#9224, #24223, #26486, #30723 and #40297 are all closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from sglang.srt.disaggregation import refusal
from sglang.srt.disaggregation.peer_calls import NotNow, Unanswered, add_route, ask
from sglang.srt.disaggregation.room_notes import RoomNotes, is_room
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.environ import envs
from sglang.srt.utils.network import NetworkAddress

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

__all__ = [
    "DERIVATION",
    "MAX_SAMPLES",
    "PrefillUnreachable",
    "SAMPLE_ROUTE",
    "SampleRooms",
    "SamplesHaveRooms",
    "Announcement",
    "announce",
    "first_answer",
    "give_rooms",
    "names_of",
    "sample_room",
    "samples_asked",
]

# Requests that one may be split into.
MAX_SAMPLES = 4096
# How rooms follow from a room; another way would have another number.
DERIVATION = 1
# On a prefill's bootstrap server: what decode tells it.
SAMPLE_ROUTE = "/sample_rooms"
add_route(SAMPLE_ROUTE, derivation=int)
# Rooms that are congruent modulo this are on the same rank of every DP size that divides it: all to 16, 2^n to 256.
# It is lcm(1, ..., 16) * 16.
STRIDE = 11_531_520
# Multiples of it below 2**63, the end of what a room may be.
MULTIPLES = 2**63 // STRIDE

# Of a request after the engine's normalisation: what has an entry for each prompt, at least, if it is a list.
_LISTS = (
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "lora_path",
    "custom_logit_processor",
    "extra_key",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)


def sample_room(room: int, index: int) -> int:
    """The room of sample ``index`` (0 to MAX_SAMPLES - 1) of the request of ``room``. Both in [1, 2**63).

    Never the room itself, and another one for each index. ``room`` modulo `STRIDE` is kept, and with it
    ``room % dp_size``. Where among the multiples of STRIDE a room's samples begin is a hash of it, so rooms that
    follow each other, as a client may number them, have samples far apart. Those of two requests collide with
    probability 2n / 2**63 if their rooms are random, and 2n / 2**39 if these are congruent.
    """
    multiple, rest = divmod(room, STRIDE)
    digest = hashlib.blake2b(room.to_bytes(8, "big"), digest_size=8, person=b"sample room").digest()
    jump = int.from_bytes(digest, "big") % (MULTIPLES - 1 - MAX_SAMPLES)
    # From 1 on, since room 0 is nobody's. jump + index + 1 < MULTIPLES - 1, so it does not come round to the room.
    return (multiple + jump + index) % (MULTIPLES - 1) * STRIDE + STRIDE + rest


def samples_asked(obj: Any) -> bool:
    """Whether this request, before its normalisation, asks for more than one sample of each prompt.

    What is no number of samples is for the checks that come later.
    """
    params = getattr(obj, "sampling_params", None)
    first = params[0] if isinstance(params, list) and params else params
    n = first.get("n", 1) if isinstance(first, Mapping) else 1
    return isinstance(n, int) and not isinstance(n, bool) and 1 < n <= MAX_SAMPLES


def give_rooms(obj: GenerateReqInput, rid: str | list[str] | None) -> None:
    """Make a batch with a prompt for each sample of ``obj``, which has been normalised: prompt by prompt, as answered.

    rid: what the client has called it. A prompt's samples are called by it and their number, in as many digits as the
    greatest needs, so that none begins with another.
    """
    prompts, n = obj.batch_size, obj.parallel_sample_num
    exact = {"extra_key": prompts, "lora_path": prompts * n}
    for name in _LISTS:
        values = getattr(obj, name)
        # An empty one is as good as none: chat requests have such modalities. Not of what the router gives each prompt.
        if isinstance(values, list) and (values or name.startswith("bootstrap_")):
            if len(values) != exact.get(name, len(values)):
                raise ValueError(f"{name} must have an entry for each of the {prompts} prompts.")
            # Where the engine has an entry for each sample, it has all prompts, n times.
            setattr(obj, name, [values[prompt] for prompt in range(prompts) for _ in range(n)])
    obj.sampling_params = [{**params, "n": 1} for params in obj.sampling_params]
    if isinstance(rid, str):
        obj.rid = _numbered(rid, prompts * n)
    elif rid is not None:
        obj.rid = [name for one in rid for name in _numbered(one, n)]
    # What is no room is refused by the checks of requests. None is none.
    obj.request_rooms = [room if is_room(room) else None for room in obj.bootstrap_room[::n]]
    for i, room in enumerate(obj.bootstrap_room):
        # Warm-ups share nothing.
        if is_room(room) and obj.bootstrap_host[i] != FAKE_BOOTSTRAP_HOST:
            obj.bootstrap_room[i] = sample_room(room, i % n)
    obj.batch_size, obj.parallel_sample_num, obj.samples = prompts * n, 1, n
    obj._validate_rid_uniqueness()


def _numbered(rid: str, count: int) -> list[str]:
    width = len(str(count - 1))
    return [f"{rid}_{i:0{width}d}" for i in range(count)]


def names_of(rid: str | list[str] | None, sampled: Sequence[str], taken: Mapping[str, Any]) -> dict[str, list[str]]:
    """What the samples of a request are called, by what the client has called it.

    sampled: the names of all samples, prompt by prompt. taken: names of requests that are being served. One that is in
    use is the other request's, and this one is refused.
    """
    called = [] if rid is None else rid if isinstance(rid, list) else [rid]
    count = len(sampled) // (len(called) or 1)
    return {one: [*sampled[i * count : (i + 1) * count]] for i, one in enumerate(called) if one not in taken}


# ---- decode ----


class PrefillUnreachable(HTTPException):
    """A prefill does not answer. It may have heard all the same, and wait for what is not asked for."""

    def __init__(self, addr: str, why: Any) -> None:
        super().__init__(HTTPStatus.INTERNAL_SERVER_ERROR, f"prefill {addr} cannot be told of samples: {why}")


async def announce(obj: GenerateReqInput, default_port: int) -> None:
    """Tell the prefills of this request, and wait until they know, that its samples have rooms of their own.

    default_port: of a bootstrap server of which the request names none.
    Raises ValueError, which says why, if a prefill gives them none, and `PrefillUnreachable`.
    """
    rooms: dict[str, list[int]] = {}
    for i, room in enumerate(obj.request_rooms):
        host, port = obj.bootstrap_host[i * obj.samples], obj.bootstrap_port[i * obj.samples]
        if room and host and host != FAKE_BOOTSTRAP_HOST:
            addr = NetworkAddress(host, port or default_port).to_host_port_str()
            rooms.setdefault(addr, []).append(room)
    await asyncio.gather(*(_announce(addr, of) for addr, of in rooms.items()))


async def _announce(addr: str, rooms: Sequence[int]) -> None:
    try:
        status, said = await asyncio.wrap_future(ask(addr, SAMPLE_ROUTE, rooms, derivation=DERIVATION))
    except Unanswered as e:
        raise PrefillUnreachable(addr, e) from e
    if status in (404, 405):
        raise ValueError(
            f"n must be 1: prefill {addr} gives samples no rooms of their own. Install this sglang-pd-radix "
            "there too, or send the request n times."
        )
    if status == 400:
        raise ValueError(said)
    if status != 200:
        raise PrefillUnreachable(addr, f"status {status}, {said[:200]}")


# ---- prefill ----


class SamplesHaveRooms(Exception):
    """Decode has announced the samples of a request that was begun as the engine begins it."""


class Announcement:
    """Whether decode has announced a request's samples, for the prefill that serves it; of one event loop.

    told: it has. too_late: the engine's warm-up was answered, so decode has asked for the request's own room, and the
    samples are those of the engine.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.told = False
        self.too_late = False
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return when decode has announced the samples; for ever if it does not."""
        await self._event.wait()

    def tell(self) -> None:
        """Called on any thread."""
        self.told = True
        self.loop.call_soon_threadsafe(self._event.set)


async def first_answer(answers: AsyncIterator, announcement: Announcement) -> asyncio.Future:
    """The task of the next of ``answers``, when it is done or decode has announced the samples."""
    answer = asyncio.ensure_future(answers.__anext__())
    told = asyncio.ensure_future(announcement.wait())
    try:
        await asyncio.wait({answer, told}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        answer.cancel()
        raise
    finally:
        told.cancel()
    return answer


class SampleRooms:
    """What a prefill has been told of samples, by the rooms of their requests. Announcement and request may come in
    any order, on different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Announcements whose request has not come. It does not come later than this: decode has given it up.
        self._told: RoomNotes[bool] = RoomNotes(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        self._announcements: dict[int, Announcement] = {}
        # Requests that this prefill has refused, which decode may announce later, and whether they are at fault.
        self._refused: RoomNotes[tuple[str, bool]] = RoomNotes(refusal.REMEMBERED_S)

    def announced(self, rooms: Sequence[int], derivation: int = DERIVATION) -> None:
        """Decode has announced the samples of the requests of ``rooms``.

        Raises ValueError, which says why, if they cannot be served, and `NotNow` where this prefill has refused one
        that is not at fault.
        """
        if derivation != DERIVATION:
            raise ValueError(
                f"n must be 1: decode derives the rooms of samples in another way (derivation {derivation}, prefill "
                f"has {DERIVATION}). Install the same sglang-pd-radix on both."
            )
        with self._lock:
            for reason, at_fault in filter(None, map(self._refused.of, rooms)):
                raise ValueError(reason) if at_fault else NotNow(reason)
            announcements = [self._announcements[room] for room in rooms if room in self._announcements]
            if any(announcement.too_late for announcement in announcements):
                raise ValueError(
                    "prefill serves this bootstrap_room for a decode worker that gives samples no rooms of their own"
                )
            for room in rooms:
                self._told.note(room, True)
            for announcement in announcements:
                announcement.tell()

    def expect(self, rooms: Sequence[int]) -> Announcement:
        """A request of ``rooms`` has come: whether its samples have been announced, now or later."""
        announcement = Announcement()
        with self._lock:
            if any(map(self._told.of, rooms)):
                announcement.tell()
            for room in rooms:
                self._announcements[room] = announcement
        return announcement

    def done(self, rooms: Sequence[int], announcement: Announcement) -> None:
        """The request of `expect` has ended, or its samples have been sent."""
        with self._lock:
            for room in rooms:
                if self._announcements.get(room) is announcement:
                    del self._announcements[room]
                if announcement.told:
                    self._told.take(room)

    def refuse(self, rooms: Sequence[int], reason: str, at_fault: bool) -> None:
        """A request of ``rooms`` is refused here; decode learns of it when it announces its samples.

        at_fault: as in `refusal.RefusedReq`.
        """
        with self._lock:
            for room in rooms:
                self._refused.note(room, (reason, at_fault))

    def close(self, announcement: Announcement) -> bool:
        """The engine's warm-up was answered. Returns whether that was before an announcement; then none is taken."""
        with self._lock:
            announcement.too_late = not announcement.told
            return announcement.too_late
