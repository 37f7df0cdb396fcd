"""What only the Mooncake backend has: heads and slots by their bytes, its threads and queues. Shared: test_wire.py."""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests
from mooncake_world import HEAD_BYTES, HEADS, LAYERS, World, assert_landed, lost_write
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.mooncake.awaited_rooms import AwaitedRoom
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from waiting import until
from wire_ends import first_pages, give_up, push, reasons, wait_quiet


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.close()


# ---- transfers ----


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "mla"),
    [(2, 2, False), (1, 2, False), (2, 1, False), (4, 2, False), (1, 4, False), (2, 1, True), (1, 2, True)],
)
@pytest.mark.parametrize(("page_size", "prefix_len"), [(4, 4), (1, 5)])
def test_tensor_parallel_sizes(monkeypatch, prefill_tp, decode_tp, mla, page_size, prefix_len) -> None:
    world = World(monkeypatch, page_size, prefill_tp, decode_tp, mla)
    request = world.request(1, 12, prefix_len).bootstrap()
    assert {sender.decode_prefix_len for sender in request.senders} == {prefix_len or 0}
    request.send(*([6] if page_size == 1 else [2] if request.first_page < 2 else []))
    request.finish()
    request.assert_landed()
    world.assert_books_closed()
    token = HEADS * HEAD_BYTES * (LAYERS if mla else 2 * LAYERS) * (decode_tp if mla else 1)
    assert sum(r.manager.events.sent_bytes for r in world.prefill) == (12 - (prefix_len or 0)) * token
    assert sum(r.manager.events.saved_bytes for r in world.prefill) == (prefix_len or 0) * token
    world.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "mla"),
    [((2, 2), (1, 2), False), ((1, 2), (2, 2), False), ((2, 1), (1, 2), True), ((1, 3), (2, 1), False)],
)
def test_dp_ranks(monkeypatch, prefill, decode, mla) -> None:
    """Sizes are (TP, DP) of each attention-DP rank. Any DP rank of decode is served by any of prefill, all at once.

    Each gets its own deltas and nothing else, and one that fails costs the others nothing.
    """
    (prefill_tp, prefill_dp), (decode_tp, decode_dp) = prefill, decode
    world = World(monkeypatch, 4, prefill_tp, decode_tp, mla, prefill_dp=prefill_dp, decode_dp=decode_dp)
    served = []
    for source, target in itertools.product(range(prefill_dp), range(decode_dp)):
        request = world.request(10 + len(served), 30, 4 * len(served), aux=len(served))
        request.prefill_dp, request.decode_dp = source, target
        # Of 32 pages that each rank has for them.
        request.base = 32 + 8 * source
        served.append(request.bootstrap())
    lost = world.request(99, 30, 0, aux=7)
    lost.prefill_dp, lost.decode_dp, lost.base = prefill_dp - 1, decode_dp - 1, 56
    lost.bootstrap()
    for sender in lost.senders:
        sender.abort()
    for request in served:
        request.send(3)
    for request in served:
        request.finish()
    lost.fail()
    for end in (*lost.senders, *lost.receivers):
        end.clear()
    assert_landed(*served)
    world.assert_books_closed()
    world.close()


def test_the_bootstrap_server_says_so(world: World) -> None:
    answer = requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()
    assert [answer.pop(named) for named in ("waiting_timeout", "bootstrap_timeout")] == [300, 300]
    # Of extras there may be more.
    assert answer.items() >= {"version": 1, "state": 1, "prompts": 2}.items()


# ---- failures ----


def test_a_message_that_cannot_be_read_fails_its_room_only(world: World, caplog: pytest.LogCaptureFixture) -> None:
    bad = world.request(1, 10, 4).start_prefill().start_decode()
    # As if decode had asked.
    world.decode[0].manager.awaited_rooms[1] = AwaitedRoom({0})
    prefill = push(world.prefill[0])
    address = [b"127.0.0.1", b"%d" % world.decode[0].manager.rank_port]
    for frames in (
        [b""],
        [b"what is this"],
        [b"None"],
        [b"None", *[b"x"] * 20],
        [b"WATERMARK", b"1"],
        [b"STAGING_RSP"],
        [b"1", *address, b"session", b"\0\0\0", b"0", b"", b"1", b"4", b"0"],
        [b"1", *address, bad.receivers[0].session_id.encode(), b"", b"0", b"", b"0", b"4", b"0"],
    ):
        prefill.send_multipart(frames)
    on_prefill, on_decode = bad.fail()
    assert "refused decode's request" in on_prefill and "refused decode's request" in on_decode
    good = world.request(2, 10, 4).bootstrap().send()
    good.finish()
    good.assert_landed()
    world.assert_books_closed()


