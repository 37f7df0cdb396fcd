"""A request may be lost at every point of its life, by every cause, on every backend: it alone ends, and is told once.

The points are walked, not listed: a cell is a place in the decode worker (a queue or list of its code) and what its
receiver says there. The worker and its peers: `every_state_bench.py`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import every_state_bench
import pytest
from every_state_bench import (
    BEYOND,
    CHUNK,
    ENDS,
    KINDS,
    STATES,
    Bench,
    all_are_aborted,
    arrived,
    asked,
    begun,
    has_failed,
    make_room,
    pending,
    prefill_lost,
    quarantined,
    queues_and_parts,
    retracted,
    sent_in_part,
    shaken,
    short_of_memory,
    time_runs_out,
    timed,
    without_metadata,
)
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common import prefill_peers
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req

from sglang_pd_radix.tools.cluster import free_ports

bench, kind = every_state_bench.bench, every_state_bench.kind
# The names of the patch file itself.
CODE = vars(prefill_peers)
ENGINE_MANAGER = common.__pd_radix__["originals"]["CommonKVManager"]


@pytest.mark.parametrize("cause", ENDS)
@pytest.mark.parametrize("state", STATES)
def test_a_request_ends_alone_and_is_told_once(bench: Bench, state: Callable, cause: Callable):
    """Whatever it is lost by and wherever it is then: no step raises, all it had comes back, no book mentions it."""
    req = state(bench)
    told = bench.told(req)
    assert told == int(state is quarantined)
    other = bench.arrive(bench.other_host) if cause is not all_are_aborted else None
    cause(bench, req)
    if state is without_metadata and cause is prefill_lost:
        # All has been said about it that will be.
        time_runs_out(bench, req)
    elif state is without_metadata and state not in ENDS[cause]:
        bench.bring_metadata(bench.entry(req))
    if state is pending and cause not in (prefill_lost, time_runs_out):
        bench.remember_prefill()
    make_room(bench)
    bench.drain()
    assert bench.told(req) == 1
    if state in ENDS[cause]:
        assert has_failed(bench, req)
        message = getattr(req.finished_reason, "message", None)
        assert message is None or message == "Aborted" or req.rid in message
    if cause is prefill_lost and state in BEYOND:
        assert not has_failed(bench, req)
    if other is not None:
        assert bench.finished[other.rid] == 1
    bench.assert_books_closed()


# ---- nothing of the code is left out ----


def places(bench: Bench, req: Req) -> set[str]:
    """The lists of the decode worker in which a request is."""
    found = set()
    for name, owner in {**queues_and_parts(bench), "scheduler": bench.scheduler}.items():
        for attribute, value in vars(owner).items():
            if isinstance(value, list) and any(req in (item, getattr(item, "req", None)) for item in value):
                found.add(f"{name}.{attribute}")
    if req in bench.world.running:
        found.add("scheduler.running_batch")
    return found


def test_the_states_are_all_that_the_code_has(monkeypatch: pytest.MonkeyPatch):
    """Every list in which the decode worker keeps requests, and every poll result, is one in which they are lost here.

    A list that is added to the queues fails this test until there is a state for it.
    """
    bench = Bench(monkeypatch, "nixl")
    lists = {
        f"{owner}.{name}"
        for owner, of in queues_and_parts(bench).items()
        for name, value in vars(of).items()
        if isinstance(value, list)
    }
    seen, polls = set(), set()
    for state in STATES:
        bench = Bench(monkeypatch, "nixl")
        req = state(bench)
        seen |= places(bench, req)
        if bench.entry(req) is not None:
            polls.add(bench.entry(req).poll())
    # Between two steps they are empty.
    lists -= {"transfer.arrived", *(name for name in lists if name.endswith("deltas._admitted"))}
    assert lists | {"scheduler.waiting_queue", "scheduler.running_batch"} == seen
    assert polls == {value for name, value in vars(KVPoll).items() if name[0].isupper()}


# ---- whatever a receiver says ----


@pytest.mark.parametrize("said", [value for name, value in vars(KVPoll).items() if name[0].isupper()])
@pytest.mark.parametrize("state", [pending, shaken, short_of_memory, asked, begun, sent_in_part, arrived])
def test_no_poll_result_ends_the_worker_or_is_waited_on_for_ever(bench: Bench, state: Callable, said: int):
    """Any result at any point: the request ends, or can be ended."""
    req, other = state(bench), bench.arrive(bench.other_host)
    receiver = bench.receiver(req)
    receiver.poll = lambda: said
    make_room(bench)
    for _ in range(40):
        bench.step()
    del receiver.poll
    if not bench.told(req):
        bench.abort(AbortReq(rid=req.rid))
    bench.drain()
    assert bench.told(req) == 1 and bench.finished[other.rid] == 1
    bench.assert_books_closed()


# ---- whatever raises ----


def methods(*types: type) -> list[str]:
    """All that these types define, but what Python itself calls."""
    names = {
        name for one in types for base in one.__mro__[:-1] for name, value in vars(base).items() if callable(value)
    }
    return sorted(name for name in names if not name.startswith("__"))


# Two assignments each, by which a request is ended; `init`, and the guard around all that it calls; and `_send_to` and
# what it sends over, without which prefill hears nothing at all: test_silent_peers.py has what it raises.
CANNOT_RAISE = {"abort", "fail", "init", "shake_hands", "_send_to", "_connect_to_bootstrap_server"}


class Broken(Exception):
    pass


@pytest.mark.parametrize("name", sorted(set(methods(*(kind[2] for kind in KINDS.values()))) - CANNOT_RAISE))
def test_a_receiver_that_raises_fails_its_request_alone(bench: Bench, name: str):
    """Each of its methods, at every point of its life."""
    if name not in methods(bench.receiver_type):
        pytest.skip("not of this backend")
    closes_books = name in ("_forget_room", "end", "clear", "failure_exception", "writers_done", "cancel")
    for state in [state for state in STATES if state not in BEYOND]:
        bench.begin_anew()
        req, other = state(bench), bench.arrive(bench.other_host)

        def broken(*args: Any, **more: Any) -> None:
            raise Broken(name)

        receiver = bench.receiver(req)
        receiver.__dict__[name] = broken
        bench.remember_prefill()
        make_room(bench)
        # Of the processor's time: a machine that is busy with other things gets longer.
        deadline = time.process_time() + 0.1
        while not bench.told(req) and time.process_time() < deadline:
            bench.halves[req.rid].goes_on = True
            bench.step()
        if not bench.told(req):
            bench.abort(AbortReq(rid=req.rid))
        for _ in range(3):
            bench.step()
        receiver.state.given_up_at -= 1e6
        for entry in bench.world.transfer.quarantine:
            entry.failed_at -= 1e6
        bench.drain()
        assert bench.told(req) == 1, state
        assert bench.finished[other.rid] == 1, state
        bench.assert_books_closed(managers=not closes_books)


# What admission, commit and resume use of the worker, each for one request.
PARTS = {
    "the policy": lambda w: (w.queue.policy, "enter"),
    "its match": lambda w: (w.queue.policy, "find"),
    "the plan": lambda w: (w.queue.accounts, "plan"),
    "a metadata buffer": lambda w: (w.meta_alloc, "alloc"),
    "the metadata": lambda w: (w.meta, "get_buf"),
}
# What gives a request its memory, which the plans of others count on.
MEMORY = {
    "the tree's lock": lambda w: (w.tree, "lock_prefix"),
    "pages": lambda w: (w.tree, "alloc_delta"),
    "a row": lambda w: (w.pool, "alloc"),
    "the table": lambda w: (w.pool, "write"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("state", [short_of_memory, shaken, arrived, retracted])
def test_an_error_of_the_worker_fails_the_request_in_which_it_came(bench: Bench, state: Callable, part: str):
    req = state(bench)
    owner, name = PARTS[part](bench.world)
    real, raised = getattr(owner, name), []

    def broken(*args: Any, **more: Any) -> Any:
        if raised:
            return real(*args, **more)
        raised.append(name)
        raise Broken(part)

    setattr(owner, name, broken)
    make_room(bench)
    for half in bench.halves.values():
        half.goes_on = True
    bench.step_until(lambda: bool(raised) or bench.told(req) > 0, "the error", decode=True)
    setattr(owner, name, real)
    other = bench.arrive(bench.other_host)
    bench.drain()
    assert bench.told(req) == 1 and bench.finished[other.rid] == 1
    if raised and bench.hog is None:
        assert part in req.finished_reason.message and req.rid in req.finished_reason.message
    bench.assert_books_closed()


@pytest.mark.parametrize("part", MEMORY)
@pytest.mark.parametrize("state", [shaken, retracted])
def test_an_error_of_the_memory_ends_the_worker(bench: Bench, state: Callable, part: str, monkeypatch):
    """Rather than that others are admitted by figures that are wrong, or TP ranks part."""
    state(bench)

    def broken(*args: Any, **more: Any) -> None:
        raise Broken(part)

    monkeypatch.setattr(*MEMORY[part](bench.world), broken)
    with pytest.raises(Broken):
        bench.step_until(lambda: False, "the error", decode=True)


def test_a_request_that_no_receiver_can_be_made_for_fails_alone(bench: Bench):
    other = bench.arrive(bench.other_host)
    req = bench.arrive(prefill=False, bootstrap_host=None)
    bench.drain()
    assert bench.told(req) == 1 and req.rid in req.finished_reason.message
    assert bench.finished[other.rid] == 1
    bench.assert_books_closed()


def test_those_that_are_lost_are_told_while_another_waits_for_memory(bench: Bench):
    """The engine looks at no queue while a retracted request cannot be resumed."""
    lost, queued = begun(bench), shaken(bench)
    waits = bench.arrive(bench.other_host)
    bench.step_until(lambda: bench.halves[waits.rid].begun, "prefill's turn")
    bench.halves[waits.rid].send_all()
    bench.step_until(lambda: waits in bench.world.running, "its start", decode=True)
    bench.world.retract(waits)
    bench.world.tree.evict_shortfall(bench.world.size)
    pages = bench.world.allocator.alloc(bench.world.allocator.available_size())
    prefill_lost(bench, lost)
    for _ in range(40):
        if bench.told(lost) and bench.told(queued):
            break
        # It goes on when what the lost one had is free.
        assert bench.world.queue.retracted_queue == [waits]
        bench.scheduler.process_decode_queue()
    assert bench.told(lost) == bench.told(queued) == 1
    bench.world.allocator.free(pages)
    bench.drain()
    assert bench.finished[waits.rid] == 1
    bench.assert_books_closed()


def test_a_prefill_that_does_not_answer_holds_nobody_up(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The engine's scheduler stands still for five seconds at a time."""
    monkeypatch.setitem(CODE, "UNANSWERED_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        req = bench.arrive(prefill=False, bootstrap_host="127.0.0.1", bootstrap_port=silent.getsockname()[1])
        assert 1 <= timed(bench, req) < 12
    assert "has not answered" in req.finished_reason.message
    bench.assert_books_closed()


def test_a_rank_that_the_client_names_waits_for_the_handshake_with_its_prefill(bench: Bench):
    """The engine takes a prefill that it has never met for one that is down, and asks it nothing either."""
    bench.forget_prefill()
    req = bench.arrive(disagg_prefill_dp_rank=0)
    bench.step()
    assert not bench.told(req)
    bench.remember_prefill()
    bench.drain()
    assert bench.finished[req.rid] == 1
    bench.assert_books_closed()


def test_a_prefill_that_does_not_fit_is_said_so(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """In the engine another page size ends the decode worker."""

    def other_page_size(manager: Any, addr: str) -> bool:
        raise RuntimeError("Page size mismatch")

    (port,) = free_ports(1)
    monkeypatch.setattr(ENGINE_MANAGER, "try_ensure_parallel_info", other_page_size)
    monkeypatch.setattr(prefill_peers.PrefillPeers, "ask_for_prefix", lambda peers, addr: 1)
    req = bench.arrive(prefill=False, bootstrap_host="127.0.0.1", bootstrap_port=port)
    assert timed(bench, req) < 12
    assert "Page size mismatch" in req.finished_reason.message
    bench.assert_books_closed()


def test_a_prefill_that_is_lost_in_the_middle_of_a_handshake_stays_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The engine's handshake went on, undid the failure and left a connection to ports that nobody listens at."""
    setup = bench.receiver_type._setup_bootstrap_infos

    def lose(receiver: Any) -> None:
        setup(receiver)
        bench.manager._handle_node_failure(bench.address)
        bench.manager.connection_pool[f"{bench.address}_0_0_0"] = []

    monkeypatch.setattr(bench.receiver_type, "_setup_bootstrap_infos", lose)
    bench.dead = bench.gone = True
    req = bench.arrive()
    bench.drain()
    assert bench.told(req) == 1 and has_failed(bench, req)
    assert f"{bench.address}_0_0_0" not in bench.manager.connection_pool
    bench.assert_books_closed()


# ---- how long it takes prefill to know that a decode worker is gone ----


def test_what_comes_late_opens_no_book_again(bench: Bench):
    """A thread that reads messages, or watches prefills, has looked at a room just before the scheduler closes it."""
    req = begun(bench)
    make_room(bench)
    bench.drain()
    room = req.bootstrap_room
    bench.manager.fail_room(room, "too late")
    bench.manager.update_status(room, KVPoll.Success)
    bench.assert_books_closed()


@pytest.mark.parametrize("flag", [True, False])
def test_prefill_gives_up_kv_that_decode_does_not_take(bench: Bench, flag: bool):
    """Of a decode worker without the flag the engine goes on to wait."""
    if not flag:
        bench.manager.prefills.capabilities.clear()
    req = sent_in_part(bench)
    sender = bench.halves[req.rid].sender
    sender.fail_if_overdue()
    assert not sender.has_failed() and sender.failure_reason() is None
    sender.state.due_at -= bench.prefill.transfer_timeout
    reason = sender.failure_reason()
    sender.fail_if_overdue()
    assert (reason is not None) == flag == sender.has_failed()
    # The client is told the reason before the books are closed.
    assert not flag or "not all of its KV has been sent" in sender.failure_reason()
    bench.drain()
    assert bench.told(req) == 1 and has_failed(bench, req) == flag
    if flag:
        assert sender.failure_reason() in req.finished_reason.message
        bench.assert_books_closed()


def test_a_prefill_that_stood_still_writes_nothing_any_more(bench: Bench):
    """It goes on when decode has long given the request up, and its pages away."""
    req = begun(bench)
    half = bench.halves[req.rid]
    half.sender.state.due_at = 0.0
    half.send(CHUNK)
    assert half.sender.has_failed() and half.sender.curr_idx == 0
    bench.drain()
    assert bench.told(req) == 1 and has_failed(bench, req)
    bench.assert_books_closed()


def test_a_request_that_never_comes_to_prefill_leaves_nothing_there(bench: Bench):
    """Decode has asked for its KV and then given it up; its client has left before the router's request was read."""
    req = bench.arrive(prefill=False)
    bench.step_until(lambda: req.bootstrap_room in bench.prefill.transfer_infos, "decode's request")
    bench.scheduler.abort_request(AbortReq(rid=req.rid))
    bench.drain()
    assert bench.told(req) == 1
    # A refusal is remembered, for a request that may still come.
    bench.step_until(lambda: req.bootstrap_room in bench.prefill.rooms.ended, "the word that it was given up")
    assert not any(bench.prefill.rooms_held().values()) and not any(bench.manager.rooms_held().values())
