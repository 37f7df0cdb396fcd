"""What a transfer backend does with requests that end badly, come twice or make no sense; the same over both."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base import KVPoll
from waiting import until
from wire_ends import first_pages, give_up, reasons, sent_frames, wait_quiet


def asked(world: Any, room: int) -> None:
    """Prefill has read what decode asks for."""
    until(lambda: room in world.prefill[0].manager.transfer_infos, "decode's request is read")


# ---- what decode sends ----


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("states", [None, [3, 4]])
@pytest.mark.parametrize("indices", [[5, 6, 9], []])
def test_a_message_without_a_prefix_is_the_engines_and_one_with_it_only_appends(wire_module, dummy, states, indices):
    receiver, pages, length = wire_module.bare(dummy), np.array(indices, np.int32), {"nixl_world": 9}
    engines = sent_frames(receiver, lambda: wire_module.ENGINE_RECEIVER.send_metadata(receiver, pages, 3, states))
    short = sent_frames(receiver, lambda: receiver.send_metadata(pages, 3, states))
    long = sent_frames(receiver, lambda: receiver.send_metadata(pages, 3, states, decode_prefix_len=128))
    assert short == engines and len(short[0]) == length.get(wire_module.__name__, 8)
    assert long == [frames + [b"128", b"1" if dummy else b"0"] for frames in engines]


# ---- what is sent to it ----


@pytest.mark.parametrize(
    ("prompt_len", "prefix_len", "chunks"),
    [
        (10, None, []),
        (10, 0, []),
        (10, 4, []),
        (10, 8, []),
        (12, 12, []),
        (30, 8, [3, 5]),
        (30, None, [2, 4]),
        (1, 0, []),
    ],
)
def test_decode_gets_the_delta_and_nothing_else(wire, backend, prompt_len, prefix_len, chunks):
    (counters,) = wire.count()
    request = wire.request(1, prompt_len, prefix_len).bootstrap().send(*chunks)
    request.finish()
    request.assert_landed()
    wire.assert_books_closed()
    page = sum(wire.prefill[0].manager.kv_args.kv_item_lens)
    assert counters.sent_bytes == (request.num_pages - request.first_page) * page
    assert counters.saved_bytes == request.first_page * page
    if backend == "mooncake":
        buffers, library = len(wire.prefill[0].kv), wire.prefill[0].library
        # One more for the metadata.
        assert (library.written, library.descriptors) == (counters.sent_bytes + 64, counters.runs * buffers + 1)


@pytest.mark.parametrize("prefix_len", [None, 8])
def test_a_room_that_ended_well_may_be_used_again(wire, prefix_len):
    """Decode's request may come before prefill's own; ignored, it would wait for its time-out."""
    for _ in range(2):
        request = wire.request(1, prefix_len=prefix_len).start_decode().ask()
        asked(wire, 1)
        request.start_prefill().begin().send().finish()
    request.assert_landed()
    wire.assert_books_closed()


def test_a_prompt_that_decode_computes_itself_leaves_nothing_behind(wire):
    """Prefill is asked for nothing and drops the request; the next one of its room is served."""
    request = wire.request(7).start_prefill().start_decode()
    for receiver in request.receivers:
        receiver.conclude_state = KVPoll.Success
        receiver.end()
    for sender in request.senders:
        sender.drop()
    wire.assert_healthy(7)
    wire.assert_books_closed()


# ---- requests that cannot be true: they fail, on both sides and alone ----


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"-4", "-4 is negative"),
        (b"6", "6 is not a multiple of the page size 4"),
        (b"28", "28 is beyond the prompt of 26 tokens"),
        (b"99999999999999999996", "beyond the prompt"),
        (b"4", "leaves 6 pages .* but decode allocated 5"),
        (b"0", "leaves 7 pages .* but decode allocated 5"),
        (b"8.0", "decode_prefix_len is not a number"),
        (b"", "decode_prefix_len is not a number"),
        ("٨".encode(), "decode_prefix_len is not a number"),
        (b"\xff", "decode_prefix_len is not a number"),
    ],
)
def test_a_prefix_that_cannot_be_fails_its_request_alone(wire, frame, reason):
    other, bad = wire.request(2, aux=1).bootstrap(), wire.request(1).start_prefill().start_decode()
    frames = bad.frames()
    wire.push([*frames[:-2], frame, frames[-1]])
    bad.assert_fails(reason)
    other.send().finish()
    other.assert_landed()
    wire.assert_books_closed()


@pytest.mark.parametrize("field", ["port", "peer", "pages", "aux", "count", "dummy", "too many", "too few"])
def test_a_field_that_cannot_be_read_fails_its_request_alone(wire, backend, field):
    bad = wire.request(1).start_prefill().start_decode()
    frames = bad.frames()
    # Behind the guard of NIXL's messages; where that has its agent Mooncake has a session.
    at = {"port": 2, "peer": 3, "pages": 4, "aux": 5, "count": 6 + (backend == "mooncake"), "dummy": -1}
    if field == "too many":
        frames.append(b"0")
    elif field == "too few":
        del frames[-1]
    else:
        place = at[field] + (backend == "nixl" and field != "dummy")
        frames[place] = {"pages": b"12345", "peer": b"\xff\xfe", "dummy": b"yes"}.get(field, b"None")
    wire.push(frames)
    # With an address that cannot be read there is nobody to tell.
    bad.assert_fails("refused decode's request", decode_too=field != {"nixl": "peer", "mooncake": "port"}[backend])
    wire.assert_healthy()


@pytest.mark.parametrize("before", [True, False])
def test_a_decode_worker_that_has_not_registered_fails_the_request_it_names(wire, backend, before):
    """A refusal that comes before its request waits for it."""
    bad, manager = wire.request(1).start_decode(), wire.prefill[0].manager
    until(lambda: manager.decode_kv_args_table, "decode has registered")
    known = dict(manager.decode_kv_args_table)
    manager.decode_kv_args_table.clear()
    if not before:
        bad.start_prefill()
    bad.ask()
    until(lambda: bad.receivers[0].poll() == KVPoll.Failed or 1 in manager.rooms.refused, "the message is read")
    if before:
        bad.start_prefill()
    # Over NIXL nothing can be said to an agent that is not known.
    bad.assert_fails("has not registered", decode_too=backend == "mooncake")
    manager.decode_kv_args_table.update(known)
    wire.assert_healthy()


def test_a_decode_rank_without_the_flag_is_asked_where_it_asked_last(wire):
    """As by the engine: a gateway that tries a room again, whose first request decode had aborted."""
    first, again = (wire.request(1, 26, None).start_decode() for _ in range(2))
    first.ask(kv_indices=np.arange(40, 47, dtype=np.int32), decode_prefix_len=None)
    again.ask(kv_indices=np.arange(50, 57, dtype=np.int32), decode_prefix_len=None)
    until(lambda: first_pages(wire.prefill[0].manager, 1) == [50], "both messages are read")
    again.start_prefill().wait_senders(KVPoll.WaitingForInput)


# ---- prefill fails a request ----


@pytest.mark.parametrize("when", ["before decode asks", "asked", "bootstrapped", "sent in part"])
def test_an_abort_on_prefill_reaches_decode(wire, when: str) -> None:
    request = wire.request(1, 20, 4).start_prefill().start_decode()
    if when != "before decode asks":
        request.ask()
        asked(wire, 1)
    if when in ("bootstrapped", "sent in part"):
        request.begin()
    if when == "sent in part":
        request.senders[0].send(np.arange(1, 3, dtype=np.int32))
    request.senders[0].abort()
    request.wait_senders(KVPoll.Failed)
    if when == "before decode asks":
        request.ask()
    assert all("borted" in reason for reason in request.fail())
    wire.assert_books_closed()
    # The room's number is free again.
    wire.request(1, 8, 4).bootstrap().send().finish()


def test_an_abort_on_prefill_sends_nothing_to_a_decode_without_the_flag(wire) -> None:
    request = wire.request(1, 20, None).bootstrap()
    request.senders[0].abort()
    request.wait_senders(KVPoll.Failed)
    time.sleep(0.05)
    assert request.receivers[0].poll() == KVPoll.WaitingForInput


@pytest.mark.parametrize("how", ["aborted", "given up"])
def test_nobody_hears_of_an_end_before_nothing_is_written_any_more(wire, how) -> None:
    """Else decode's pages are another's under the write."""
    request = wire.request(1, 24, 4).bootstrap(fenced=True)
    wire.hold()
    sender, (receiver,) = request.senders[0], request.receivers
    sender.send(np.arange(1, 3, dtype=np.int32))
    wire.wait_for_write()
    if how == "aborted":
        sender.abort()
    else:
        give_up(request)
        until(lambda: sender.poll() is not None and sender.has_failed(), "prefill hears of it")
    time.sleep(0.05)
    assert sender.poll() == KVPoll.WaitingForInput
    assert receiver.poll() == (KVPoll.WaitingForInput if how == "aborted" else KVPoll.Failed)
    assert not receiver.writers_done()
    # One that goes on is asked again.
    wire.settle()
    wire.let_go()
    if how == "given up":
        wait_quiet(request)
    request.wait_senders(KVPoll.Failed)
    reasons(request.senders)
    if how == "aborted":
        request.wait_receivers(KVPoll.Failed)
        reasons(request.receivers)
    wait_quiet(request)
    wire.assert_books_closed()


@pytest.mark.parametrize("how", ["aborted", "given up", "given up before it asks", "unreadable", "before prefill"])
def test_decode_is_told_once_of_the_end(wire, how: str) -> None:
    """A second word would end the next request of the room, and let its pages go while they are written to."""
    told = wire.ends_told(7)
    request = wire.request(7).start_decode(fenced=True)
    if how != "before prefill":
        request.start_prefill()
    if how in ("unreadable", "before prefill"):
        frames = request.frames()
        wire.push([*frames[:-2], b"x", frames[-1]])
        request.wait_receivers(KVPoll.Failed)
    elif how != "given up before it asks":
        request.ask().begin()
    if how == "aborted":
        request.senders[0].abort()
        request.wait_senders(KVPoll.Failed)
        request.wait_receivers(KVPoll.Failed)
    (receiver,) = request.receivers
    receiver.abort()
    receiver.poll()
    receiver.cancel()
    if how == "before prefill":
        request.start_prefill()
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)
    # Behind all that was said of it.
    wire.request(8).start_decode().ask()
    asked(wire, 8)
    assert told() == 1
    wire.hold()
    again = wire.request(7).bootstrap().send()
    assert again.receivers[0].poll() == KVPoll.WaitingForInput
    wire.let_go()
    again.finish()
    again.assert_landed()


def test_a_failure_that_could_not_be_told_is_told_when_decode_gives_up(wire) -> None:
    request = wire.request(1, 24, 4).bootstrap(fenced=True)
    with wire.without_words():
        request.senders[0].abort()
        request.wait_senders(KVPoll.Failed)
    assert request.receivers[0].poll() == KVPoll.WaitingForInput
    give_up(request)
    wait_quiet(request)


def test_a_reason_that_comes_while_another_is_told_is_not_kept(wire, monkeypatch, backend):
    on = {"nixl": "prefill", "mooncake": "decode"}[backend]
    manager = getattr(wire, on)[0].manager
    tell = manager.take_reason

    def told(room: int, *default: str) -> str:
        reason = tell(room, *default)
        manager.record_failure(room, "and another one")
        return reason

    monkeypatch.setattr(manager, "take_reason", told)
    request = wire.request(1, 10, 4)
    end = (request.start_prefill().senders if on == "prefill" else request.start_decode().receivers)[0]
    end.fail("out of luck")
    assert reasons([end])[0].endswith("out of luck")
    assert not manager.request_status and not manager.failure_records


# ---- decode gives a request up ----


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("when", ["asked", "bootstrapped", "sent", "prompt to come", "failed"])
def test_every_rank_answers_when_decode_gives_up(make_wire, prefill_tp, decode_tp, when) -> None:
    """Each prefill rank says when it writes no more; one that waits for its turn, between its scheduler's steps."""
    wire = make_wire(prefill_tp=prefill_tp, decode_tp=decode_tp)
    request = wire.request(1, 24, 4)
    if when == "prompt to come":
        request.start_decode(fenced=True).ask()
    elif when == "asked":
        request.start_decode(fenced=True).ask().start_prefill()
    else:
        request.bootstrap(fenced=True)
    if when == "sent":
        request.send().wait_senders(KVPoll.Success)
        for sender in request.senders:
            getattr(sender, "clear", lambda: None)()
    if when == "failed":
        request.senders[0].fail("out of luck")
        reasons(request.senders)
    give_up(request)
    if when == "prompt to come":
        wait_quiet(request)
        request.start_prefill()
    if when not in ("sent", "failed"):
        request.wait_senders(KVPoll.Failed)
        reasons(request.senders)
    wait_quiet(request)
    wire.assert_books_closed()