def test_an_error_in_a_transfer_thread_fails_its_request_only(world: World) -> None:
    world.prefill[0].library.result = RuntimeError("no such luck")
    bad = world.request(1, 10, 4).bootstrap().send()
    on_prefill, on_decode = bad.fail()
    assert "no such luck" in on_prefill and "no such luck" in on_decode
    world.prefill[0].library.result = 0
    good = world.request(2, 10, 4).bootstrap().send()
    good.finish()
    good.assert_landed()
    world.assert_books_closed()


def test_a_chunk_that_failed_is_not_made_good_by_the_last_one(world: World) -> None:
    library, write = world.prefill[0].library, world.prefill[0].library.batch_transfer_sync

    def fail_once(*args) -> int:
        library.batch_transfer_sync = write
        raise RuntimeError("no such luck")

    library.batch_transfer_sync = fail_once
    on_prefill, on_decode = world.request(1, 24, 4).bootstrap().send(3).fail()
    assert "no such luck" in on_prefill and "no such luck" in on_decode
    world.assert_books_closed()


def test_a_rank_where_nothing_went_wrong_tells_its_decode_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    request = world.request(1, 10, 4).bootstrap()
    request.senders[0].fail("out of luck")
    reasons(request.senders)
    request.wait_receivers(KVPoll.Failed)
    assert "out of luck" in reasons(request.receivers[:1])[0]
    assert "another rank" in reasons(request.receivers[1:])[0]
    world.assert_books_closed()
    world.close()


@pytest.mark.parametrize("result", [0, -1, RuntimeError("no such luck")])
@pytest.mark.parametrize("begun", [False, True])
def test_the_end_of_a_write_is_not_that_of_the_next_request_of_its_room(monkeypatch, caplog, begun, result) -> None:
    """One rank still writes when the request has failed on another. begun: the next one is here before that ends."""
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    first, again = world.request(1, 24, 8).bootstrap(fenced=True), world.request(1, 24, 8)
    library, manager = world.prefill[0].library, world.prefill[0].manager
    library.gate.clear()
    library.writing.clear()
    first.senders[0].send(np.arange(2, 6, dtype=np.int32))
    assert library.writing.wait(30)
    first.senders[1].fail("out of luck")
    reasons(first.senders)
    if begun:
        again.start_prefill()
    library.result = result
    library.gate.set()
    until(lambda: not manager.queued, "the write has ended")
    first.wait_receivers(KVPoll.Failed) if result else first.receivers[1].abort()
    reasons(first.receivers)
    wait_quiet(first)
    # Behind the last word about the first one.
    manager.connect_unwaiting("127.0.0.1", world.decode[0].manager.rank_port).send_multipart([b"what is this"])
    until(lambda: "Ignored a message" in caplog.text, "decode has read it")
    if not begun:
        world.assert_books_closed()
        again.start_prefill()
    assert [sender.poll() for sender in again.senders] == [KVPoll.Bootstrapping] * 2
    assert not manager.failure_records
    if result == 0:
        again.start_decode().ask().wait_senders(KVPoll.WaitingForInput)
        for sender in again.senders:
            sender.init(again.num_pages, again.aux)
        again.send().finish()
        again.assert_landed()
        world.assert_books_closed()
    world.close()


