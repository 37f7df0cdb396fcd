"""Sockets to peers, and what ZeroMQ says of these: real ones, in processes that are killed or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from mooncake_world import World as MooncakeWorld
from nixl_world import World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import delta_receiver, peer_sockets
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.common.peer_sockets import PeerSockets
from waiting import until
from wire_ends import close_sockets, give_up, watching

from sglang_pd_radix.tools.cluster import free_ports

# Of networks that are for documents only: no such host answers.
VANISHED = "tcp://192.0.2.1:{}"
# What a worker without this package does: it binds a socket, and knows of no heartbeats.
PEER = """
import ctypes, sys, time, zmq
pull = zmq.Context().socket(zmq.PULL)
port = int(sys.argv[1])
port = pull.bind(f"tcp://127.0.0.1:{port}") and port if port else pull.bind_to_random_port("tcp://127.0.0.1")
print(port, flush=True)
while True:
    if pull.recv() == b"hold":
        # With the lock of its interpreter.
        ctypes.PyDLL(None).sleep(3)
        print("held", flush=True)
"""


class Peer:
    """One such worker, in a process of its own."""

    def __init__(self, port: int = 0):
        self.process = subprocess.Popen([sys.executable, "-c", PEER, str(port)], stdout=subprocess.PIPE, text=True)
        self.port = int(self.said())
        self.at, self.endpoint = ("127.0.0.1", self.port), f"tcp://127.0.0.1:{self.port}"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.end()


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerSockets]:
    """Whose heartbeats are fast."""
    monkeypatch.setattr(peer_sockets, "HEARTBEAT_S", 0.2)
    made = PeerSockets(CommonKVReceiver._ctx, answer_s=0.8)
    yield made
    close_sockets(made)


def look_until(sockets: PeerSockets, condition: Callable[[], object], what: str) -> None:
    until(lambda: sockets.look(0.01) or condition(), what)


def meet(sockets: PeerSockets, peer: Peer) -> None:
    """Connect to it."""
    sockets.watch(*peer.at)
    look_until(sockets, lambda: peer.at in sockets.connected, "the connection")


def test_a_peer_that_is_killed_is_gone_at_once(sockets: PeerSockets, peer: Peer):
    meet(sockets, peer)
    assert not sockets.lost()
    began = time.monotonic()
    peer.end()
    look_until(sockets, lambda: sockets.lost(), "its loss")
    assert time.monotonic() - began < 1
    assert sockets.are_gone([peer.at]) and not sockets.are_gone([peer.at, ("127.0.0.1", 1)])
    assert not sockets._peers and peer.at in sockets.reached and peer.at not in sockets.connected


def test_a_peer_that_stands_still_is_lost_and_comes_back(sockets: PeerSockets, peer: Peer):
    """What it was sent is not, and nobody takes it for dead."""
    meet(sockets, peer)
    os.kill(peer.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    look_until(sockets, lambda: sockets.lost(), "its loss")
    # No sooner than its answer may take.
    assert time.monotonic() - began > 0.8
    assert not sockets.lost()[peer.at].gone and not sockets.are_gone([peer.at])
    os.kill(peer.process.pid, signal.SIGCONT)
    look_until(sockets, lambda: not sockets.lost(), "its return")
    assert peer.at in sockets.connected
    # And one that dies while it stands still.
    os.kill(peer.process.pid, signal.SIGSTOP)
    look_until(sockets, lambda: sockets.lost(), "its second loss")
    assert not sockets.are_gone([peer.at])
    peer.end()
    look_until(sockets, lambda: sockets.are_gone([peer.at]), "its end")


def test_one_that_has_spoken_again_is_about_to_come_back(sockets: PeerSockets, peer: Peer):
    meet(sockets, peer)
    os.kill(peer.process.pid, signal.SIGSTOP)
    look_until(sockets, lambda: sockets.lost(), "its loss")
    sockets.watch(*peer.at)
    sockets.look(0)
    assert not sockets.lost()
    look_until(sockets, lambda: sockets.lost(), "its loss if it has not")


def test_an_interpreter_that_is_held_up_loses_nobody(sockets: PeerSockets, peer: Peer):
    """Here, where nobody looks for several times as long as an answer may take, or there."""
    meet(sockets, peer)
    time.sleep(3)
    sockets.look(0)
    assert not sockets.lost() and peer.at in sockets.connected
    sockets.connect(peer.endpoint, waits=False).send_multipart([b"hold"])
    with watching(sockets):
        assert peer.said() == "held\n"
    assert not sockets.lost() and peer.at in sockets.connected


def test_who_listens_in_the_place_of_one_that_is_gone_is_another(sockets: PeerSockets, peer: Peer):
    meet(sockets, peer)
    peer.end()
    look_until(sockets, lambda: sockets.are_gone([peer.at]), "its end")
    other = Peer(peer.port)
    try:
        # Before it has answered.
        sockets.connect(other.endpoint, waits=False)
        assert not sockets.are_gone([other.at])
        look_until(sockets, lambda: other.at in sockets.connected, "the connection")
        assert not sockets.lost()
    finally:
        other.end()


def test_what_is_sent_for_the_engine_says_nothing_of_a_peer_and_is_closed_with_it(sockets: PeerSockets, peer: Peer):
    """Decode without this package is sent no heartbeats."""
    sockets.connect(peer.endpoint).send_multipart([b"word"])
    ((_, found),) = sockets._peers.items()
    assert found.socket.get(zmq.HEARTBEAT_IVL) <= 0
    look_until(sockets, lambda: found.was_there, "the connection")
    peer.end()
    look_until(sockets, lambda: not sockets._peers, "its end")
    assert found.socket.closed and not sockets.lost() and not sockets.reached


def test_who_has_no_peer_waits_between_two_looks(sockets: PeerSockets):
    """A poller of no sockets returns at once, and the thread took a core of the scheduler's time."""
    began = time.monotonic()
    for _ in range(3):
        sockets.look(0.1)
    assert time.monotonic() - began >= 0.3


