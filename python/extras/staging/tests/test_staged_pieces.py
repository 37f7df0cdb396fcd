"""Deltas over Mooncake by way of staging buffers, between real managers of both roles."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mooncake_world
import numpy as np
import pytest
import requests
import torch
import zmq
from mooncake_world import HEADS, LAYERS, assert_landed
from prefill_front import bootstrap_server
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import staging_buffer
from sglang.srt.disaggregation.common.delta_staging import ALIGNMENT, DeltaStaging, Space
from sglang.srt.disaggregation.decode_radix.prefix import pages
from sglang.srt.disaggregation.mooncake import staging as mooncake_staging
from sglang.srt.disaggregation.mooncake import staging_wire as wire
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer, MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVBootstrapServer
from test_prefill_answers import Ranks
from waiting import until
from wire_ends import give_up, push, reasons, wait_quiet


class World(mooncake_world.World):
    """A prefill and a decode worker, whose staging buffers are empty in the end."""

    def assert_books_closed(self) -> None:
        super().assert_books_closed()
        for rank in self.decode:
            staging = rank.manager.staging
            if staging is not None:
                assert not staging.rooms and not staging.shares.all and not staging.copying
                assert staging.space.free == [(0, staging.space.size)]


@pytest.fixture
def make(monkeypatch) -> Iterator[Callable[..., World]]:
    """Makes two workers, and closes them. pieces: of two pages, as many as the staging buffers of decode hold."""
    made: list[World] = []

    def make(prefill_tp: int = 1, decode_tp: int = 1, pieces: int = 0, **options: Any) -> World:
        world = World(monkeypatch, prefill_tp=prefill_tp, decode_tp=decode_tp, **{"staging": True, **options})
        made.append(world)
        for rank in world.decode if pieces else ():
            size = pieces * 2 * sum(rank.manager.kv_args.kv_item_lens)
            rank.manager.staging.space = Space(-(-size // ALIGNMENT) * ALIGNMENT)
        for rank in world.prefill if pieces else ():
            share = max(1, decode_tp // prefill_tp)
            for buffer in rank.manager._staging_ctx.buffers:
                buffer.size_bytes = 2 * sum(rank.manager.kv_args.kv_item_lens) // share
        return world

    yield make
    for world in made:
        world.close()


def serve(world: World) -> None:
    request = world.request(1, 30, 8).bootstrap().send(4)
    request.finish()
    request.assert_landed()
    world.assert_books_closed()


SIZES = [(1, 2), (2, 1), (4, 2), (1, 4)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
@pytest.mark.parametrize(
    ("page_size", "prompt_len", "prefix_len", "chunks"),
    [(4, 79, 4, [5, 6, 11]), (4, 40, 40, []), (1, 23, 7, [8, 16])],
)
def test_trap_21_pieces_land_where_they_belong_behind_a_prefix(
    make, prefill_tp, decode_tp, page_size, prompt_len, prefix_len, chunks
) -> None:
    """Chunks that are no whole cells of the engine's grid: it begins at the first page, and so does none of these."""
    world = make(prefill_tp, decode_tp, pieces=3, page_size=page_size)
    request = world.request(1, prompt_len, prefix_len).bootstrap().send(*chunks)
    request.finish()
    request.assert_landed()
    world.assert_books_closed()
    ends = [request.first_page, *chunks, request.num_pages]
    pieces = sum(pages(end - start, 2) for start, end in zip(ends, ends[1:], strict=False))
    for rank in world.prefill:
        targets = max(1, decode_tp // prefill_tp)
        assert rank.manager.events.runs == pieces * targets
        # One more for the metadata of each decode rank.
        assert rank.library.descriptors == (pieces + 1) * targets
        # Each of its bytes once.
        assert rank.library.written == rank.manager.events.sent_bytes + 64 * targets


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES[:2])
def test_requests_that_want_more_than_the_staging_buffer_take_turns(make, prefill_tp, decode_tp) -> None:
    world = make(prefill_tp, decode_tp, pieces=1)
    requests_ = [world.request(room, 30, 4 * (room % 3), aux=room) for room in range(4)]
    for request in requests_:
        request.base += 8 * request.room
        request.bootstrap()
    for request in requests_:
        request.send(5)
    for request in requests_:
        request.finish()
    assert_landed(*requests_)
    world.assert_books_closed()


