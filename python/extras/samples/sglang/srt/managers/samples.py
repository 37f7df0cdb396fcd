"""n > 1 with PD disaggregation: a bootstrap_room for each sample of a prompt, equal on both workers.

In the engine all samples of a prompt share one room and cannot be distinguished. Here a request with n samples of b
prompts becomes a batch of n * b prompts first. Each has a room derived from the request's. The first sample admitted
on decode brings the prompt's KV; the others wait for it and find it in the tree, so prefill computes it once.

Prefill cannot know which rooms decode will use, so decode announces them (`announce`) before it asks for KV. Until
then prefill does what the engine does: it warms its cache with a request of the prompt's own room. That waits for
decode to ask for this room, which a decode worker that announces never does. So either order is correct
(`Announcement`).

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

# Most samples times prompts of one request.
MAX_SAMPLES = 4096
# Version of `sample_room`.
DERIVATION = 1
# Route on a prefill's bootstrap server for announcements.
SAMPLE_ROUTE = "/sample_rooms"
add_route(SAMPLE_ROUTE, derivation=int)
# Rooms congruent modulo this are on the same rank for every DP size that divides it: all up to 16, 2^n up to 256. It is
# lcm(1, ..., 16) * 16.
STRIDE = 11_531_520
# Multiples of it below 2**63, the bound of rooms.
MULTIPLES = 2**63 // STRIDE

# Attributes of a normalised request with at least one entry per prompt, if they are lists.
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
    """The room of sample ``index`` (0 to MAX_SAMPLES - 1) of a request's ``room``. Both in [1, 2**63).

    Never ``room`` itself; different for each index. Equal to ``room`` modulo `STRIDE`, and so modulo dp_size. The first
    multiple of STRIDE is a hash of the room: consecutive rooms, as clients may number them, have samples far apart. Two
    requests' samples collide with probability 2n / 2**63 for random rooms, and 2n / 2**39 for congruent ones.
    """
    multiple, rest = divmod(room, STRIDE)
    digest = hashlib.blake2b(room.to_bytes(8, "big"), digest_size=8, person=b"sample room").digest()
    jump = int.from_bytes(digest, "big") % (MULTIPLES - 1 - MAX_SAMPLES)
    # From 1 on: room 0 is invalid. jump + index + 1 < MULTIPLES - 1, so it does not wrap around to the room.
    return (multiple + jump + index) % (MULTIPLES - 1) * STRIDE + STRIDE + rest


def samples_asked(obj: Any) -> bool:
    """Whether a request asks for more than one sample of each prompt, before its normalisation.

    Invalid values of n are left to later checks.
    """
    params = getattr(obj, "sampling_params", None)
    first = params[0] if isinstance(params, list) and params else params
    n = first.get("n", 1) if isinstance(first, Mapping) else 1
    return isinstance(n, int) and not isinstance(n, bool) and 1 < n <= MAX_SAMPLES


def give_rooms(obj: GenerateReqInput, rid: str | list[str] | None) -> None:
    """Turn a normalised request into a batch with one prompt per sample, in order of the answers.

    rid: the client's. Samples get it with their number appended, in equal width, so that none is another's prefix.
    """
    prompts, n = obj.batch_size, obj.parallel_sample_num
    exact = {"extra_key": prompts, "lora_path": prompts * n}
    for name in _LISTS:
        values = getattr(obj, name)
        # Empty lists count as absent: chat requests have empty modalities. Not for the router's entries per prompt.
        if isinstance(values, list) and (values or name.startswith("bootstrap_")):
            if len(values) != exact.get(name, len(values)):
                raise ValueError(f"{name} must have an entry for each of the {prompts} prompts.")
            # Lists with an entry per sample repeat all prompts n times.
            setattr(obj, name, [values[prompt] for prompt in range(prompts) for _ in range(n)])
    obj.sampling_params = [{**params, "n": 1} for params in obj.sampling_params]
    if isinstance(rid, str):
        obj.rid = _numbered(rid, prompts * n)
    elif rid is not None:
        obj.rid = [name for one in rid for name in _numbered(one, n)]
    # Invalid rooms are refused by later checks.
    obj.request_rooms = [room if is_room(room) else None for room in obj.bootstrap_room[::n]]
    for i, room in enumerate(obj.bootstrap_room):
        # Warm-ups keep theirs.
        if is_room(room) and obj.bootstrap_host[i] != FAKE_BOOTSTRAP_HOST:
            obj.bootstrap_room[i] = sample_room(room, i % n)
    obj.batch_size, obj.parallel_sample_num, obj.samples = prompts * n, 1, n
    obj._validate_rid_uniqueness()


def _numbered(rid: str, count: int) -> list[str]:
    width = len(str(count - 1))
    return [f"{rid}_{i:0{width}d}" for i in range(count)]


def names_of(rid: str | list[str] | None, sampled: Sequence[str], taken: Mapping[str, Any]) -> dict[str, list[str]]:
    """The samples' rids, by the client's rid.

    sampled: rids of all samples, prompt by prompt. taken: rids of requests being served; such a request is refused.
    """
    called = [] if rid is None else rid if isinstance(rid, list) else [rid]
    count = len(sampled) // (len(called) or 1)
    return {one: [*sampled[i * count : (i + 1) * count]] for i, one in enumerate(called) if one not in taken}


# ---- decode ----


class PrefillUnreachable(HTTPException):
    """A prefill does not answer. It may have received the announcement all the same, and wait."""

    def __init__(self, addr: str, why: Any) -> None:
        super().__init__(HTTPStatus.INTERNAL_SERVER_ERROR, f"prefill {addr} cannot be notified of samples: {why}")


async def announce(obj: GenerateReqInput, default_port: int) -> None:
    """Announce to a request's prefills that its samples have rooms of their own; return when they know.

    default_port: of bootstrap servers without a port in the request. Raises ValueError with the reason if a prefill
    refuses, and `PrefillUnreachable`.
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
    """Decode has announced the samples of a request that prefill serves the engine's way."""


