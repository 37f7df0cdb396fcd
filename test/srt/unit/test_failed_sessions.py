"""Decode sessions to which a write over Mooncake has failed."""

from __future__ import annotations

import pytest
from sglang.srt.disaggregation.mooncake.failed_sessions import FIRST_S, MOST_S, FailedSessions


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


def test_what_never_failed_is_not_in_it(world):
    assert "a" not in world.sessions


def test_one_tries_at_a_time(world):
    world.sessions.add("a")
    # Nobody says what came of it: somebody else tries.
    assert world.tries(3.5) == [1.0, 2.0, 3.0]


def test_a_success_ends_it(world):
    world.sessions.add("a")
    world.now += FIRST_S
    assert "a" not in world.sessions and "a" in world.sessions
    world.sessions.remove("a")
    assert all("a" not in world.sessions for _ in range(3))
    world.sessions.add("a")
    assert world.tries(1.5) == [1.0]


def test_each_further_failure_doubles_the_pause(world):
    pauses = []
    for _ in range(9):
        world.sessions.add("a")
        pauses += world.tries(100)[:1]
        world.now += 1000
    assert pauses == [1, 2, 4, 8, 16, 32, MOST_S, MOST_S, MOST_S]


def test_others_stay_out_until_they_register_anew(world):
    world.sessions.add("b")
    world.now += 1e6
    assert "b" in world.sessions
    world.sessions.remove("b")
    assert "b" not in world.sessions
    world.sessions.remove("b")
