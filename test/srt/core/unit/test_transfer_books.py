"""The books of a transfer one by one: who was told, what is queued, who writes no more, what a message may say."""

from __future__ import annotations

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import rooms
from sglang.srt.disaggregation.common.rooms import EndNotices
from sglang.srt.disaggregation.mooncake.wire import End


def test_the_oldest_rooms_are_forgotten(monkeypatch):
    monkeypatch.setattr(rooms, "REMEMBERED", 3)
    words = EndNotices()
    for room in (1, 2, 3, 1, 4):
        words.begin(room, "a")
    assert [words.concerns(room, "a") for room in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"7", b"%d" % KVPoll.Success, b"3"], End(True, 3, None)),
        ([b"7", b"%d" % KVPoll.Success, b"3", b"0:ab"], End(True, 3, "0:ab")),
        ([b"7", b"%d" % KVPoll.Failed, b"0", b"why \xff"], End(False, 0, "why �")),
        ([b"7", b"%d" % KVPoll.Failed, b"0"], End(False, 0, None)),
        ([b"7", b"%d" % KVPoll.Failed], "has 2"),
        ([b"7", b"%d" % KVPoll.Failed, b"0", b"why", b"more"], "has 5"),
        ([b"7", b"%d" % KVPoll.Transferring, b"0"], "cannot end with status"),
        ([b"7", b"x", b"0"], "status is not a number"),
        ([b"7", b"%d" % KVPoll.Failed, b"zero"], "prefill rank is not a number"),
    ],
)
def test_the_word_of_an_end(frames, expected):
    if isinstance(expected, End):
        assert End.read(7, frames) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            End.read(7, frames)