def test_nothing_is_sent_for_a_request_that_decode_gave_up(wire) -> None:
    request = wire.request(1, 24, 4).bootstrap(fenced=True)
    give_up(request)
    until(lambda: wire.prefill[0].manager.rooms.refused, "prefill hears of it")
    wire.hold()
    request.send()
    request.wait_senders(KVPoll.Failed)
    wait_quiet(request)


# ---- two requests of one room ----


@pytest.mark.parametrize("held", [8, 24])
@pytest.mark.parametrize("end", ["is left", "is aborted", "fails elsewhere"])
@pytest.mark.parametrize("posted", [True, False])
def test_a_request_that_comes_again_while_the_first_is_sent_fails_alone(wire, posted, end, held) -> None:
    """As a gateway sends it whose connection was closed. Told of a failure, decode gave pages away under the writes."""
    told, first, again = wire.ends_told(7), wire.request(7, 24, held).bootstrap(), wire.request(7, 24, held)
    wire.hold()
    for act in (first.send, again.start_prefill) if posted else (again.start_prefill, first.send):
        act()
    if end == "is aborted":
        again.senders[0].abort()
    elif end == "fails elsewhere":
        again.senders[0].fail("of another rank")
    again.wait_senders(KVPoll.Failed)
    (why,) = reasons(again.senders)
    assert end != "is left" or "is still being served; each request needs a room of its own" in why
    wire.settle()
    assert not told() and first.receivers[0].poll() == KVPoll.WaitingForInput
    wire.let_go()
    first.finish()
    first.assert_landed()
    wire.assert_books_closed()