def test_a_chunk_of_a_room_that_fails_meanwhile_is_not_counted_as_queued(world: World, monkeypatch) -> None:
    """A write of an earlier chunk fails in its own thread while the scheduler adds the next one."""
    manager = world.prefill[0].manager
    request = world.request(1, 24, 8).bootstrap()
    check = manager.check_status
    failing: list[threading.Thread] = []

    def check_later(room: int) -> KVPoll:
        if threading.current_thread() is threading.main_thread() and not failing:
            failing.append(threading.Thread(target=manager.fail_room, args=(1, "an earlier chunk failed")))
            failing[0].start()
            failing[0].join(0.2)
        return check(room)

    monkeypatch.setattr(manager, "check_status", check_later)
    request.senders[0].send(np.arange(2, 4, dtype=np.int32))
    request.wait_senders(KVPoll.Failed)
    assert failing and "an earlier chunk failed" in reasons(request.senders)[0]
    until(lambda: not any(manager.rooms_held().values()), "nothing is left", manager.rooms_held)
    request.wait_receivers(KVPoll.Failed)
    reasons(request.receivers)


def test_a_request_that_ends_while_its_transfer_thread_looks_after_it_has_not_failed(world: World) -> None:
    manager = world.prefill[0].manager
    request = world.request(1, 10, 4).bootstrap()
    looking, ended = threading.Event(), threading.Event()

    class Statuses(dict):
        def __contains__(self, room: object) -> bool:
            found = dict.__contains__(self, room)
            if threading.get_ident() in manager.queued.writers and self.get(room) == KVPoll.Success:
                looking.set()
                assert ended.wait(30)
            return found

    manager.request_status = Statuses(manager.request_status)
    request.send()
    assert looking.wait(30)
    request.finish()
    ended.set()
    until(lambda: not manager.queued, "the thread is done with it")
    world.assert_books_closed()


def test_decode_is_told_once_of_what_could_not_be_written(world: World) -> None:
    """The engine says so too."""
    (prefill,), (decode,), told = world.prefill, world.decode, world.ends_told(1)
    prefill.library.result = -1
    request = world.request(1, 24, 4).bootstrap(fenced=True).send()
    request.wait_senders(KVPoll.Failed)
    request.wait_receivers(KVPoll.Failed)
    wait_quiet(request)
    # After a write that has failed the engine waits for decode to register anew.
    decode.manager.connection_pool.clear()
    prefill.library.result = 0
    again = world.request(1, 24, 4).bootstrap().send()
    again.finish()
    again.assert_landed()
    assert told() == 1
    world.assert_books_closed()


def test_a_decode_without_the_flag_is_left_to_the_engine(world: World, monkeypatch) -> None:
    (prefill,) = world.prefill
    prefill.library.result = -1
    assert "Failed to send kv chunk" in lost_write(world, 1, None)
    prefill.library.result = 0
    assert "is not alive" in lost_write(world, 2, None)
    # It is restarted at the same address.
    world.decode[0].manager.connection_pool.clear()
    world.request(3, 24, None).bootstrap().send().finish()
    world.assert_books_closed()


def test_a_word_that_could_not_be_said_is_said_later(world: World, monkeypatch) -> None:
    """All has been written, and then prefill has no descriptor left for a socket to decode."""
    (prefill,) = world.prefill
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    connect = MooncakeKVManager._connect

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(MooncakeKVManager, "_connect", fail)
    request.send()
    until(lambda: not prefill.manager.queued, "the last chunk is done")
    monkeypatch.setattr(MooncakeKVManager, "_connect", connect)
    on_prefill, on_decode = request.fail()
    assert "Too many open files" in on_prefill and "Too many open files" in on_decode
    wait_quiet(request)
    world.assert_books_closed()


def test_a_worker_without_the_flag_hears_of_success_whoever_was_there_before(world: World) -> None:
    """Its predecessor at this address, which had the flag, had a request of the same room."""
    world.request(1, 24, 4).bootstrap().send().finish()
    until(lambda: not world.prefill[0].manager.queued, "the last chunk is done")
    again = world.request(1, 24, None).bootstrap().send()
    again.finish()
    again.assert_landed()
    world.assert_books_closed()