def test_equal_sizes_and_decodes_without_the_flag_use_no_pieces(make) -> None:
    world = make(prefill_tp=2, decode_tp=2)
    serve(world)
    for rank in world.prefill:
        assert rank.library.descriptors == rank.manager.events.runs * 2 * LAYERS + 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_worker_without_staging_buffers_gets_slices(make, side: str) -> None:
    world = make(prefill_tp=1, decode_tp=2)
    for rank in getattr(world, side):
        if side == "prefill":
            rank.manager.enable_staging = False
        else:
            rank.manager.staging = None
    serve(world)
    assert world.prefill[0].library.descriptors > 2 * 22


@pytest.mark.parametrize("when", ["before a grant", "granted", "copied in part"])
def test_staging_memory_of_a_request_that_is_given_up_comes_back(make, when: str) -> None:
    world = make(1, 2, pieces=1)
    library, stagings = world.prefill[0].library, [rank.manager.staging for rank in world.decode]
    holder = world.request(1, 8, 0, aux=1).bootstrap()
    request = world.request(2, 40, 4).bootstrap(fenced=True)
    if when == "granted":
        library.gate.clear()
        library.writing.clear()
        request.send()
        assert library.writing.wait(30)
    else:
        sent = 4 if when == "copied in part" else 1
        if sent > 1:
            request.senders[0].send(np.arange(1, sent, dtype=np.int32))
            states = [staging.rooms[2] for staging in stagings]
            until(lambda: all(state.copied == 3 for state in states), "a chunk has landed")
            until(lambda: not any(staging.copying for staging in stagings), "and given its memory back")
        # Somebody else has all of it, so that the rest waits.
        offsets = [staging.space.take(staging.space.size) for staging in stagings]
        request.senders[0].send(np.arange(sent, request.num_pages, dtype=np.int32))
        until(
            lambda: all(any(share._waiting for share in [*one.shares.all.values()]) for one in stagings),
            "decode is asked",
        )
    give_up(request)
    if when == "granted":
        time.sleep(0.05)
        assert not any(receiver.writers_done() for receiver in request.receivers)
        library.gate.set()
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    if when != "granted":
        for staging, offset in zip(stagings, offsets, strict=True):
            staging.space.give(offset, staging.space.size)
    holder.send()
    holder.finish()
    reasons(request.senders)
    world.assert_books_closed()


def test_writes_by_way_of_staging_that_fail_are_not_tried_for_each_request(monkeypatch, make) -> None:
    """Each may take the transport's time-out, in which this thread writes for no other decode worker either."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUEUE_SIZE", "1")
    world = make(1, 2, pieces=32)
    tried: list[str] = []
    library = world.prefill[0].library
    # The engine's: none is tried again, however long this takes.
    world.prefill[0].manager.failed_sessions = set()
    write = library.batch_transfer_sync
    requests = [world.request(room, 4, 0, aux=room).bootstrap() for room in range(1, 5)]

    def fail(session: str, *args: Any) -> int:
        tried.append(session)
        return -1

    library.batch_transfer_sync = fail
    for request in requests:
        request.send()
    for request in requests:
        request.wait_senders(KVPoll.Failed)
    told = [reason for request in requests for reason in reasons(request.senders)]
    # One for each rank of that worker. Of whichever request was granted memory first.
    assert 1 <= len(tried) == len(set(tried)) <= 2
    assert any("a piece could not be written to decode at" in reason for reason in told)
    assert sum("since writes to it have failed" in reason for reason in told) >= len(told) - len(tried)
    library.batch_transfer_sync = write
    for request in requests:
        wait_quiet(request)
    world.assert_books_closed()


def test_a_piece_that_cannot_be_made_fails_its_request_alone(monkeypatch, make) -> None:
    """Memory that is short on prefill's device says nothing of decode."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_QUEUE_SIZE", "1")
    world = make(1, 2, pieces=32)
    gather, calls = staging_buffer.gather_all_layers_to_staging, itertools.count()

    def short_of_memory(*args: Any) -> Any:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("by the test")
        return gather(*args)

    monkeypatch.setattr(staging_buffer, "gather_all_layers_to_staging", short_of_memory)
    first, second = (world.request(room, 4, 0, aux=room).bootstrap() for room in (1, 2))
    first.send().wait_senders(KVPoll.Failed)
    assert "by the test" in reasons(first.senders)[0]
    wait_quiet(first)
    second.send().finish()
    world.assert_books_closed()


