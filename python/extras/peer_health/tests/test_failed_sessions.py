"""Decode sessions to which a write over Mooncake has failed."""

from __future__ import annotations

from typing import Any

import pytest
from engine_classes import engine_class
from mooncake_world import World as MooncakeWorld
from mooncake_world import lost_write
from sglang.srt.disaggregation.mooncake import failed_sessions
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.mooncake.failed_sessions import MOST_S, FailedSessions
from test_mooncake_wire import world as mooncake
from waiting import until

__all__ = ["mooncake"]


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sessions = FailedSessions(lambda: self.now)

    def tries(self, seconds: float) -> list[float]:
        """When somebody may try in so many seconds, of whom one asks each tenth of a second."""
        began, found = self.now, []
        for step in range(round(seconds * 10)):
            self.now = began + step / 10
            if "a" not in self.sessions:
                found.append(round(self.now - began, 1))
        return found


@pytest.fixture
def world() -> World:
    made = World()
    made.sessions.try_again("a")
    return made


def test_after_a_pause_all_are_tried(world):
    """Also the second chunk of a prompt, whatever came of the first."""
    world.sessions.add("a")
    assert world.tries(1.5) == [1.0, 1.1, 1.2, 1.3, 1.4]


def test_each_failure_soon_after_a_pause_doubles_the_next(world):
    pauses = []
    for _ in range(9):
        world.sessions.add("a")
        pauses += world.tries(61)[:1]
        world.now = 1000.0 + 61 * len(pauses)
    assert pauses == [1, 2, 4, 8, 16, 32, MOST_S, MOST_S, MOST_S]
    # It has worked for longer than the longest pause.
    world.now += 2 * MOST_S + 1
    world.sessions.add("a")
    assert world.tries(3)[:1] == [1.0]


def test_others_stay_out_until_they_register_anew(world):
    world.sessions.add("b")
    world.now += 1e6
    assert "b" in world.sessions
    world.sessions.remove("b")
    assert "b" not in world.sessions
    world.sessions.remove("b")


def test_sessions_of_decode_workers_that_are_no_more_are_forgotten(world, monkeypatch):
    """Each that is started anew has others."""
    monkeypatch.setattr(failed_sessions, "REMEMBERED", 8)
    for n in range(100):
        world.sessions.try_again(f"s{n}")
        world.sessions.add(f"s{n}")
        world.sessions.try_again("a")
        world.now += MOST_S
    assert len(world.sessions._tried_again) == 8 and len(world.sessions._pauses) <= 2
    # One to which is still written goes by its own failures.
    world.sessions.add("a")
    assert world.tries(1.5)[:1] == [1.0]
    # The engine's rule for others has no end.
    world.sessions.add("b")
    for _ in range(100):
        world.now += 2 * MOST_S
        world.sessions.try_again("a")
        world.sessions.add("a")
    assert "b" in world.sessions


@pytest.mark.parametrize(("stages", "decode_tp", "chunks"), [((2,), 1, (4, 6)), ((2,), 2, (6,))])
def test_a_write_that_failed_costs_the_requests_of_a_moment(monkeypatch, stages, decode_tp, chunks) -> None:
    """The engine writes nothing to a decode worker of which one write has failed, until that is restarted.

    Of what it writes then it has a way for each shape.
    """
    world, now = MooncakeWorld(monkeypatch, stages=stages, decode_tp=decode_tp), [100.0]
    for rank in world.prefill:
        rank.manager.failed_sessions = rank.manager.sessions = FailedSessions(lambda: now[0])
    library = world.prefill[0].library
    library.result = -1
    assert "Failed to send kv chunk" in lost_write(world, 1)
    library.result = 0
    assert "is not alive" in lost_write(world, 2)
    now[0] += failed_sessions.FIRST_S
    for room in (3, 4):
        request = world.request(room, 24, 4).bootstrap().send(*chunks)
        request.finish()
        request.assert_landed()
    world.assert_books_closed()
    world.close()


def test_the_first_write_to_a_decode_worker_may_fail_at_once(mooncake: MooncakeWorld, monkeypatch) -> None:
    """Before the scheduler went on, and the worker counted as one without the flag: it was never tried again."""
    manager, now = mooncake.prefill[0].manager, [100.0]
    manager.failed_sessions = manager.sessions = FailedSessions(lambda: now[0])
    library = mooncake.prefill[0].library
    engine = engine_class(MooncakeKVManager)
    queue = engine.add_transfer_request

    def queue_and_wait(*args: Any, **kwargs: Any) -> None:
        queue(*args, **kwargs)
        until(lambda: manager.sessions._pauses, "the write has failed")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add_transfer_request", queue_and_wait)
        library.result = -1
        assert "Failed to send kv chunk" in lost_write(mooncake, 1)
    library.result = 0
    now[0] += failed_sessions.FIRST_S
    request = mooncake.request(2, 24, 4).bootstrap().send()
    request.finish()
    request.assert_landed()