def test_a_peer_that_vanished_is_forgotten(sockets: PeerSockets, monkeypatch: pytest.MonkeyPatch):
    """As a deleted pod, whose address never refuses. The next message makes a new socket."""
    sockets.connect(VANISHED.format(1), waits=False)
    ((_, found),) = sockets._peers.items()
    assert found.away_since is not None
    found.away_since -= 1.1
    sockets.look(0)
    assert found.at not in sockets.reached and not sockets.are_gone([found.at]) and [*sockets.lost()] == [found.at]
    found.away_since -= peer_sockets.FORGOTTEN_S
    with found.lock:
        # Not while somebody sends.
        sockets.look(0)
        assert sockets._peers and not found.socket.closed
    sockets.look(0)
    assert not sockets._peers and found.socket.closed
    later = time.monotonic() + peer_sockets.FORGOTTEN_S
    monkeypatch.setattr(peer_sockets.time, "monotonic", lambda: later)
    sockets.look(0)
    assert not sockets.lost()


def test_there_is_a_socket_for_a_new_prefill_after_a_thousand_that_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ has 1023 in a context; a deleted pod's address never refuses, so none of them was ever closed."""
    world = World(monkeypatch)
    sockets = world.decode[0].manager.peer_sockets
    for port in range(20000, 21023):
        sockets.connect(VANISHED.format(port))
    world.assert_healthy()


@contextlib.contextmanager
def puller() -> Iterator[tuple[zmq.Socket, str]]:
    with zmq.Context.instance().socket(zmq.PULL) as made:
        made.linger = 0
        made.rcvtimeo = 60_000
        port = made.bind_to_random_port("tcp://127.0.0.1")
        yield made, f"tcp://127.0.0.1:{port}"


def test_a_mooncake_prefill_keeps_no_thread_and_no_socket_of_decode_ranks_that_ended(
    monkeypatch: pytest.MonkeyPatch,
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
        look_until(manager.peer_sockets, lambda: not manager.peer_sockets._peers, "the end of all")
        world.request(1, 24, 8).bootstrap().send().finish()
    finally:
        world.close()


def test_a_worker_fails_what_it_has_of_a_peer_that_is_killed(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    """The request of a decode rank that says what waits in it and ends before that request has come; and again."""
    world = World(monkeypatch)
    manager = world.prefill[0].manager
    check = manager.decode_watch.check

    def say(room: int) -> None:
        world.push([b"NixlMsgGuard", b"%d" % room, b"127.0.0.1", b"%d" % peer.port, b"agent", b"queued"])
        until(lambda: room in manager.waiting, "the word")

    with watching(manager.peer_sockets, check):
        say(7)
        until(lambda: peer.at in manager.peer_sockets.connected, "the connection")
        here = world.request(7).start_prefill()
        assert here.senders[0].poll() == KVPoll.Bootstrapping
        peer.end()
        here.wait_senders(KVPoll.Failed)
        # What it had said before is read only now.
        say(8)
        late = world.request(8).start_prefill()
        late.wait_senders(KVPoll.Failed)
    for lost in (here, late):
        with pytest.raises(RuntimeError, match=f"decode 127.0.0.1:{peer.port} is gone: it refuses connections"):
            lost.senders[0].failure_exception()


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_cancellation_outlives_a_socket_that_is_closed_under_it(monkeypatch: pytest.MonkeyPatch, backend: str):
    """The watch of peers closes sockets to those that are gone; this one is not, and nor is the rank behind it."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "300")
    monkeypatch.setattr(delta_receiver, "TELL_AGAIN_S", 0.0)
    world: Any = {"nixl": World, "mooncake": MooncakeWorld}[backend](monkeypatch, prefill_tp=2)
    request = world.request(1, 24, 8).start_prefill().start_decode().ask()
    request.wait_senders(KVPoll.WaitingForInput)
    (receiver,) = request.receivers
    receiver.fenced = True
    first = receiver.bootstrap_infos[0]["rank_port"]
    sockets, asked = receiver.kv_mgr.peer_sockets, []
    get = sockets._get

    def lose(endpoint: str, *args: Any) -> Any:
        found = get(endpoint, *args)
        asked.append(endpoint)
        # Once to make sure of it, and once to send.
        if endpoint.endswith(f":{first}") and asked.count(endpoint) == 2:
            close_sockets(sockets)
        return found

    monkeypatch.setattr(sockets, "_get", lose)
    receiver.fail("decode gives it up")
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    assert [peer["rank_port"] for peer in receiver.state.untold] == [first]

    def quiet() -> bool:
        for rank in world.prefill:
            rank.manager.settle()
        for sender in request.senders:
            sender.poll()
        return receiver.writers_done()

    until(quiet, "both ranks have answered")
    assert all(sender.has_failed() for sender in request.senders)


def test_pages_of_a_prefill_whose_port_refuses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MooncakeWorld(monkeypatch)
    gone = world.request(2, 24, 4).bootstrap(fenced=True)
    give_up(gone)
    assert not gone.receivers[0].writers_done()
    (port,), manager = free_ports(1), world.decode[0].manager
    gone.receivers[0].bootstrap_infos = [{**gone.receivers[0].bootstrap_infos[0], "rank_port": port}]
    manager.connect_unwaiting("127.0.0.1", port)
    look_until(manager.peer_sockets, lambda: gone.receivers[0].writers_done(), "it is found out that nobody listens")
    world.close()
