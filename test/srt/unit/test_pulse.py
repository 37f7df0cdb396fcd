"""A prefill that has stood still writes nothing to what decode may have given away meanwhile."""

from __future__ import annotations

import time

import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import pulse as module
from sglang.srt.disaggregation.common.pulse import BEAT_S, CATCH_UP_S, LATE_S, Pulse
from sglang.srt.disaggregation.common.rooms import Rooms
from test_mooncake_wire import World as MooncakeWorld
from test_nixl_wire import World
from waiting import until

ROOM = 1


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_all_is_heard_for_as_long_as_the_process_runs(clock: Clock):
    pulse = Pulse()
    clock.now += 400
    assert pulse.heard_until() == clock.now, "its thread has not started"
    for _ in range(8):
        pulse.beat()
        clock.now += BEAT_S
        assert pulse.heard_until() == clock.now


@pytest.mark.parametrize("asked_first", [False, True])
@pytest.mark.parametrize("again", [0.0, LATE_S + 1])
def test_after_a_standstill_what_had_waited_is_read_first(clock: Clock, asked_first: bool, again: float):
    """asked_first: by a thread that goes on sooner than the one that beats. again: another one right after it."""
    pulse = Pulse()
    pulse.beat()
    stopped_at = clock.now
    clock.now += 400
    if asked_first:
        assert pulse.heard_until() == stopped_at
    pulse.beat()
    clock.now += again
    if again and asked_first:
        assert pulse.heard_until() == stopped_at
    woke_at = clock.now
    while clock.now < woke_at + CATCH_UP_S:
        pulse.beat()
        assert pulse.heard_until() == stopped_at
        clock.now += BEAT_S
    pulse.beat()
    assert pulse.heard_until() == clock.now


def test_one_that_stops_again_and_again_hears_what_is_said_in_between(clock: Clock):
    pulse = Pulse()
    pulse.beat()
    for _ in range(100):
        clock.now += LATE_S + 1
        for _ in range(10):
            pulse.beat()
            clock.now += BEAT_S
        assert clock.now - pulse.heard_until() < 20


def test_while_it_stood_still_nobody_was_silent(clock: Clock):
    """What decode said of a request meanwhile lies unread; the scheduler polls before that is read."""
    rooms = Rooms()
    rooms.note_peer("a", 1)
    rooms.pulse.beat()
    clock.now += 2
    came_at, stopped_at = clock.now - 100, clock.now - 2
    clock.now += 400
    for _ in range(2):
        assert rooms.silent_s(ROOM, since=came_at) == stopped_at - came_at and rooms.pulse.is_behind()
        assert rooms.silent_s(ROOM, since=clock.now) == 0, "one that has just come"
        rooms.pulse.beat()
    for _ in range(int(CATCH_UP_S / BEAT_S)):
        clock.now += BEAT_S
        rooms.pulse.beat()
    assert rooms.silent_s(ROOM, since=came_at) == clock.now - came_at and not rooms.pulse.is_behind()


@pytest.mark.parametrize("said_before", [False, True])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_prefill_that_stood_still_fails_nothing_that_decode_kept_announcing(
    monkeypatch: pytest.MonkeyPatch, backend: str, said_before: bool
):
    """For as long as it may wait for a word. said_before: it has read that the request waits."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "300")
    world = (World if backend == "nixl" else MooncakeWorld)(monkeypatch)
    try:
        (sender,) = world.request(ROOM, 24, 8).start_prefill().senders
        rooms = world.prefill[0].manager.rooms
        rooms.note_waiting(ROOM if said_before else ROOM + 1, "127.0.0.1", 5555)
        stop(world, 301)
        sender.made_at -= 302
        if sender.init_time is not None:
            sender.init_time -= 302
        rooms.waiting = {room: dict.fromkeys(said, time.monotonic() - 301) for room, said in rooms.waiting.items()}
        assert sender.poll() == KVPoll.Bootstrapping
        # Nothing has come by the time that all has been read. The engine's time-out counts from here.
        rooms.pulse.beat()
        rooms.pulse._runs_s = CATCH_UP_S
        assert sender.poll() == (KVPoll.Failed if backend == "nixl" else KVPoll.Bootstrapping)
    finally:
        if backend == "mooncake":
            world.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "300")
    return World(monkeypatch)


def stop(world: World, seconds: float) -> None:
    """The prefill has just gone on after a standstill, and the thread of its pulse has not."""
    pulse = world.prefill[0].manager.rooms.pulse
    pulse.beat()
    pulse._beat_at -= seconds


OVER = (
    "not all of its KV has been sent in the 300 s for which it waits, by "
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT on prefill"
)


@pytest.mark.parametrize("read_before", [False, True])
def test_a_request_that_waited_while_prefill_stood_still_is_not_begun(world, read_before: bool):
    """Decode had given it up and could not say so: prefill took no messages.

    Its own half may come long after that. read_before: the message was read before the standstill.
    """
    request = world.request(ROOM).start_decode()
    prefill = world.prefill[0].manager
    if not read_before:
        stop(world, 301)
    request.ask()
    until(lambda: ROOM in prefill.transfer_infos, "the message is read")
    if read_before:
        for info in prefill.transfer_infos[ROOM].values():
            info.heard_until -= 301
    else:
        prefill.rooms.pulse.__init__()
    request.start_prefill().assert_fails(OVER)


def test_the_time_for_which_prefill_may_write_is_read_once(world, monkeypatch: pytest.MonkeyPatch):
    """Each step asks for it with each request that waits: 1 ms with 1000 of them."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "1")
    assert world.prefill[0].manager.transfer_timeout == 300


def test_of_several_decode_ranks_the_one_heard_first_counts(monkeypatch: pytest.MonkeyPatch):
    """The others may have asked after the standstill, and that one has given its pages away."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "300")
    world = World(monkeypatch, decode_tp=2)
    request = world.request(ROOM).start_decode().ask()
    asked = world.prefill[0].manager.transfer_infos
    until(lambda: len(asked.get(ROOM, ())) == 2, "both have asked")
    [*asked[ROOM].values()][-1].heard_until -= 301
    request.start_prefill().assert_fails(OVER)


def test_one_that_waited_for_less_is_written_until_decode_gives_it_up(world):
    request = world.request(ROOM).start_prefill().start_decode()
    stop(world, 200)
    request.ask()
    request.wait_senders(KVPoll.WaitingForInput)
    (sender,) = request.senders
    left = sender.state.due_at - time.monotonic()
    assert 95 < left <= 100
    sender.init(request.num_pages, 1)
    request.send().wait_senders(KVPoll.Success)