def test_nothing_queued_is_written_for_what_decode_must_have_given_up(world: World) -> None:
    """This worker stood still, and its transfer thread goes on before its scheduler has looked."""
    (prefill,), (decode,) = world.prefill, world.decode
    ahead, request = world.request(2, 8, 0, aux=1), world.request(1, 24, 4).bootstrap(fenced=True)
    ahead.base = 56
    ahead.bootstrap()
    prefill.library.gate.clear()
    prefill.library.writing.clear()
    ahead.send()
    assert prefill.library.writing.wait(30)
    request.send(3)
    request.senders[0].state.due_at = time.monotonic()
    prefill.library.gate.set()
    until(lambda: not prefill.manager.queued, "the queue is empty")
    assert not any(pool[request.decode_pages].any() for pool in decode.kv)
    on_prefill, on_decode = request.fail()
    assert "for which it waits" in on_prefill and "for which it waits" in on_decode
    wait_quiet(request)
    ahead.finish()
    world.assert_books_closed()


# ---- what comes to decode ----


def test_decode_survives_messages_that_mean_nothing_to_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    request = world.request(1, 10, 4).bootstrap()
    decode = push(world.decode[0])
    with caplog.at_level(logging.WARNING):
        for frames in (
            # A prefill with staging buffers asks for each chunk, and then sends without.
            [b"STAGING_REQ", b"1", b"0", b"2", b"127.0.0.1:1"],
            [b"STAGING_REQ", b"1", b"1", b"2", b"127.0.0.1:1"],
            [b""],
            [b"x", b"4", b"0"],
            [b"1", b"4"],
            [b"1", b"four", b"0"],
            [b"99", b"0", b"0"],
            [b"99", b"4", b"0"],
            [b"99", b"0", b"0", b"why"],
            [b"AUX_DATA"],
            [b"AUX_DATA", b"99", b"0", b"0", b"\0\0\0\4", b"late"],
            [b"CHUNK_READY", b"1"],
        ):
            decode.send_multipart(frames)
        until(lambda: caplog.text.count("Ignored a message") >= 5, "the messages are read", lambda: caplog.text)
    request.send().finish()
    request.assert_landed()
    world.assert_books_closed()


def metadata_frames(buffer: int, index: int, data: bytes, num_bytes: int | None = None) -> list[bytes]:
    size = struct.pack(">I", len(data) if num_bytes is None else num_bytes)
    return [b"AUX_DATA", b"1", b"%d" % buffer, b"%d" % index, size, data]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (metadata_frames(0, 1, b"x" * 64), "is for metadata buffer 1, which this request does not have"),
        (metadata_frames(0, -1, b"x" * 64), "which this request does not have"),
        (metadata_frames(1, 0, b"x" * 64), "this worker has parts 0 to 0"),
        (metadata_frames(-1, 0, b"x" * 64), "this worker has parts 0 to 0"),
        (metadata_frames(0, 0, b"x" * 65), "of at most 64 bytes"),
        (metadata_frames(0, 0, b"x" * 64, 63), "says that it has another length"),
        (metadata_frames(0, 0, b"x" * 64)[:5], "has 6 frames, this one of room 1 has 5"),
        ([*metadata_frames(0, 0, b"x" * 64)[:3], b"x", b"", b""], "metadata buffer is not a number"),
    ],
)
def test_metadata_that_cannot_be_right_fails_its_room_only(world: World, frames: list[bytes], why: str) -> None:
    """The engine writes it to where it says, which ends the process or overwrites what is another request's."""
    bad, good = world.request(1, 10, 4).bootstrap(fenced=True), world.request(2, 10, 4, aux=1)
    good.base = 48
    good.bootstrap()
    push(world.decode[0]).send_multipart(frames)
    bad.wait_receivers(KVPoll.Failed)
    assert not world.decode[0].aux.any()
    reason = reasons(bad.receivers)[0]
    assert "prefill's metadata cannot be used: " in reason and why in reason
    bad.receivers[0].cancel()
    bad.wait_senders(KVPoll.Failed)
    reasons(bad.senders)
    wait_quiet(bad)
    good.send().finish()
    good.assert_landed()
    world.assert_books_closed()


