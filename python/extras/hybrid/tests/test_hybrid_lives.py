"""States and windows in random lives, and beside steps in flight."""

from __future__ import annotations

import pytest
import test_life_of_a_request
import test_overlap_guard
from overlapped_loop import Loop, LoopEnds, LoopScheduler
from sglang.srt.disaggregation.decode import DecodeRequest
from test_overlap_guard import CODE, overlap_guard


# With states, so few slots that requests wait for one. With windows (tokens of one, of their pool), longer and shorter
# than most prompts, and so few that requests wait for one and are retracted.
@pytest.mark.parametrize(
    ("page_size", "states", "windows"),
    [
        (4, 3, None),
        (4, None, (6, 20)),
        *(pytest.param(*cell, marks=pytest.mark.thorough) for cell in [(1, None, (5, 48)), (16, None, (20, 80))]),
    ],
)
def test_invariants_hold_in_every_life(page_size, states, windows):
    test_life_of_a_request.test_invariants_hold_in_every_life(page_size, states=states, windows=windows)


# With states: so few slots that those of requests that have just ended are used at once.
# With windows: so few slots for them that those are, too, and that what lies behind windows has to be freed early.
@pytest.mark.parametrize(
    "page_size, states, windows",
    [(4, 3, None), (1, None, (5, 20)), (4, None, (6, 24))],
)
def test_nothing_that_a_step_in_flight_may_use_is_handed_to_a_transfer(page_size, states, windows):
    test_overlap_guard.test_nothing_that_a_step_in_flight_may_use_is_handed_to_a_transfer(page_size, states, windows)


def test_the_state_slot_of_a_request_that_has_ended_is_another_s_one_step_later(monkeypatch):
    """Trap 28, of a state: there is one slot, and a step in flight writes to it once more."""

    def play() -> Loop:
        requests = ({"prompt": [token] * 6, "max_new": 3} for token in (1, 2))
        return Loop(size=64, page_size=4, states=1).run_in_turn(*requests, wrong="a state with two writers")

    fenced = play()
    assert len(fenced.told) == 2
    monkeypatch.setitem(CODE, "make_guard", lambda *args: overlap_guard.OPEN)
    bare = play()
    assert bare.wrong
    assert fenced.asked_in["r2"] == bare.asked_in["r2"] + 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_window_of_a_request_that_has_ended_is_another_s_one_step_later(monkeypatch, page_size):
    """Trap 28, of windows: the pool has room for one, and a step in flight writes to it once more."""

    def play(max_new: int) -> Loop:
        loop = Loop(size=256, page_size=page_size, windows=(8, {1: 11, 4: 20}[page_size]), reserved=0)
        requests = ({"prompt": [1 + n] * 33, "max_new": max_new + 4 * n} for n in range(2))
        return loop.run_in_turn(*requests, wrong="a page of a window with two writers")

    # With some lengths what that step writes to is a page that is not taken.
    lengths = range(4, 14)
    fenced = [play(max_new) for max_new in lengths]
    assert all(len(loop.told) == 2 and not loop.wrong for loop in fenced)
    monkeypatch.setitem(CODE, "make_guard", lambda *args: overlap_guard.OPEN)
    bare = [play(max_new) for max_new in lengths]
    assert any(loop.wrong for loop in bare)
    for ours, theirs in zip(fenced, bare, strict=True):
        assert ours.asked_in["r2"] == theirs.asked_in["r2"] + bool(theirs.wrong)


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_the_state_of_a_retracted_request_is_that_of_its_tokens(monkeypatch, flag):
    """A step in flight takes in one token more than the request that is saved has been told."""

    def play() -> Loop:
        loop = Loop(flag, size=32, page_size=1, reserved=0, states=4)
        made: list[DecodeRequest] = []

        def between() -> None:
            while len(made) < 2:
                made.append(loop.arrive([1 + len(made)] * 8, max_new=14))
                loop.handshake(made[-1])
            for decode_req in loop.asked:
                loop.complete(decode_req)
            if len(loop.told) == 2 and loop.in_flight is None:
                raise LoopEnds
            retracted.extend(loop.queue.retracted_queue)
            assert loop.iterations < 80, "the loop does not come to an end"

        retracted: list = []
        try:
            loop.run(between)
        except AssertionError as error:
            loop.wrong.append(str(error))
        else:
            loop.check_answers()
        assert retracted
        return loop

    assert not play().wrong
    monkeypatch.setattr(LoopScheduler, "_end_step", lambda scheduler: None)
    assert play().wrong
