"""Decode sessions to which a write over Mooncake has failed."""

from __future__ import annotations

import pytest
from sglang.srt.disaggregation.mooncake import failed_sessions
from sglang.srt.disaggregation.mooncake.failed_sessions import MOST_S, FailedSessions


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