def test_metadata_comes_in_messages_where_it_is_not_written(world: World, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
    request = world.request(1, 10, 4, aux=3).bootstrap().send()
    request.finish()
    request.assert_landed()
    world.assert_books_closed()


def test_metadata_goes_to_the_engine_as_it_is_without_the_flag(world: World, monkeypatch) -> None:
    """Prefill with a draft model and decode without it: an item is longer than that of decode."""
    manager, taken = world.decode[0].manager, []
    world.request(1, 10, 4).bootstrap()
    monkeypatch.setattr(manager.server_args, "disaggregation_decode_enable_radix_cache", False)
    monkeypatch.setattr(manager, "_handle_aux_data", taken.append)
    frames = metadata_frames(0, 0, b"x" * 65)
    push(world.decode[0]).send_multipart(frames)
    until(lambda: taken == [frames], "the message is handed on")
    assert manager.request_status[1] != KVPoll.Failed


@pytest.mark.parametrize("status", [KVPoll.Success, KVPoll.Failed])
def test_what_comes_late_is_not_of_a_request_that_has_not_asked_yet(world: World, caplog, status: KVPoll) -> None:
    """Its room has been used before, and decode has been told twice of that."""
    request = world.request(1, 10, 4).start_prefill().start_decode()
    decode = push(world.decode[0])
    decode.send_multipart([b"1", b"%d" % status, b"0", b"late"])
    decode.send_multipart([b"what is this"])
    until(lambda: "Ignored a message" in caplog.text, "both are read")
    assert request.receivers[0].poll() == KVPoll.WaitingForInput
    request.ask().wait_senders(KVPoll.WaitingForInput)
    request.senders[0].init(request.num_pages, request.aux)
    request.send().finish()
    request.assert_landed()
    world.assert_books_closed()


def test_a_room_that_has_failed_stays_so_when_it_is_asked_for_again(world: World) -> None:
    request = world.request(1, 26, None).start_prefill().start_decode()
    pages = [np.arange(first, first + 7, dtype=np.int32) for first in (20, 40)]
    request.ask(kv_indices=pages[0], decode_prefix_len=None).wait_senders(KVPoll.WaitingForInput)
    manager = world.prefill[0].manager
    manager.fail_room(1, "a write has failed")
    # The engine takes the higher of two states.
    manager.request_status[1] = KVPoll.Failed
    request.ask(kv_indices=pages[1], decode_prefix_len=None)
    until(lambda: first_pages(manager, 1) == [40], "the second message is read")
    assert manager.request_status[1] == KVPoll.Failed


@pytest.mark.parametrize("status", [KVPoll.Success, KVPoll.Failed])
def test_a_message_that_is_read_while_its_room_ends_leaves_nothing_behind(world: World, status: KVPoll) -> None:
    request = world.request(1, 24, 8).bootstrap(fenced=True)
    (receiver,), manager = request.receivers, world.decode[0].manager
    read, ended = threading.Event(), threading.Event()

    class Awaited(dict):
        """The scheduler ends the request just when the thread that reads messages has found its room."""

        def __contains__(self, room: object) -> bool:
            found = dict.__contains__(self, room)
            if threading.current_thread() is not threading.main_thread() and not read.is_set():
                read.set()
                assert ended.wait(30)
            return found

    give_up(request)
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    manager.awaited_rooms, manager.request_status[1] = Awaited({1: AwaitedRoom({0})}), KVPoll.Failed
    push(world.decode[0]).send_multipart([b"1", b"%d" % status, b"0", b"said"])
    assert read.wait(30)
    receiver.end()
    ended.set()
    other = world.request(2, 8, 0)
    other.bootstrap().send().finish()
    assert not any(manager.rooms_held().values())
    world.assert_books_closed()


def test_a_failure_in_the_engines_words_does_not_say_that_nothing_is_written_any_more(world: World) -> None:
    """It is sent while other writes of the same chunk may go on; the patch set's own comes after them."""
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    push(world.decode[0]).send_multipart([b"1", b"%d" % KVPoll.Failed, b"0"])
    request.wait_receivers(KVPoll.Failed)
    (receiver,) = request.receivers
    reasons(request.receivers)
    receiver.state.given_up_at = time.monotonic()
    assert not receiver.writers_done()
    world.decode[0].manager.prefills.capabilities.clear()
    assert receiver.writers_done()


# ---- decode gives a request up ----


def test_the_failure_of_a_dummy_rank_does_not_count_for_the_rank_that_writes(monkeypatch) -> None:
    world = World(monkeypatch, prefill_tp=2, decode_tp=1, mla=True)
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    reasons(request.senders[1:])
    time.sleep(0.05)
    assert request.receivers[0].poll() == KVPoll.WaitingForInput
    give_up(request)
    time.sleep(0.05)
    assert not request.receivers[0].writers_done()
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    world.close()


def test_a_rank_that_gives_up_late_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    request = world.request(1, 24, 4).start_decode(fenced=True).ask()
    first, second = request.receivers
    for receiver in request.receivers:
        receiver.abort()
    first.cancel()
    until(first.writers_done, "the first rank is answered")
    # Now the prompt comes to prefill, which has forgotten that the second rank asked.
    request.start_prefill()
    second.cancel()
    time.sleep(0.05)
    request.wait_senders(KVPoll.Failed)
    until(second.writers_done, "the second rank is answered")
    world.close()


def test_queued_chunks_are_not_sent_for_a_new_request_of_the_room(world: World) -> None:
    """A client that tries again under the same number, while the queue still has some of its first try."""
    library = world.prefill[0].library
    first, other = world.request(1, 24, 4).bootstrap(fenced=True), world.request(2, 24, 4, aux=1).bootstrap()
    other.base += 8
    library.gate.clear()
    library.writing.clear()
    other.send()
    assert library.writing.wait(30)
    first.send(3)
    give_up(first)
    first.wait_senders(KVPoll.Failed)
    wait_quiet(first)
    again = world.request(1, 24, 4).start_prefill().start_decode().ask()
    on_prefill, on_decode = again.fail()
    assert "chunks of an earlier request" in on_prefill and "chunks of an earlier request" in on_decode
    library.gate.set()
    other.wait_senders(KVPoll.Success)
    reasons(first.senders)
    for end in (*other.senders, *other.receivers):
        end.clear()
    world.assert_books_closed()
    world.request(1, 24, 4).bootstrap().send().wait_senders(KVPoll.Success)


def test_a_rank_that_has_everything_does_not_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, prefill_tp=2, decode_tp=2)
    request = world.request(1, 24, 4).bootstrap(fenced=True)
    first, second = request.receivers
    request.senders[0].send(np.arange(1, 6, dtype=np.int32))
    until(lambda: first.poll() == KVPoll.Success, "the first rank has its part")
    request.senders[1].fail("out of luck")
    until(lambda: second.poll() == KVPoll.Failed, "the second rank hears of the failure")
    for receiver in request.receivers:
        reasons([receiver])
        receiver.cancel()
        assert receiver.writers_done()
    request.senders[0].poll()
    reasons(request.senders)
    world.assert_books_closed()
    world.close()