def test_mla_has_no_staging_buffer_and_needs_none(make) -> None:
    world = make(prefill_tp=2, decode_tp=1, mla=True)
    serve(world)
    assert world.decode[0].manager.staging_offer is None


def test_staging_buffers_too_small_for_a_page_are_left_alone(make, caplog) -> None:
    world = make(prefill_tp=1, decode_tp=2)
    for buffer in world.prefill[0].manager._staging_ctx.buffers:
        buffer.size_bytes = 100
    serve(world)
    # Once for each decode rank, not for each chunk.
    assert caplog.text.count("Staging buffers are too small") == 2


def test_ranks_that_share_heads_send_slices(make) -> None:
    world = make(prefill_tp=1, decode_tp=2)
    world.prefill[0].manager.kv_args.total_kv_head_num = HEADS // 2
    request = world.request(1, 8, 0).bootstrap()
    assert all(world.prefill[0].manager._piece_pages(info) == 0 for info in request.senders[0].state.asked.values())


def test_a_decode_that_is_gone_is_not_waited_for(monkeypatch, make) -> None:
    monkeypatch.setattr(mooncake_staging, "PATIENCE_S", 0.1)
    world = make(1, 2, pieces=1)
    request = world.request(1, 40, 4).bootstrap()
    for rank in world.decode:
        rank.manager.staging.space.take(rank.manager.staging.space.size)
    request.send()
    time.sleep(0.3)
    request.wait_senders(KVPoll.WaitingForInput)
    monkeypatch.setattr(world.prefill[0].manager, "are_gone", lambda ranks: True)
    request.wait_senders(KVPoll.Failed)
    assert "which was to grant staging memory, is gone" in reasons(request.senders)[0]


def test_a_decode_that_grants_nothing_is_not_waited_for_for_ever(monkeypatch, make) -> None:
    monkeypatch.setattr(mooncake_staging, "PATIENCE_S", 0.1)
    world = make(2, 1, pieces=1)
    world.decode[0].manager.staging.space.take(world.decode[0].manager.staging.space.size)
    request = world.request(1, 40, 4).bootstrap().send()
    for rank in world.prefill:
        rank.manager.bootstrap_timeout = 0.2
    on_prefill, on_decode = request.fail()
    assert "granted no staging memory" in on_prefill and "granted no staging memory" in on_decode


