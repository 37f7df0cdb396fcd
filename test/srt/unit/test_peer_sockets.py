"""Sockets to peers: as many as a fleet needs, and none for those that are no more."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import peer_liveness, peer_sockets
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.common.peer_sockets import UNUSED_S, PeerSockets
from sglang.srt.disaggregation.common.peer_watch import SocketSweep
from test_mooncake_wire import World as MooncakeWorld
from test_nixl_wire import World
from waiting import until

# Of networks that are for documents only: no such host answers.
VANISHED = "tcp://192.0.2.1:{}"


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, int]]]:
    """Those that refuse; and no socket is left of the test."""
    refused: set[tuple[str, int]] = set()
    monkeypatch.setattr(peer_liveness, "refusing", lambda endpoints: refused & set(endpoints))
    before = set(CommonKVReceiver.socket_endpoints())
    yield refused
    for endpoint in set(CommonKVReceiver.socket_endpoints()) - before:
        CommonKVReceiver.close_socket(endpoint)


def sweep(sockets: SocketSweep) -> None:
    """It is time to."""
    sockets._swept_at -= 1e6
    sockets.sweep()


def test_there_is_a_socket_for_a_new_prefill_after_a_thousand_that_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ has 1023 in a context; a deleted pod's address never refuses, so none of them was ever closed."""
    world = World(monkeypatch)
    for port in range(20000, 21023):
        CommonKVReceiver._connect(VANISHED.format(port))
    world.assert_healthy()


def age(endpoints: list[str], seconds: float) -> None:
    for endpoint in endpoints:
        CommonKVReceiver._used_at[endpoint] -= seconds


def test_a_socket_that_nobody_uses_is_closed_and_one_of_a_prefill_in_use_is_not(
    monkeypatch: pytest.MonkeyPatch, nobody_answers: set[tuple[str, int]]
) -> None:
    world = World(monkeypatch)
    world.request(1).start_prefill().start_decode()
    manager = world.decode[0].manager
    in_use = f"tcp://127.0.0.1:{world.prefill[0].manager.rank_port}"
    vanished, recent, gone = (VANISHED.format(port) for port in (1, 2, 3))
    for endpoint in (vanished, recent, gone):
        CommonKVReceiver._connect(endpoint)
    age([in_use, vanished], UNUSED_S)
    age([recent], UNUSED_S / 2)
    nobody_answers.add(("192.0.2.1", 3))
    sockets = {at: CommonKVReceiver._socket_cache[at] for at in (in_use, vanished, recent, gone)}
    sweep(manager.sweep)
    assert [sockets[at].closed for at in (in_use, vanished, recent, gone)] == [False, True, False, True]
    # Once its prefill is lost there is nothing more to say to it. Who speaks to it again gets a new one.
    manager.forget_connections(world.request(2).start_decode().receivers[0].bootstrap_addr)
    age([in_use], UNUSED_S)
    sweep(manager.sweep)
    assert sockets[in_use].closed
    world.assert_healthy()


@contextmanager
def puller() -> Iterator[tuple[zmq.Socket, str]]:
    with zmq.Context.instance().socket(zmq.PULL) as made:
        made.linger = 0
        made.rcvtimeo = 60_000
        port = made.bind_to_random_port("tcp://127.0.0.1")
        yield made, f"tcp://127.0.0.1:{port}"