def test_of_two_requests_of_a_room_that_wait_the_first_keeps_it(wire):
    first, other = wire.request(7).start_prefill(), wire.request(7).start_prefill()
    other.wait_senders(KVPoll.Failed)
    assert "a room of its own" in reasons(other.senders)[0]
    first.start_decode().ask().begin().send().finish()
    wire.assert_healthy()


def test_a_failure_of_the_first_is_not_undone_by_a_second_request_of_its_room(wire) -> None:
    """The engine takes the higher of two statuses, and a new request begins above a failure."""
    first, again = wire.request(7).bootstrap(), wire.request(7)
    wire.prefill[0].manager.fail_room(7, "the link is down")
    again.start_prefill()
    assert "the link is down" in first.fail(decode_too=False)[0]


def test_a_second_request_that_decode_computes_does_not_end_the_first(wire) -> None:
    first, again = wire.request(7).bootstrap().send(), wire.request(7)
    first.wait_receivers(KVPoll.Success)
    again.start_prefill().senders[0].drop()
    first.finish()
    first.assert_landed()
    wire.assert_books_closed()


# ---- a prefill is lost ----


def test_a_lost_prefill_is_named_to_each_of_its_requests(wire):
    lost, done = wire.request(1).bootstrap(), wire.request(2).bootstrap()
    done.send().wait_receivers(KVPoll.Success)
    manager = wire.decode[0].manager
    manager._handle_node_failure(wire.addr)
    lost.wait_receivers(KVPoll.Failed)
    assert "Losing connection with prefill instance" in reasons(lost.receivers)[0]
    # What had all come outlives it.
    assert done.receivers[0].poll() == KVPoll.Success
    done.receivers[0].clear()
    assert not manager.failure_records


def test_what_has_all_been_written_is_not_failed_for_being_late(wire):
    """The poll that finds it late finds it done, too."""
    request = wire.request(1).bootstrap().send()
    request.wait_receivers(KVPoll.Success)
    (sender,) = request.senders
    sender.state.due_at = 0.0
    sender.fail_if_overdue()
    assert not sender.has_failed()
