"""n > 1: what one worker cannot do for a request with samples, its peer hears, and hears whose fault it is."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import samples_front
from fastapi import HTTPException
from samples_front import Manager, looped
from sglang.srt.disaggregation import peer_calls, refusal
from sglang.srt.disaggregation.peer_calls import Unanswered, listen
from sglang.srt.disaggregation.refusal import REFUSED_ROUTE
from sglang.srt.managers import samples
from sglang.srt.managers.samples import SAMPLE_ROUTE, sample_room
from tokenizer_front import MODES, answers, body, until

server, no_shared_memory = samples_front.server, samples_front.no_shared_memory
FAILED = {"type": "abort", "status_code": 500, "message": "lost"}


def rooms_told(manager: Manager) -> list[int]:
    """The rooms of which its scheduler has been told that decode has refused them."""
    told = [message for message in manager.send_to_scheduler.got if isinstance(message, refusal.RefusedReq)]
    return [message.room for message in told if message.by_decode]


@pytest.fixture
def gate():
    """What is held up until the test opens it, or ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def prefill_that_hears() -> Manager:
    prefill = Manager(*MODES[0])
    prefill.event_loop = asyncio.get_running_loop()
    listen(REFUSED_ROUTE, partial(prefill._on_loop, prefill._refuse_rooms))
    listen(SAMPLE_ROUTE, prefill.samples.announced)
    return prefill


def hold_up(prefill: Manager, monkeypatch: pytest.MonkeyPatch, late: bool, gate: threading.Event) -> None:
    """late: prefill's front hears the announcement and answers too late. Else too many wait, and it is not made."""
    if not late:
        failed: Future = Future()
        failed.set_exception(Unanswered("too many calls wait for an answer"))
        monkeypatch.setattr(samples, "ask", lambda *message, **said: failed)
        return
    monkeypatch.setattr(peer_calls, "ANSWER_S", 0.2)

    def announced(rooms, derivation):
        try:
            prefill.samples.announced(rooms, derivation)
        finally:
            gate.wait(20)

    listen(SAMPLE_ROUTE, announced)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [True, False], ids=["reply late", "burst"])
@looped
async def test_prefill_waits_for_no_samples_that_decode_could_not_announce(server, monkeypatch, gate, late, stream):
    """It waited for 300 s, and the router with it, which answers when both workers have."""

    def generate_request() -> None:
        """What the engine calls the endpoint whose streams tell of ValueError only."""

    async def ask(decode) -> None:
        http = SimpleNamespace(scope={"endpoint": generate_request})
        async for _ in decode.generate_request(body(port=server, stream=stream), http):
            pass

    prefill, decode = prefill_that_hears(), Manager(*MODES[1])
    hold_up(prefill, monkeypatch, late, gate)
    served = asyncio.ensure_future(answers(prefill, body(port=server)))
    await until(lambda: prefill.send_to_scheduler.requests, served)
    with pytest.raises(ValueError if stream else HTTPException, match=r"cannot be notified of samples"):
        await ask(decode)
    if late:
        await until(lambda: len(prefill.send_to_scheduler.requests) == 7, served)
    gate.set()
    waiting = prefill.send_to_scheduler.requests[late:]
    first = waiting[0].bootstrap_room
    assert first == (sample_room(11, 0) if late else 11)
    await until(lambda: first in rooms_told(prefill), served)
    # As its scheduler does. One sample is enough.
    told = [one for one in prefill.send_to_scheduler.got if isinstance(one, refusal.RefusedReq)]
    prefill.answer(waiting[0], finish_reason={"type": "abort", "status_code": 400, "message": told[0].reason})
    with pytest.raises(ValueError, match="cannot be notified of samples"):
        await served
    assert {one.rid for one in waiting[1:]} <= {*prefill.send_to_scheduler.aborts}
    # No room twice.
    told = rooms_told(prefill)
    assert len(told) == len({*told}) and {*told} <= {11, 12, *samples_front.ROOMS}


@pytest.mark.parametrize(("prompts", "n"), [(100, 8), (1, 4096), (256, 16), (300, 2)])
def test_of_a_request_whose_samples_prefill_may_know_it_hears_in_one_message(monkeypatch, prompts, n):
    """A message for each room left no place for those of other requests, and for some of its own."""
    sent = []
    monkeypatch.setattr(refusal, "tell", lambda addr, route, rooms, **said: sent.append((addr, rooms)))
    firsts = list(range(11, 11 + prompts))
    each = [sample_room(room, i) for room in firsts for i in range(n)]
    obj = SimpleNamespace(samples=n, request_rooms=firsts, bootstrap_room=each)
    obj.bootstrap_host, obj.bootstrap_port = ["a"] * (prompts * n), 7
    Manager(*MODES[1])._tell_peer(obj, "late")
    assert sent == [("a:7", firsts + each)]


@looped
async def test_a_request_that_comes_after_its_samples_could_not_be_announced_is_refused(server, monkeypatch, gate):
    prefill, decode = prefill_that_hears(), Manager(*MODES[1])
    hold_up(prefill, monkeypatch, True, gate)
    with pytest.raises(HTTPException):
        await answers(decode, body(port=server))
    gate.set()
    expected = {11, 12, *samples_front.ROOMS}
    await until(lambda: {*rooms_told(prefill)} == expected, asyncio.Future())
    with pytest.raises(ValueError, match="cannot be notified of samples"):
        await answers(prefill, body(port=server))
    assert not prefill.send_to_scheduler.requests and not prefill.rid_to_state


class Failing(Manager):
    """One that cannot serve a request for ``error``."""

    error: Exception

    async def _validate_and_resolve_lora(self, obj):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("While loading an image: time-out"), 500),
        (HTTPException(500, "While loading an image: time-out"), 500),
        (ValueError("Failed to implicitly load LoRA adapter a: out of memory"), 500),
        (ValueError("Duplicate request IDs detected: ['r_0']"), 500),
        (ValueError("The input is longer than the model's context length"), 400),
    ],
)
@looped
async def test_what_is_prefills_own_fault_is_no_fault_of_the_request_with_samples(server, error, status):
    """As with one. It was 400, after which no router asks another prefill."""
    prefill, decode = Failing(*MODES[0]), Manager(*MODES[1])
    prefill.error = error
    listen(SAMPLE_ROUTE, prefill.samples.announced)
    with pytest.raises(type(error)):
        await answers(prefill, body(port=server))
    with pytest.raises(HTTPException if status == 500 else ValueError) as said:
        await answers(decode, body(port=server))
    assert getattr(said.value, "status_code", 400) == status
    assert str(getattr(error, "detail", error)) in str(getattr(said.value, "detail", said.value))
    assert not decode.send_to_scheduler.requests


@looped
async def test_a_warm_up_that_fails_as_its_samples_are_announced_fails_them():
    """Between that and its refusal: decode has been answered that prefill knows, and waited for 300 s."""
    prefill = Manager(*MODES[0])
    task = asyncio.ensure_future(answers(prefill, body()))
    await until(lambda: prefill.send_to_scheduler.requests, task)
    refuse = prefill.samples.refuse

    def announced_before(*args, **options):
        prefill.samples.announced([11, 12])
        refuse(*args, **options)

    prefill.samples.refuse = announced_before
    prefill.answer(prefill.send_to_scheduler.requests[0], finish_reason=FAILED)
    with pytest.raises(HTTPException, match="lost"):
        await task
    told = [message for message in prefill.send_to_scheduler.got if isinstance(message, refusal.RefusedReq)]
    assert [(message.room, message.at_fault) for message in told] == [
        (room, False) for room in [11, 12, *samples_front.ROOMS]
    ]
