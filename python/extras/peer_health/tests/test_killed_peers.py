"""Requests of a worker that is killed fail on the other one at once, wherever they are then; and no others."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from every_state_bench import (
    Bench,
    asked,
    begun,
    kind,
    make_room,
    sent_in_part,
    shaken,
    short_of_memory,
    timed,
)
from sglang.srt.disaggregation import announcements
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import peer_watch
from sglang.srt.disaggregation.common.peer_sockets import Loss, PeerSockets
from sglang.srt.managers.schedule_batch import Req
from waiting import until
from wire_ends import watching

from sglang_pd_radix.tools.cluster import free_ports

__all__ = ["kind"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[Bench]:
    """One whose peers are lost when the test says so."""
    made = Bench(monkeypatch, kind)
    are_gone, lost = PeerSockets.are_gone, PeerSockets.lost

    def all_lost(sockets: PeerSockets) -> dict[tuple[str, int], Loss]:
        return {peer.at: Loss(0.0, True) for peer in sockets._peers.values() if made.gone}

    monkeypatch.setattr(PeerSockets, "are_gone", lambda sockets, peers: made.gone or are_gone(sockets, peers))
    monkeypatch.setattr(PeerSockets, "lost", lambda sockets: all_lost(sockets) or lost(sockets))
    yield made
    if hasattr(made.net, "close"):
        made.net.close()


def test_a_prefill_that_refuses_connections_is_gone(bench: Bench):
    """One never met: the engine asks it for 15 s."""
    (port,) = free_ports(1)
    reqs = [bench.arrive(prefill=False, bootstrap_host="127.0.0.1", bootstrap_port=port) for _ in range(3)]
    assert timed(bench, *reqs) < 12
    assert "refuses connections" in reqs[0].finished_reason.message
    # The next one need not find out anew.
    assert timed(bench, bench.arrive(prefill=False, bootstrap_host="127.0.0.1", bootstrap_port=port)) < 12
    bench.assert_books_closed()


def test_the_requests_of_a_prefill_whose_processes_end_are_failed_at_once(bench: Bench):
    """Those it has been asked for, and those that wait for memory; the engine takes ten seconds and more."""
    asked_for, other = begun(bench), bench.arrive(bench.other_host)
    manager = bench.manager
    with socket.create_server(("127.0.0.1", 0)) as rank:
        # What it was asked at before, and what it listens at now.
        for key in [key for key in manager.connection_pool if key.startswith(bench.address + "_")]:
            peers = [{**peer, "rank_port": rank.getsockname()[1]} for peer in manager.connection_pool[key]]
            manager.connection_pool[key] = peers
            bench.receiver(asked_for).bootstrap_infos = peers
        # It was asked over this.
        manager.connect_unwaiting(*rank.getsockname())
    bench.dead = True
    with watching(manager.peer_sockets, lambda: peer_watch.fail_lost_prefills(manager)):
        assert timed(bench, asked_for) < 9
        assert "Losing connection with prefill instance" in asked_for.finished_reason.message
        assert not [key for key in manager.connection_pool if key.startswith(bench.address + "_")]
        assert not bench.told(other)
        bench.drain()
    assert bench.finished[other.rid] == 1
    bench.assert_books_closed()


def heard_of(bench: Bench, *reqs: Req) -> None:
    """Prefill has heard where these wait."""
    rooms = {req.bootstrap_room for req in reqs}
    bench.step_until(lambda: rooms <= bench.prefill.waiting.keys() | bench.prefill.transfer_infos.keys(), "word")


@pytest.mark.parametrize("state", [shaken, short_of_memory, asked, begun, sent_in_part])
def test_prefill_notices_that_a_decode_worker_is_gone(bench: Bench, state: Callable):
    """Whatever decode had asked for; over NIXL the engine waits for as long as the client, and so does the router."""
    req = state(bench)
    if state is shaken:
        bench.world.queue.announcements.announce(bench.world.queue.queue)
    heard_of(bench, req)
    half = bench.halves[req.rid]
    watch = bench.prefill.decode_watch
    # By hand: of all that prefill does, one look has to find it out.
    peers = bench.prefill.peer_sockets
    until(lambda: peers.look(0.01) or peers.reached, "the connection to it")
    watch.check()
    # On this side of the wire everything goes on; on the other nobody is left.
    bench.gone = True
    bench.receiver(req).poll = lambda: KVPoll.WaitingForInput
    half.step()
    bench.prefill.settle()
    assert not half.ended
    watch.check()
    until(lambda: half.step() or bench.prefill.settle() or half.ended, "the end of its request")
    assert "is gone" in half.sender.failure_reason()
    rooms = bench.prefill.rooms
    assert not rooms.live.keys() & {req.bootstrap_room} and not rooms.refused and not bench.prefill.waiting


def test_a_firewall_that_refuses_in_place_of_decode_fails_nobody(bench: Bench):
    """Over NIXL prefill has never had to connect to decode."""
    bench.gone = True
    req = short_of_memory(bench)
    heard_of(bench, req)
    for _ in range(3):
        bench.prefill.decode_watch.check()
    bench.gone = False
    make_room(bench)
    bench.drain()
    assert bench.finished[req.rid] == 1
    bench.assert_books_closed()


def test_prefill_does_not_give_up_who_waits_for_memory(bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch):
    """However long that takes: decode says again and again that they are there."""
    waiting = bench.prefill.waiting
    req = short_of_memory(bench)
    heard_of(bench, req)
    (before,) = waiting[req.bootstrap_room].values()
    sender = bench.halves[req.rid].sender
    sender.made_at -= 1e6
    if kind.startswith("mooncake"):
        # The engine's own clock.
        sender.init_time -= 1e6
    bench.step()
    assert not bench.halves[req.rid].ended
    monkeypatch.setattr(announcements, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6))
    bench.step()
    bench.step_until(lambda: max(waiting[req.bootstrap_room].values()) > before, "the second word")
    make_room(bench)
    bench.drain()
    assert bench.finished[req.rid] == 1
    bench.assert_books_closed()


@pytest.mark.parametrize("state", [short_of_memory, asked])
def test_what_decode_has_never_heard_of_ends_on_prefill_in_time(bench: Bench, kind: str, state: Callable):
    """The router's request never reached decode. Over NIXL the engine waits for as long as the client does.

    Prefill knows of a decode worker that would say so from what waits there, and from what it has asked for.
    """
    heard = state(bench)
    heard_of(bench, heard)
    assert state is short_of_memory or not bench.prefill.waiting
    lost = bench.arrive()
    half = bench.halves[lost.rid]
    bench.world.queue._forget([bench.entry(lost)])
    half.step()
    assert not half.ended
    half.sender.made_at = time.monotonic() - bench.prefill.bootstrap_timeout - 1
    if kind.startswith("mooncake"):
        half.sender.init_time -= bench.prefill.bootstrap_timeout + 1
    half.step()
    assert half.ended and "timed out" in half.sender.failure_reason()


def test_beside_decode_workers_without_the_flag_prefill_waits_for_what_they_may_hold(bench: Bench, kind: str):
    """Such a worker says nothing of what waits there; as long as it asks for something now and then, anything may."""
    if kind.startswith("mooncake"):
        pytest.skip("the engine itself has a time-out here")
    heard_of(bench, asked(bench))
    lost = bench.arrive()
    half = bench.halves[lost.rid]
    bench.world.queue._forget([bench.entry(lost)])
    half.sender.made_at -= 1e6
    # One of them asks for another room.
    info = dataclasses.replace(next(iter(next(iter(bench.prefill.transfer_infos.values())).values())))
    info.room, info.dummy = 1 << 40, None
    bench.prefill.inbox.take(info)
    half.step()
    assert not half.ended
    bench.prefill.waiting.silent_peer_at -= bench.prefill.bootstrap_timeout + 1
    half.step()
    assert half.ended and "timed out" in half.sender.failure_reason()
    bench.prefill.forget(info.room)


def test_without_the_flag_anywhere_prefill_waits_as_the_engine_does(bench: Bench, kind: str):
    if kind.startswith("mooncake"):
        pytest.skip("the engine itself has a time-out here")
    for addr, known in bench.manager.prefills.capabilities.items():
        bench.manager.prefills.capabilities[addr] = dataclasses.replace(known, others={})
    req = short_of_memory(bench)
    bench.halves[req.rid].sender.made_at -= 1e6
    bench.step()
    assert not bench.halves[req.rid].ended and not bench.prefill.waiting
