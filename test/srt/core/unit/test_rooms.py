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


def test_a_room_lives_ends_and_may_be_used_again() -> None:
    rooms = Rooms()
    first, second = object(), object()
    assert rooms.begin(1, first)
    assert rooms.live == {1: first} and 1 not in rooms.ended
    assert not rooms.begin(1, second) and rooms.holder(1) is first and rooms.live == {1: first}
    rooms.end(1)
    assert not rooms.live and rooms.ended == {1: None}
    rooms.begin(1, second)
    assert rooms.live == {1: second} and 1 not in rooms.ended
    rooms.end(1, "its prefill was lost")
    assert rooms.ended.get(1) == "its prefill was lost"


def test_what_is_posted_keeps_its_room_until_it_is_written() -> None:
    rooms = Rooms()
    first, second = SimpleNamespace(is_writing=lambda: writes), object()
    rooms.begin(1, first)
    rooms.end(1, posted=True)
    writes = True
    assert not rooms.begin(1, second) and not rooms.live
    rooms.written(1, second)
    assert rooms.writing == {1: first}
    writes = False
    assert rooms.begin(1, second) and rooms.live == {1: second}
    rooms.written(1, first)
    assert not rooms.writing


def test_a_refusal_waits_for_its_sender() -> None:
    rooms = Rooms()
    rooms.refuse(1, "no such agent")
    rooms.begin(1, object())
    assert rooms.refused == {1: "no such agent"}


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


@pytest.mark.parametrize("end", [KVPoll.Success, KVPoll.Failed])
def test_what_decode_gives_up_is_polled_until_it_ends(end: KVPoll) -> None:
    rooms = Rooms()
    rooms.begin(1, sender(1, KVPoll.WaitingForInput, end))
    rooms.give_up(1)
    assert rooms.refused == {1: GIVEN_UP}
    rooms.settle()
    assert len(rooms.given_up) == 1, "some of it is being written"
    rooms.settle()
    assert not rooms.given_up
    # A sender that fails reads why; one that had sent everything has nothing to read.
    assert rooms.refused == ({} if end == KVPoll.Success else {1: GIVEN_UP})


def test_one_that_goes_on_does_not_keep_the_others_from_being_asked() -> None:
    rooms = Rooms()
    rooms.begin(1, sender(1, KVPoll.Transferring))
    rooms.begin(2, sender(2, KVPoll.Failed))
    rooms.give_up(1)
    rooms.give_up(2)
    rooms.settle()
    assert [given_up.bootstrap_room for given_up in rooms.given_up] == [1]


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
