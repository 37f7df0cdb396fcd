"""The books about rooms that a prefill worker keeps, whichever backend sends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import rooms as module
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.common.wire import GIVEN_UP


def sender(room: int, *polls: KVPoll) -> SimpleNamespace:
    """A sender whose polls return these, one after the other."""
    answers = iter(polls)
    return SimpleNamespace(bootstrap_room=room, poll=lambda: next(answers))


@pytest.mark.parametrize("given_up", [GIVEN_UP, f"refused decode's request for KV: {GIVEN_UP}"])
def test_that_decode_gives_a_room_up_hides_no_reason_for_it(given_up: str) -> None:
    rooms = Rooms()
    rooms.refuse(1, given_up)
    rooms.refuse(1, "its states do not fit")
    rooms.refuse(1, given_up)
    rooms.refuse(1, "its states do not fit either")
    assert rooms.refused.get(1) == "its states do not fit"
    rooms.begin(2, sender(2))
    rooms.refuse(2, "its states do not fit")
    rooms.give_up(2)
    assert rooms.refused.get(2) == "its states do not fit" and len(rooms.given_up) == 1


def test_nothing_is_kept_of_a_refusal_that_nobody_will_read() -> None:
    """A room that has failed has no sender to come; one that ended well may be used again."""
    rooms = Rooms()
    rooms.end(1, "aborted")
    rooms.refuse(1, "too late")
    assert not rooms.refused
    rooms.end(2)
    rooms.refuse(2, "bad")
    assert rooms.refused.get(2) == "bad"


@given(st.lists(st.tuples(st.sampled_from(["end", "fail", "refuse", "begin"]), st.integers(0, 9))))
def test_the_books_stay_small_and_agree(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REMEMBERED_ROOMS", 3)
        rooms = Rooms()
        for step, room in steps:
            if step == "begin":
                rooms.begin(room, object())
            elif step == "refuse":
                failed = rooms.ended.get(room) is not None
                rooms.refuse(room, "bad")
                assert failed or rooms.refused[room] == "bad"
            else:
                rooms.end(room, "lost" if step == "fail" else None)
                assert list(rooms.ended)[-1] == room
            assert not rooms.live.keys() & rooms.ended.keys()
            assert len(rooms.ended) <= 3 and len(rooms.refused) <= 3