class Announcement:
    """Whether decode has announced a request's samples; for prefill, and one event loop.

    told: it has. too_late: the engine's warm-up was answered, so decode uses the request's own room.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.told = False
        self.too_late = False
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return when decode has announced the samples."""
        await self._event.wait()

    def tell(self) -> None:
        """Thread-safe."""
        self.told = True
        self.loop.call_soon_threadsafe(self._event.set)


async def first_answer(answers: AsyncIterator, announcement: Announcement) -> asyncio.Future:
    """The task of the next of ``answers``; returns when it is done or the samples are announced."""
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
    """Announcements that a prefill has received, by the request's room. Announcement and request may arrive in any
    order, on different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Announcements without their request. After this time decode has cancelled it.
        self._told: RoomNotes[bool] = RoomNotes(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        self._announcements: dict[int, Announcement] = {}
        # Requests refused here that decode may still announce: the reason, and whether they are at fault.
        self._refused: RoomNotes[tuple[str, bool]] = RoomNotes(refusal.REMEMBERED_S)

    def announced(self, rooms: Sequence[int], derivation: int = DERIVATION) -> None:
        """Decode has announced the samples of the requests of ``rooms``.

        Raises ValueError with the reason if they cannot be served, and `NotNow` if one was refused that is not at
        fault.
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
        """A request of ``rooms`` has arrived. Returns its announcement, which may be made later."""
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
        """A request of ``rooms`` is refused here; decode's announcement gets the reason.

        at_fault: as in `refusal.RefusedReq`.
        """
        with self._lock:
            for room in rooms:
                self._refused.note(room, (reason, at_fault))

    def close(self, announcement: Announcement) -> bool:
        """The engine's warm-up was answered. Returns whether no announcement came before; later ones are refused."""
        with self._lock:
            announcement.too_late = not announcement.told
            return announcement.too_late