def piece_frames(kind: bytes, *values: int) -> list[bytes]:
    more = [b"127.0.0.1", b"1"] if kind == b"stage" else []
    return [b"1", kind, *[b"%d" % value for value in values], *more]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([piece_frames(b"stage", 0, 1, 2)], "is not the next one"),
        ([piece_frames(b"stage", 0, 0, 0)], "is not the next one"),
        ([piece_frames(b"stage", 0, 0, 11)], "is not the next one"),
        ([piece_frames(b"stage", 0, 0, 9)], "is larger than the staging buffer"),
        ([piece_frames(b"stage", 0, 0, 2), piece_frames(b"stage", 1, 0, 1)], "prefill ranks disagree"),
        ([piece_frames(b"staged", 0, 0)], "was not granted to it"),
        ([piece_frames(b"stage", 0, 0, 2), piece_frames(b"staged", 1, 0)], "was not granted to it"),
        ([[b"1", b"stage", b"0", b"zero", b"1", b"127.0.0.1", b"1"]], "first page is not a number"),
        ([[b"1", b"staged", b"0"]], "has 3 frames"),
    ],
)
def test_a_piece_that_cannot_be_right_fails_its_room_only(make, frames: list, why: str) -> None:
    world = make(2, 1, pieces=2)
    bad = world.request(1, 40, 0).bootstrap(fenced=True)
    decode = push(world.decode[0])
    for message in frames:
        decode.send_multipart(message)
    bad.wait_receivers(KVPoll.Failed)
    assert why in reasons(bad.receivers)[0]
    bad.receivers[0].cancel()
    bad.wait_senders(KVPoll.Failed)
    reasons(bad.senders)
    wait_quiet(bad)
    good = world.request(2, 40, 4).bootstrap().send()
    good.finish()
    good.assert_landed()
    world.assert_books_closed()


@pytest.mark.parametrize(("start", "offset"), [(0, -1), (-1, 0)])
def test_a_grant_below_the_staging_buffer_is_refused(start: int, offset: int) -> None:
    """Prefill would write in front of what decode has registered for it."""
    frames = [b"1", b"127.0.0.1", b"9", b"127.0.0.1:15000", b"grant", b"%d" % start, b"%d" % offset]
    with pytest.raises(ValueError, match="a grant of staging memory of room 1 is negative"):
        wire.Grant.read(frames)


def test_the_engines_prefill_is_offered_no_staging_buffer(make) -> None:
    """It would fill it by its own grid. Its requests for cells are left unanswered, and it sends slices."""
    world = make(prefill_tp=2, decode_tp=1)
    world.decode[0].manager.prefills.capabilities.clear()
    world.request(1, 8, None).start_prefill()
    receiver = MooncakeKVReceiver(world.decode[0].manager, world.addr, 1)
    receiver.init(0)
    until(lambda: bool(world.prefill[0].manager.decode_kv_args_table), "decode has registered")
    (registration,) = world.prefill[0].manager.decode_kv_args_table.values()
    assert registration.staging is None


class Device(DeltaStaging):
    """Its copies are done when ``done`` says so, as on a GPU; on a host they are when the call returns."""

    done = False
    error: Exception | None = None

    def _copy(self, state, start, piece) -> None:
        piece.event = SimpleNamespace(query=lambda: self.done)
        if self.error is not None:
            raise self.error


def test_a_copy_on_a_gpu_holds_its_memory_until_it_is_done() -> None:
    pools = [torch.zeros(8, 1, 4) for _ in range(2)]
    staging = Device(torch.zeros(ALIGNMENT, dtype=torch.uint8), pools[:1], pools[1:], 1, 1, 0)
    granted: list[tuple[int, int]] = []

    def ask(room: int) -> None:
        for rank in (0, 1):
            staging.request(room, 0, 2, rank, lambda offset: granted.append((room, offset)))

    for room in (1, 2, 3, 4):
        staging.open(room, np.arange(2, dtype=np.int32), 2, "prefill")
        ask(room)
    staging.written(1, 0, 0)
    assert not staging.copying
    staging.written(1, 0, 1)
    assert granted == [(1, 0)] * 2 and not staging.landed(1) and not staging.is_missing(1)
    # What has been given up goes out of the way of others, but for what is being copied.
    assert staging.close(2) and not staging.close(1)
    staging.drop(1)
    assert not staging.space.free and granted == [(1, 0)] * 2
    staging.done = True
    # It comes back when anybody asks for anything.
    assert not staging.landed(3) and granted == [(1, 0)] * 2 + [(3, 0)] * 2
    for room in (2, 3):
        staging.drop(room)
    assert granted[-2:] == [(4, 0)] * 2
    staging.drop(4)
    assert staging.space.free == [(0, ALIGNMENT)]


