"""A prefill that has stood still writes nothing to what decode may have given away meanwhile."""

from __future__ import annotations

import time

import pytest
from nixl_world import World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import pulse as module
from sglang.srt.disaggregation.common.pulse import CATCH_UP_S, LATE_S, Pulse
from waiting import until

ROOM = 1
# Between two looks at peers.
BEAT_S = 0.25


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


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


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "300")
    return World(monkeypatch)


def stop(world: World, seconds: float) -> None:
    """The prefill has just gone on after a standstill, and the thread that looks after peers has not."""
    pulse = world.prefill[0].manager.pulse
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
        prefill.pulse.__init__()
    request.start_prefill().assert_fails(OVER)


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