def test_what_waits_in_an_unused_socket_still_goes_through() -> None:
    """Its peer may come back, as one behind a way that was cut."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        made = PeerSockets(CommonKVReceiver._ctx)
        sent, lock = CommonKVReceiver._connect(endpoint)
        with lock:
            sent.send_multipart([b"one"])
        made.connect(endpoint).send_multipart([b"two"])
        age([endpoint], UNUSED_S)
        made._used_at[endpoint] -= UNUSED_S
        CommonKVReceiver.close_socket(endpoint, UNUSED_S)
        made.close_socket(endpoint, UNUSED_S)
        assert endpoint not in CommonKVReceiver.socket_endpoints() and not made.socket_endpoints()
    with zmq.Context.instance().socket(zmq.PULL) as pull:
        pull.linger = 0
        pull.bind(endpoint)
        pull.rcvtimeo = 60_000
        assert {pull.recv(), pull.recv()} == {b"one", b"two"}


def test_a_mooncake_prefill_keeps_no_thread_and_no_socket_of_decode_ranks_that_ended(
    monkeypatch: pytest.MonkeyPatch, nobody_answers: set[tuple[str, int]]
) -> None:
    """The engine has a context of its own for each, with two threads."""
    world = MooncakeWorld(monkeypatch)
    try:
        manager = world.prefill[0].manager
        threads = None
        for room in range(1, 21):
            with puller() as (pull, endpoint):
                port = int(endpoint.rpartition(":")[2])
                manager.sync_status_to_decode_endpoint("127.0.0.1", port, room, KVPoll.Success, 0)
                assert pull.recv_multipart() == [b"%d" % room, b"%d" % KVPoll.Success, b"0"]
                # Those of the test's own context are among them at each turn.
                until(lambda n=threads: n is None or len(os.listdir("/proc/self/task")) <= n, "no thread more")
                threads = threads or len(os.listdir("/proc/self/task"))
            nobody_answers.add(("127.0.0.1", port))
        sweep(manager.sweep)
        assert not manager.peer_sockets.socket_endpoints()
        world.request(1, 24, 8).bootstrap().send().finish()
    finally:
        world.close()


def test_messages_of_several_threads_to_one_peer_are_whole_and_in_order() -> None:
    made = PeerSockets(CommonKVReceiver._ctx)
    with puller() as (pull, endpoint):

        def say(name: bytes) -> None:
            for i in range(200):
                made.connect(endpoint).send_multipart([name, b"%d" % i])

        threads = [threading.Thread(target=say, args=(b"%d" % n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        heard: dict[bytes, list[int]] = {}
        for _ in range(800):
            name, i = pull.recv_multipart()
            heard.setdefault(name, []).append(int(i))
        for thread in threads:
            thread.join()
        made.close_socket(endpoint)
    assert len(heard) == 4 and all(said == [*range(200)] for said in heard.values())


def test_a_sweep_does_not_wait_for_who_waits_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill sends as the engine does, which waits where the queue to a peer is full."""
    made = PeerSockets(CommonKVReceiver._ctx)
    made.connect(VANISHED.format(9))
    _, lock = made._sockets[VANISHED.format(9)]
    with lock:
        made.close_socket(VANISHED.format(9))
    assert made.socket_endpoints()
    made.close_socket(VANISHED.format(9), UNUSED_S)
    assert made.socket_endpoints(), "it has been used"
    later = time.monotonic() + UNUSED_S + 60
    monkeypatch.setattr(peer_sockets.time, "monotonic", lambda: later)
    made.close_socket(VANISHED.format(9), UNUSED_S)
    assert not made.socket_endpoints()


@pytest.mark.parametrize("backend", [World, MooncakeWorld])
def test_a_prefill_that_is_gone_leaves_no_session_of_the_heartbeat(
    monkeypatch: pytest.MonkeyPatch, backend: type
) -> None:
    """The watch finds it before the heartbeat does, which asks it no more; its connection stayed in CLOSE_WAIT."""
    world = backend(monkeypatch)
    manager, addr = world.decode[0].manager, world.request(1, 24, 8).start_decode().receivers[0].bootstrap_addr
    closed: list[str] = []
    session = manager.session_pool[addr]
    monkeypatch.setattr(session, "close", lambda: closed.append(addr))
    manager.heartbeat_failures[addr] = 1
    manager._handle_node_failure(addr)
    assert closed == [addr] and not manager.session_pool and not manager.heartbeat_failures
    if backend is MooncakeWorld:
        world.close()


@pytest.mark.parametrize("backend", [World, MooncakeWorld])
def test_a_request_that_ends_after_its_prefill_opens_no_book_of_it_again(
    monkeypatch: pytest.MonkeyPatch, backend: type
) -> None:
    world = backend(monkeypatch)
    (receiver,) = world.request(1, 24, 8).start_decode().receivers
    manager = world.decode[0].manager
    manager._handle_node_failure(receiver.bootstrap_addr)
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    receiver.end()
    assert not manager.addr_to_rooms_tracker
    if backend is MooncakeWorld:
        world.close()