def test_a_grant_that_cannot_be_sent_while_another_request_ends(monkeypatch, make) -> None:
    """One thread wants the books of rooms with those of staging in hand, the other the other way round."""
    world = make(2, 1, pieces=2)
    told, ending = threading.Event(), threading.Event()
    stuck, ends = world.request(1, 24, 8).bootstrap(fenced=True), world.request(2, 24, 8, aux=1).bootstrap(fenced=True)
    (decode,), close_books = world.decode, ends.receivers[0]._forget_room
    connect = decode.manager.connect_unwaiting

    def cannot(host: str, port: int) -> Any:
        def send_multipart(frames: list[bytes]) -> Any:
            if mooncake_staging.GRANT not in frames:
                return connect(host, port).send_multipart(frames)
            told.set()
            assert ending.wait(30)
            raise zmq.Again

        return SimpleNamespace(send_multipart=send_multipart)

    def close() -> None:
        ending.set()
        close_books()

    monkeypatch.setattr(decode.manager, "connect_unwaiting", cannot)
    ends.receivers[0]._forget_room = close
    scheduler = threading.Thread(target=lambda: told.wait(30) and ends.receivers[0].end(), daemon=True)
    scheduler.start()
    stuck.send()
    scheduler.join(30)
    assert not scheduler.is_alive()
    stuck.wait_receivers(KVPoll.Failed)
    assert "could not grant staging memory" in reasons(stuck.receivers)[0]


@pytest.fixture
def devices(make) -> World:
    """Decode has two ranks, whose copies are done when told so."""
    world = make(1, 2, pieces=2)
    for rank in world.decode:
        rank.manager.staging.__class__ = Device
    return world


def test_pages_are_kept_while_they_are_copied_to_when_another_rank_fails(devices: World) -> None:
    request = devices.request(1, 8, 0).bootstrap(fenced=True).send()
    request.wait_senders(KVPoll.Success)
    one, other = request.receivers
    until(lambda: one.conclude_state == KVPoll.Success or one.poll() is None, "all is written")
    assert one.poll() == KVPoll.Transferring
    # What the queue does on both ranks when the other one fails.
    other.abort()
    for receiver in (one, other):
        reasons([receiver])
        receiver.cancel()
    for _ in range(3):
        assert not one.writers_done() and not other.writers_done()
    assert not any(rank.manager.staging.space.free == [(0, rank.manager.staging.space.size)] for rank in devices.decode)
    for rank in devices.decode:
        rank.manager.staging.done = True
    wait_quiet(request)
    for sender in request.senders:
        sender.clear()
    devices.assert_books_closed()


def test_finished_copies_make_room_although_no_request_is_complete(devices: World) -> None:
    """Polls of requests that still wait are all that happens then."""
    stagings = [rank.manager.staging for rank in devices.decode]
    request = devices.request(1, 40, 0).bootstrap().send()
    until(lambda: all(len(staging.copying) == 2 for staging in stagings), "both pieces are written")
    request.wait_receivers(KVPoll.WaitingForInput)
    for staging in stagings:
        staging.done = True
    until(lambda: {r.poll() for r in request.receivers} == {KVPoll.Success}, "the rest comes", request.senders[0].poll)
    request.finish()
    devices.assert_books_closed()


def test_a_copy_that_fails_fails_its_request_only(devices: World) -> None:
    stagings = [rank.manager.staging for rank in devices.decode]
    stagings[0].error = RuntimeError("out of memory")
    bad = devices.request(1, 8, 0).bootstrap(fenced=True).send()
    bad.wait_senders(KVPoll.Success)
    until(lambda: bad.receivers[0].poll() == KVPoll.Failed, "the request fails", bad.receivers[0].poll)
    for receiver, why in zip(bad.receivers, ("out of memory", ""), strict=True):
        assert why in reasons([receiver])[0]
        receiver.cancel()
    # Some of it may have been started.
    assert not bad.receivers[0].writers_done()
    stagings[0].error = None
    for staging in stagings:
        staging.done = True
    wait_quiet(bad)
    for sender in bad.senders:
        sender.clear()
    good = devices.request(2, 8, 0).bootstrap().send()
    good.finish()
    devices.assert_books_closed()


