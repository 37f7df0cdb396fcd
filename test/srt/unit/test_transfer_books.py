"""The books of a transfer one by one: who was told, what is queued, who writes no more, what a message may say."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import delta_staging, end_notices
from sglang.srt.disaggregation.common.delta_staging import DeltaStaging
from sglang.srt.disaggregation.common.end_notices import EndNotices
from sglang.srt.disaggregation.mooncake.awaited_rooms import AwaitedRooms, End
from sglang.srt.disaggregation.mooncake.queued_chunks import QueuedChunks
from sglang.srt.disaggregation.mooncake.wire import CheckedSocket, Peer, check_engine_staging, listeners


def test_each_decode_rank_is_told_once_for_each_time_it_asks():
    words: EndNotices[str] = EndNotices()
    assert not words.concerns(1, "a")
    words.begin(1, "a")
    words.begin(1, "b")
    assert words.concerns(1, "a") and not words.concerns(2, "a")
    # Who has not asked is told too, as often as it is named.
    assert words.take(1, ["a", "c"]) == {"a", "c"}
    assert words.take(1, ["a", "b", "c"]) == {"b", "c"} and words.take(1, ["a", "b"]) == set()
    words.undelivered(1, "b")
    assert words.take(1, ["a", "b"]) == {"b"}
    words.begin(1, "a")
    assert words.take(1, ["a", "b"]) == {"a"}
    words.undelivered(1, "c")
    words.undelivered(2, "a")
    assert not words.concerns(1, "c") and not words.concerns(2, "a")


def test_without_the_flag_a_rank_is_left_to_the_engine():
    words: EndNotices[str] = EndNotices()
    words.begin(1, "a")
    words.begin(1, "b")
    words.begin(1, "a", has_flag=False)
    assert not words.concerns(1, "a") and words.concerns(1, "b")
    words.begin(2, "a", has_flag=False)
    assert not words._told.get(2)


def test_the_oldest_rooms_are_forgotten(monkeypatch):
    monkeypatch.setattr(end_notices, "REMEMBERED", 3)
    words: EndNotices[str] = EndNotices()
    for room in (1, 2, 3, 1, 4):
        words.begin(room, "a")
    assert [words.concerns(room, "a") for room in (1, 2, 3, 4)] == [True, False, True, True]


def test_chunks_are_counted_by_room():
    chunks, first, second = QueuedChunks(), object(), object()
    chunks.add(1, first, None)
    chunks.add(1, first, "claim")
    chunks.add(2, second, None)
    assert 1 in chunks and 3 not in chunks and len(chunks) == 2
    assert chunks.sender(1) is first and chunks.sender(3) is None and chunks.claims == {1: "claim"}
    chunks.done(1)
    assert 1 in chunks and chunks.sender(1) is first and chunks.claims == {1: "claim"}
    chunks.done(1)
    assert 1 not in chunks and chunks.sender(1) is None and not chunks.claims and len(chunks) == 1
    chunks.add(1, second, None)
    chunks.done(1)
    assert 1 not in chunks


def test_late_is_what_is_written_for_a_request_that_has_ended():
    chunks, old, new = QueuedChunks(), object(), object()
    chunks.add(1, old, None)
    assert not chunks.is_late(1, new), "this thread writes nothing"
    chunks.writers.add(threading.get_ident())
    assert not chunks.is_late(1, old)
    assert chunks.is_late(1, new) and chunks.is_late(1, None)
    assert chunks.is_late(2, new) and chunks.is_late(2, None), "nothing is queued of it"


def end(succeeded: bool, rank: int, said: str | None) -> End:
    return End(succeeded, rank, said)


def test_who_writes_no_more():
    rooms = AwaitedRooms()
    rooms.add(1, 5)
    assert 1 in rooms and 2 not in rooms and len(rooms) == 1
    assert rooms.metadata_buffers(1) == {5} and rooms.metadata_buffers(2) == set()
    # Another request of the room, while prefill may still write for the first.
    rooms.add(1, 6)
    assert rooms.metadata_buffers(1) == {5, 6}
    rooms.add_end(1, end(True, 0, "claim 0"))
    rooms.add_end(1, end(True, 1, None))
    rooms.add_end(1, end(False, 2, "the reason"))
    rooms.add_end(1, end(False, 3, None))
    rooms.add_end(1, end(True, 0, "claim 0 again"))
    # The fourth has failed without a reason, as the engine says it: it may still write, if it is one that would say so.
    assert (rooms.num_quiet(1, says_so=True), rooms.num_quiet(1, says_so=False)) == (3, 4)
    assert list(rooms.claims(1)) == ["claim 0 again"]
    rooms.add_end(2, end(True, 0, None))
    assert len(rooms) == 2 and 2 not in rooms
    assert (rooms.num_quiet(3, True), rooms.num_quiet(3, False), list(rooms.claims(3))) == (0, 0, [])
    rooms.forget(1)
    assert 1 not in rooms and len(rooms) == 1 and not rooms.metadata_buffers(1)
    assert (rooms.num_quiet(1, False), list(rooms.claims(1))) == (0, [])


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


def test_a_message_that_cannot_be_used_does_not_reach_the_thread():
    messages = iter([[b"bad"], [b"dealt with"], [b"good"], [b"good", b"2"]])

    def check(frames: list[bytes]) -> bool:
        if frames == [b"bad"]:
            raise ValueError("what is that?")
        return frames[0] == b"good"

    inbox = CheckedSocket(SimpleNamespace(recv_multipart=lambda: next(messages)), check)
    assert inbox.recv_multipart() == [b"good"] and inbox.recv_multipart() == [b"good", b"2"]


@pytest.mark.parametrize(
    ("frames", "right"),
    [
        ([b"WATERMARK", b"1", b"2"], True),
        ([b"WATERMARK", b"1", b"2", b"session"], True),
        ([b"WATERMARK", b"1"], False),
        ([b"WATERMARK", b"1", b"x"], False),
        ([b"WATERMARK", b"1", b"2", b"\xff"], False),
        ([b"STAGING_RSP", b"1", b"2", b"-1", b"4", b"5", b"session"], True),
        ([b"STAGING_RSP", b"1", b"2", b"-1", b"4", b"5"], False),
        ([b"STAGING_RSP", b"1", b"2", b"-1", b"4", b"", b"session"], False),
        ([b"another", b"\xff"], True),
    ],
)
def test_the_engine_s_messages_about_staging(frames, right):
    if right:
        check_engine_staging(frames)
    else:
        with pytest.raises(ValueError):
            check_engine_staging(frames)


def test_whom_to_tell():
    def info(**more: Any) -> Any:
        return SimpleNamespace(**{"endpoint": "a", "dst_port": 1, "names_prefix": True, "is_dummy": False} | more)

    infos = [info(), info(dst_port=2), info(dst_port=3, names_prefix=False), info(dst_port=4, is_dummy=True)]
    assert listeners(infos) == {Peer("a", 1), Peer("a", 2)}
    assert Peer.read([b"a", b"2"]) == Peer("a", 2)
    for frames in ([b"\xff", b"2"], [b"a", b"two"]):
        with pytest.raises(ValueError):
            Peer.read(frames)


def staging_of(pool: list[torch.Tensor], units: int) -> DeltaStaging:
    """A buffer of so many pieces of the smallest size, for a pool of one layer."""
    return DeltaStaging(torch.ones(units * 256, dtype=torch.uint8), pool[:1], pool[1:], 4, tp_size=1, tp_rank=0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock by which a prefill is silent, in seconds."""
    found = [100.0]
    monkeypatch.setattr(delta_staging, "time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


def test_a_room_that_is_closed_is_given_nothing_and_copies_nothing():
    """Trap 22: its pages may be another's by the time its prefill has written."""
    pool = [torch.zeros(64, 1, 4) for _ in range(2)]
    page = 4 * 4 * 4 * 2
    staging = staging_of(pool, 64)
    granted: list[int] = []
    # One that nobody here knows, as its request has ended.
    staging.request(1, 0, 1, 0, granted.append)
    staging.written(1, 0, 0)
    assert staging.landed(1) and staging.close(1) and not granted
    staging.open(1, np.array([3, 4, 5]), prefill_tp=1, prefill="prefill")
    staging.request(1, 0, 2, 0, granted.append)
    assert len(granted) == 1 and not staging.landed(1) and staging.is_missing(1)
    free = sum(length for _, length in staging.space.free)
    assert free <= staging.space.size - 2 * page
    assert staging.close(1)
    staging.request(1, 2, 1, 0, granted.append)
    staging.written(1, 0, 0)
    assert len(granted) == 1 and not any(buffer.any() for buffer in pool)
    assert not staging.landed(1) and staging.is_missing(1)
    staging.drop(1)
    assert sum(length for _, length in staging.space.free) == staging.space.size


def test_a_prefill_that_stands_still_leaves_the_staging_buffer_to_the_others():
    """What it has been given and does not write comes back when its requests have timed out, minutes later."""
    pool = [torch.zeros(64, 1, 4) for _ in range(2)]
    staging = staging_of(pool, 64)
    granted: list[tuple[str, int]] = []

    def ask(prefill: str, room: int, num_pages: int = 1) -> None:
        staging.open(room, np.zeros(num_pages, dtype=np.int32), 1, prefill)
        staging.request(room, 0, num_pages, 0, lambda offset: granted.append((prefill, room)))

    for room in range(100):
        ask("still", room)
    page = next(iter(staging.rooms.values())).pieces[0].length
    share = staging.space.size // 4 // page
    assert len(granted) == min(share, 64) < 64
    asked_at = len(granted)
    for room in range(100, 110):
        ask("goes on", room)
        assert granted[-1] == ("goes on", room)
    # In the order of asking, as it writes; and what is being copied is nobody's share.
    assert len(granted) == asked_at + 10
    staging.written(0, 0, 0)
    assert granted[-1] == ("still", asked_at)
    staging.drop(1)
    assert granted[-1] == ("still", asked_at + 1)
    # One that has no part of the buffer gets a piece of any size, and its next one when that is written.
    ask("large", 200, 40)
    ask("large", 201, 40)
    ask("large", 202)
    assert granted[-1] == ("large", 200)
    staging.written(200, 0, 0)
    assert granted[-1] == ("large", 201)
    staging.written(201, 0, 0)
    assert granted[-1] == ("large", 202)
    for room in range(300):
        staging.drop(room)
    assert sum(length for _, length in staging.space.free) == staging.space.size
    assert not staging.shares.all and not staging.rooms


@pytest.mark.parametrize("size, piece, lost", [(64, 16, 1), (64, 8, 2), (1024, 16, 16)])
def test_a_prefill_whose_grants_were_lost_goes_on(now: list[float], size: int, piece: int, lost: int):
    """With a connection that is reset what was on its way is gone, and nobody writes what it was about."""
    pool = [torch.zeros(4 * piece * 2, 1, 4) for _ in range(2)]
    staging = staging_of(pool, size)
    granted: list[int] = []
    # A page is half of the smallest piece of memory.
    for room in range(200):
        staging.open(room, np.zeros(2 * piece, dtype=np.int32), 1, "prefill")
        staging.request(room, 0, 2 * piece, 0, lambda offset, room=room: granted.append(room))
    assert len(granted) == lost
    assert not staging.landed(0) and len(granted) == lost
    now[0] += delta_staging.SILENT_S + 1
    assert not staging.landed(0) and len(granted) == lost + 1
    # What it writes now says that what came before is not to be waited for.
    for room in range(lost, 200):
        assert granted[-1] >= room
        staging.written(room, 0, 0)
    assert sorted(granted) == list(range(200))
    for room in range(200):
        staging.drop(room)
    assert sum(length for _, length in staging.space.free) == staging.space.size and not staging.shares.all


def test_a_prefill_that_says_nothing_gets_no_more_than_half(now: list[float]):
    pool = [torch.zeros(8, 1, 4) for _ in range(2)]
    staging = staging_of(pool, 64)
    granted: list[int] = []
    for room in range(100):
        staging.open(room, np.zeros(8, dtype=np.int32), 1, "prefill")
        staging.request(room, 0, 8, 0, lambda offset, room=room: granted.append(room))
    for _ in range(100):
        now[0] += delta_staging.SILENT_S + 1
        assert not staging.landed(0)
    assert len(granted) == 8
    # Rooms that have ended are not given anything, and hold up nobody.
    for room in range(8, 99):
        assert staging.close(room)
    for room in range(8):
        staging.drop(room)
    assert granted[8:] == [99]


def test_a_piece_that_fits_in_no_hole_does_not_keep_everybody_waiting(now: list[float]):
    """One that stands still holds a page in the middle of the buffer. But all that moves becomes free for it first."""
    pool = [torch.zeros(8, 1, 4) for _ in range(2)]
    staging = staging_of(pool, 64)
    staging.space.free = [(0, 30 * 256), (31 * 256, 33 * 256)]
    granted: list[str] = []

    def ask(room: int, prefill: str, pieces: int) -> None:
        staging.open(room, np.zeros(2 * pieces, dtype=np.int32), 1, prefill)
        staging.request(room, 0, 2 * pieces, 0, lambda offset: granted.append(prefill))

    ask(1, "large", 40)
    ask(2, "small", 4)
    assert granted == []
    now[0] += delta_staging.SILENT_S + 1
    ask(3, "another", 4)
    assert granted == ["small", "another"]
    now[0] += delta_staging.SILENT_S
    ask(4, "a third", 4)
    assert granted == ["small", "another"]
    staging.space.give(30 * 256, 256)
    for room in (2, 3):
        staging.written(room, 0, 0)
        staging.drop(room)
    assert granted == ["small", "another", "large", "a third"]