def test_a_failed_write_waits_for_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_THREAD_POOL_SIZE", "16")
    world = World(monkeypatch, prefill_tp=1, decode_tp=2)
    library, request = world.prefill[0].library, world.request(1, 24, 4).bootstrap(fenced=True)
    copy, calls = library.batch_transfer_sync, []

    def first_fails(*args) -> int:
        calls.append(args)
        return copy(*args) if len(calls) > 1 else -1 if library.writing.wait(30) else 0

    library.batch_transfer_sync = first_fails
    library.gate.clear()
    library.writing.clear()
    request.send()
    assert library.writing.wait(30)
    sender = request.senders[0]
    until(lambda: sender.kv_mgr.request_status.get(1) == KVPoll.Failed, "the write has failed")
    assert sender.poll() == KVPoll.WaitingForInput
    library.gate.set()
    request.wait_senders(KVPoll.Failed)
    world.close()


def test_a_request_of_a_room_that_has_ended_well_is_given_up_as_any_other(world: World) -> None:
    """Before its prompt has come to prefill, which remembers the end of the last request of the room."""
    world.request(1, 24, 8).bootstrap().send().finish()
    until(lambda: not world.prefill[0].manager.queued, "the last chunk is done")
    again = world.request(1, 24, 8).start_decode(fenced=True).ask()
    give_up(again)
    wait_quiet(again)
    again.start_prefill().wait_senders(KVPoll.Failed)
    assert "decode gave the request up" in reasons(again.senders)[0]
    world.assert_books_closed()