def test_a_success_without_all_pieces_is_a_failure(devices: World) -> None:
    for rank in devices.decode:
        rank.manager.staging.done = True
    request = devices.request(1, 24, 0).bootstrap(fenced=True)
    request.senders[0].send(np.arange(0, 2, dtype=np.int32))
    until(lambda: all(rank.manager.staging.rooms[1].copied == 2 for rank in devices.decode), "a piece has landed")
    for rank in devices.decode:
        push(rank).send_multipart([b"1", b"%d" % KVPoll.Success, b"0"])
    request.wait_receivers(KVPoll.Failed)
    assert "before it had written all pieces" in reasons(request.receivers)[0]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_stages_send_slices_where_one_rank_would_fill_staging_buffers(make, prefill_tp, decode_tp):
    sizes = {"prefill_tp": prefill_tp, "decode_tp": decode_tp, "staging": True}
    for stages in ((5,), (2, 3)):
        world = make(stages=stages, **sizes)
        request = world.request(1, 26, 8).bootstrap()
        # In one piece a rank sends as many runs as there are pieces; in slices, of pages that are no run, one for each.
        request.send()
        request.finish()
        request.assert_landed()
        runs = [rank.manager.events.runs for rank in world.prefill]
        assert (max(runs) < request.num_pages - request.first_page) == (len(stages) == 1)


@pytest.mark.parametrize(("stages", "pieces"), [((5,), 1), ((2, 3), 0)])
def test_the_bootstrap_server_says_whether_it_asks_for_pieces(make, stages, pieces) -> None:
    """Staging buffers are laid out for one stage."""
    world = make(stages=stages, staging=False)
    answer = requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()
    assert list(answer.items())[:2] == [("version", 1), ("pieces", pieces)]
    assert ("pieces" in world.decode[0].manager.prefills.of(world.addr).others) == pieces


def test_a_backend_without_pieces_says_so() -> None:
    for backend, said in ((MooncakeKVBootstrapServer, 1), (NixlKVBootstrapServer, 0)):
        with bootstrap_server(server=backend) as port:
            Ranks(port, 1).register(0)
            answer = requests.get(f"http://127.0.0.1:{port}/decode_prefix", timeout=30).json()
            assert answer["pieces"] == said


def test_prefill_survives_bad_messages_about_the_engines_staging(make) -> None:
    world = make(prefill_tp=2, decode_tp=1)
    prefill = push(world.prefill[0])
    for frames in (
        [b"WATERMARK"],
        [b"WATERMARK", b"1", b"x", b"session"],
        [b"WATERMARK", b"1", b"2", b"\xff"],
        [b"STAGING_RSP", b"1", b"0", b"0", b"0", b"session"],
        [b"STAGING_RSP", b"1", b"0", b"", b"0", b"0", b"session"],
    ):
        prefill.send_multipart(frames)
    request = world.request(1, 24, 4).bootstrap().send()
    request.finish()
    request.assert_landed()


def test_decode_says_once_that_it_uses_no_staging_buffer(make, caplog: pytest.LogCaptureFixture) -> None:
    """A prefill with staging buffers asks for each chunk, and then sends without."""
    world = make(staging=False)
    request, decode = world.request(1, 10, 4).bootstrap(), push(world.decode[0])
    for frames in (
        [b"STAGING_REQ", b"1", b"0", b"2", b"127.0.0.1:1"],
        [b"STAGING_REQ", b"1", b"1", b"2", b"127.0.0.1:1"],
        [b"CHUNK_READY", b"1"],
    ):
        decode.send_multipart(frames)
    until(lambda: "which this worker does not use" in caplog.text, "the messages are read", lambda: caplog.text)
    assert caplog.text.count("uses staging buffers") == 1
    request.send().finish()
    request.assert_landed()
