"""A peer that does not answer, or does not read, holds nobody up: no scheduler's thread waits for one."""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_mooncake_wire as mooncake_wire
import test_nixl_wire as nixl_wire
from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import handshakes, peer_liveness, peer_names, peer_watch
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, PrefillServerInfo
from sglang.srt.disaggregation.common.handshakes import Connections, RankAnswers
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.peer_liveness import PeerLiveness, gone, nothing_listens, refusing
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, PrefillPeers
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.mooncake.wire import Peer, post
from waiting import until

from sglang_pd_radix.tools.cluster import free_ports

# For what would never end. Nothing is measured.
LONG_S = 20
WATCH_DECODES = peer_watch.DecodeWatch.run
IN_BACKGROUND = handshakes.in_background


@pytest.fixture(params=["nixl", "mooncake"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = (nixl_wire if request.param == "nixl" else mooncake_wire).World(monkeypatch)
    yield made
    if request.param == "mooncake":
        made.close()


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """Where connections neither come about nor are refused: as behind a cut wire."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held = [socket.socket() for _ in range(3)]
        for waiting in held:
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()
        for waiting in held:
            waiting.close()


@pytest.fixture
def deaf() -> Iterator[int]:
    """A port at which a worker stands still: connections come about, and nobody reads."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(10)
        yield listener.getsockname()[1]
        in_time(lambda: CommonKVReceiver.close_socket(f"tcp://127.0.0.1:{listener.getsockname()[1]}"))


def in_time(work: Callable[[], Any]) -> None:
    """Do ``work``, which may wait for nobody."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "it waits for a peer"
    if errors:
        raise errors[0]


# ---- whether a peer is gone ----


def test_all_peers_are_looked_at_together(silent: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive:
        here, there = alive.getsockname(), ("127.0.0.1", free_ports(1)[0])
        # At both addresses of the name, if it has two.
        named = ("localhost", there[1])
        wrong = [("no such host.", 1), ("127.0.0.1", 1 << 20), ("127.0.0.1", -1)]
        assert refusing([here, silent, there, named, *wrong]) == {there, named}
        assert gone([silent, here]) == set() and gone([there, here]) == {there}
    assert nothing_listens(*here) and not nothing_listens(*silent)


def test_a_look_takes_as_long_however_many_do_not_answer(silent: tuple[str, int], monkeypatch) -> None:
    """One silent prefill of many ranks does not keep the watch from the others."""
    waited: list[float] = []
    poll = peer_liveness.select.poll

    class Poll:
        def __init__(self) -> None:
            self.poller = poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, ms: float) -> list:
            waited.append(ms / 1000)
            return self.poller.poll(ms)

    monkeypatch.setattr(peer_liveness.select, "poll", Poll)
    others = [(f"127.0.0.{i}", silent[1]) for i in range(2, 40)]
    here = [(socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr(peer_liveness._names, "look_up", lambda hosts, wait_s: dict.fromkeys(hosts, here))
    assert refusing([silent, *others]) == set()
    assert sum(waited) <= 2 * peer_liveness.ANSWER_S


def test_a_link_local_address_is_looked_at_on_its_link(monkeypatch) -> None:
    """Without the scope the system knows no way to it, which says nothing of the peer."""
    tried: list[tuple] = []

    class Refused(socket.socket):
        def __init__(self, family: int, kind: int) -> None:
            assert family == socket.AF_INET6
            super().__init__(socket.AF_INET, kind)

        def connect_ex(self, at: tuple) -> int:
            tried.append(at)
            return errno.ECONNREFUSED if at[-1] else errno.EINVAL

    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 0, 0, 7))]
    monkeypatch.setattr(peer_names.socket, "getaddrinfo", lambda host, port, type, flags=0: found)
    monkeypatch.setattr(peer_liveness.socket, "socket", Refused)
    assert refusing([("fe80::1%eth0", 5)]) == {("fe80::1%eth0", 5)}
    assert tried == [("fe80::1", 5, 0, 7)]


class Dns:
    """What names stand for, until told otherwise: None while DNS does not answer, "" for what it does not know.

    takes: seconds for each answer.
    """

    def __init__(self, **names: str | None) -> None:
        self.names, self.changed, self.questions, self.takes = names, threading.Condition(), 0, 0.0
        self._really = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: None, type: int = 0, flags: int = 0) -> list[Any]:
        if host not in self.names or flags:
            return self._really(host, port, type=type, flags=flags)
        with self.changed:
            self.questions += 1
            assert self.changed.wait_for(lambda: self.names[host] is not None, LONG_S)
        time.sleep(self.takes)
        with self.changed:
            if not self.names[host]:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return self._really(self.names[host], port, type=type)

    def say(self, **names: str | None) -> None:
        with self.changed:
            self.names |= names
            self.changed.notify_all()


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    dns = Dns()
    monkeypatch.setattr(peer_liveness, "_names", peer_names.PeerNames())
    monkeypatch.setattr(peer_names.socket, "getaddrinfo", dns.getaddrinfo)
    return dns


def test_a_name_that_dns_does_not_answer_for_holds_up_no_look_at_others(dns: Dns) -> None:
    port = free_ports(1)[0]
    dns.say(slow=None)
    in_time(lambda: refusing([("slow", port)]))
    assert gone([("slow", port), ("127.0.0.1", port)]) == {("127.0.0.1", port)}
    assert dns.questions == 1  # and not one for each look
    dns.say(slow="127.0.0.1")
    until(lambda: gone([("slow", port)]) == {("slow", port)}, "the look with its address")


def test_a_worker_whose_name_went_with_it_is_gone(dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes takes the name of a pod that is not ready out of a headless service."""
    monkeypatch.setattr(peer_names, "FRESH_S", 0.0)
    dns.say(pod="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as alive:
        pod = ("pod", alive.getsockname()[1])
        assert gone([pod]) == set()
        dns.say(pod="")
        assert gone([pod]) == set()
    assert gone([pod]) == {pod}
    # It stands for another host now, where one listens, or DNS is being asked.
    with socket.create_server(("127.0.0.2", pod[1])):
        dns.say(pod="127.0.0.2")
        assert gone([pod]) == set()
    dns.say(pod=None)
    assert gone([pod]) == set()
    dns.say(pod="")


@pytest.mark.parametrize("then", ["127.0.0.1", ""], ids=["known", "gone from DNS too"])
def test_dns_that_answers_too_late_each_time_hides_no_worker_that_is_gone(dns: Dns, then: str) -> None:
    dns.takes = 1.5 * peer_liveness.ANSWER_S
    dns.say(worker="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as alive:
        worker = ("worker", alive.getsockname()[1])
        until(lambda: peer_liveness._names.look_up(["worker"], 1)["worker"], "its address")
    dns.say(worker=then)
    until(lambda: gone([worker]) == {worker}, "it refuses twice", timeout=5)
    until(lambda: gone([worker]) == set(), "DNS is asked again", timeout=5)
    until(lambda: gone([worker]) == {worker}, "and it is gone", timeout=5)


def test_a_name_is_asked_for_once_in_a_while(dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is looked up: one that nobody knows, and one whose worker refuses at each look."""
    monkeypatch.setattr(peer_names, "FRESH_S", 600.0)
    dns.say(pod="", worker="127.0.0.1")
    names = peer_liveness._names
    for _ in range(5):
        found = names.look_up(["pod", "worker"], LONG_S)
        names.doubt(["worker"])
    assert dns.questions == 2 and not found["pod"] and found["worker"]
    monkeypatch.setattr(peer_names, "FRESH_S", 0.0)
    names.look_up(["pod", "worker"], LONG_S)
    assert dns.questions == 4


def test_a_look_waits_for_all_names_and_no_longer(dns: Dns) -> None:
    dns.say(quick="127.0.0.1", slow=None)
    late = threading.Timer(0.2, lambda: dns.say(slow="127.0.0.2"))
    late.start()
    began = time.monotonic()
    found = peer_liveness._names.look_up(["quick", "slow"], 6.0)
    assert time.monotonic() - began < 4.0
    late.join()
    assert [[at[0] for _, at in found[host]] for host in ("quick", "slow")] == [["127.0.0.1"], ["127.0.0.2"]]


def test_names_that_requests_bring_are_not_remembered_for_good(dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_names, "MOST_NAMES", 4)
    dns.say(**{f"pod{i}": "" for i in range(40)})
    for i in range(40):
        assert refusing([(f"pod{i}", 1)]) == set()
    assert len(peer_liveness._names._names) <= 6


def test_a_scheduler_goes_on_where_the_system_has_no_thread_left(monkeypatch, no_threads) -> None:
    """As when requests name many prefills that do not answer, each of which is asked by a thread. Later it is asked."""
    asked: list[str] = []
    monkeypatch.setattr(PrefillPeers, "ask_for_prefix", lambda peers, addr: asked.append(addr))
    peers = PrefillPeers(lambda: None, lambda: False, lambda: False, lambda addr: True)
    liveness, answers, connections = PeerLiveness(), RankAnswers(), Connections()
    there = "127.0.0.1", free_ports(1)[0]

    def ask() -> tuple[dict[str, int], bool]:
        peers.query("127.0.0.1:1")
        told = answers.query("127.0.0.1:1", [5], lambda addr, rooms: {str(room): 3 for room in rooms})
        return told, liveness.are_gone([there], 0.0)

    with no_threads():
        assert ask() == ({}, False) and not asked
        attempt = connections.start("127.0.0.1:1", 0, lambda: None)
        # Those that wait for it fail, and no others.
        assert attempt.over and attempt.reason == "can't start new thread"
    known: dict[str, int] = {}
    until(lambda: known.update(ask()[0]) or (known and ask()[1] and asked), "all have been asked")
    assert known == {"5": 3}


def test_a_scheduler_without_a_thread_does_not_fill_its_log(monkeypatch, caplog, no_threads) -> None:
    """It asks again in each step, thousands of times a second."""
    monkeypatch.setattr(peer_calls, "_said_at", -math.inf)
    liveness, answers = PeerLiveness(), RankAnswers()
    with no_threads():
        for _ in range(100):
            answers.query("127.0.0.1:1", [5], lambda addr, rooms: {})
            liveness.are_gone([("127.0.0.1", 1)], 0.0)
    assert [record.getMessage() for record in caplog.records] == ["Peers cannot be asked now: can't start new thread"]


def test_an_answer_is_waited_for_by_a_thread_alone_and_asked_once_for_all(monkeypatch) -> None:
    going_on, looks = threading.Event(), []

    def look(endpoints: Iterable) -> set:
        if not {("a", 1), ("b", 1), ("c", 1)} & set(endpoints):
            # Workers of other tests look after their peers as well.
            return set()
        looks.append(sorted(endpoints))
        assert going_on.wait(LONG_S)
        return {("b", 1), ("c", 1)} & set(endpoints)

    monkeypatch.setattr(peer_liveness, "refusing", look)
    monkeypatch.setattr(peer_liveness, "AGAIN_S", 0)
    liveness = PeerLiveness()
    for _ in range(100):
        assert not liveness.are_gone([("a", 1), ("b", 1)], 0.0) and not liveness.are_gone([("b", 1)], 0.0)
    until(lambda: bool(looks), "the first look")
    assert len(looks) == 1
    going_on.set()
    until(lambda: liveness.are_gone([("b", 1)], 0.0), "the answer")
    assert not liveness.are_gone([("a", 1), ("b", 1)], 0.0)
    # One that has been found out before does not count: who listens there now may be another.
    later = peer_liveness.time.monotonic()
    assert not liveness.are_gone([("b", 1)], later)
    until(lambda: liveness.are_gone([("b", 1)], later), "a new answer")
    # A look that raises is not the last one.
    monkeypatch.setattr(peer_liveness, "refusing", lambda endpoints: 1 // 0)
    assert not liveness.are_gone([("c", 1)], 0.0)
    until(lambda: ("c", 1) in liveness._known, "an answer of a sort")
    monkeypatch.setattr(peer_liveness, "refusing", look)
    until(lambda: liveness.are_gone([("c", 1)], later), "the next answer")


def test_what_is_known_of_peers_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(peer_liveness, "refusing", lambda endpoints: set(endpoints))
    for name in ("AGAIN_S", "FORGOTTEN_S"):
        monkeypatch.setattr(peer_liveness, name, 0)
    liveness = PeerLiveness()
    for port in range(1, 20):
        until(lambda port=port: liveness.are_gone([("a", port)], 0.0), "an answer")
    assert len(liveness._known) == 1


def test_quarantined_requests_of_a_silent_prefill_hold_nobody_up(world: Any, monkeypatch) -> None:
    """Each connected to it from the scheduler, every two seconds: with a hundred of them five seconds a step."""
    on_scheduler, going_on, is_gone = [], threading.Event(), []
    scheduler = threading.get_ident()

    def look(endpoints: Iterable) -> set:
        if threading.get_ident() == scheduler:
            on_scheduler.append(endpoints)
        assert going_on.wait(LONG_S)
        return set(endpoints) if is_gone else set()

    monkeypatch.setattr(peer_liveness, "refusing", look)
    monkeypatch.setattr(peer_liveness, "KEPT_S", 0)
    receivers = [world.request(1000 + i, 24, 8).bootstrap().receivers[0] for i in range(8)]
    manager = world.decode[0].manager
    for receiver in receivers:
        receiver.fenced, receiver._send_to = True, lambda peer, frames: None
    manager._handle_node_failure(receivers[0].bootstrap_addr)
    for receiver in receivers:
        assert receiver.poll() == KVPoll.Failed
        receiver.cancel()
    for _ in range(20):
        in_time(lambda: [receiver.writers_done() for receiver in receivers])
        assert not any(receiver.writers_done() for receiver in receivers)
    assert not on_scheduler
    is_gone.append(True)
    going_on.set()
    until(lambda: all(receiver.writers_done() for receiver in receivers), "the end of the quarantine")


# ---- messages that are not taken ----


def fill(receiver: Any) -> None:
    """Send words to its prefill until none is taken."""
    for _ in range(200_000):
        for peer in receiver.bootstrap_infos:
            receiver._send_to(peer, receiver._notice(b"word" * 1000))
    raise AssertionError("everything is taken")


def test_no_message_to_a_prefill_that_reads_nothing_is_waited_for(world: Any, deaf: int) -> None:
    """ZeroMQ waited when its queue was full, for good, and so did who wanted the socket's lock."""
    manager = world.decode[0].manager
    first, second = (world.request(room, 24, 8).start_prefill().start_decode().receivers[0] for room in (1, 2))
    manager.prefills.capabilities[first.bootstrap_addr] = Capabilities(version=1, queued=True)
    for receiver in (first, second):
        receiver.fenced = True
        receiver.bootstrap_infos = [{**info, "rank_port": deaf} for info in receiver.bootstrap_infos]
    with pytest.raises(NotTaken, match=f"tcp://127.0.0.1:{deaf} takes no messages"):
        in_time(lambda: fill(first))
    # Its word is said again by the queue.
    in_time(first.announce)
    with pytest.raises(NotTaken):
        in_time(lambda: first.send_metadata(np.arange(4, dtype=np.int32), 0, None, decode_prefix_len=8))
    first.fail("not taken")
    in_time(first.cancel)
    # Nobody has been asked to write for it.
    assert first.writers_done()
    # The engine's own message, to a prefill without the package.
    with pytest.raises(NotTaken):
        in_time(lambda: second.send_metadata(np.arange(4, dtype=np.int32), 0, None))
    # From any thread, as prefill's are.
    with pytest.raises(NotTaken):
        in_time(lambda: post(Peer("127.0.0.1", deaf), [b"word"]))
    in_time(lambda: CommonKVReceiver.close_socket(f"tcp://127.0.0.1:{deaf}"))


def test_a_request_that_one_prefill_rank_does_not_take_is_ended_by_all(monkeypatch, deaf: int) -> None:
    """Over NIXL the rank that was asked answered, and the other, which was not, never did: 300 s of quarantine."""
    world = nixl_wire.World(monkeypatch, prefill_tp=2)
    request = world.request(1).start_prefill().start_decode()
    (receiver,) = request.receivers
    receiver.fenced = True
    asked, unasked = receiver.bootstrap_infos
    receiver.bootstrap_infos = [asked, {**unasked, "rank_port": deaf}]
    with pytest.raises(NotTaken):
        in_time(lambda: fill(receiver))
    with pytest.raises(NotTaken):
        request.ask()
    assert receiver.state.asked
    receiver.fail("not taken")
    in_time(receiver.cancel)
    assert receiver.state.untold == receiver.bootstrap_infos[1:] and not receiver.writers_done()
    # It goes on, and takes messages.
    receiver.bootstrap_infos[1]["rank_port"] = unasked["rank_port"]
    receiver.state.told_at -= 1e6
    assert not receiver.writers_done()
    request.wait_senders(KVPoll.Failed)
    for rank in world.prefill:
        rank.manager.settle()
        assert not rank.manager.cancels
    until(receiver.writers_done, "both ranks have answered")
    assert not receiver.state.untold


def test_a_rank_whose_request_never_came_is_answered_all_the_same(world: Any, monkeypatch) -> None:
    request = world.request(1, 24, 8).start_prefill().start_decode()
    (receiver,) = request.receivers
    receiver.fenced = True
    with monkeypatch.context() as cut:
        # Lost with the connection.
        cut.setattr(receiver, "_send_to", lambda peer, frames: None)
        request.ask()
    assert receiver.state.asked
    receiver.fail("lost")
    receiver.cancel()
    request.wait_senders(KVPoll.Failed)
    until(receiver.writers_done, "prefill's answer")


# ---- handshakes ----


class Gate:
    """The bootstrap server of a world's prefill, which answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, receiver_type: type) -> None:
        self.open, self.asked = threading.Event(), 0
        self.answer: Callable[[dict | None], Any] = lambda answer: answer
        ask = receiver_type._get_bootstrap_info_from_server

        def gated(receiver: Any, *rank: int) -> dict | None:
            self.asked += 1
            assert self.open.wait(LONG_S)
            return self.answer(ask(receiver, *rank))

        monkeypatch.setattr(receiver_type, "_get_bootstrap_info_from_server", gated)
        monkeypatch.setattr(handshakes, "in_background", IN_BACKGROUND)


def begin(world: Any, room: int) -> Any:
    """A request whose handshake has begun."""
    module = nixl_wire if isinstance(world, nixl_wire.World) else mooncake_wire
    receiver_type = module.NixlKVReceiver if module is nixl_wire else module.MooncakeKVReceiver
    receiver = receiver_type(world.decode[0].manager, getattr(world, "addr", nixl_wire.ADDR), room)
    in_time(lambda: receiver.init(0))
    return receiver


def gate_of(world: Any, monkeypatch: pytest.MonkeyPatch) -> Gate:
    nixl = isinstance(world, nixl_wire.World)
    return Gate(monkeypatch, nixl_wire.NixlKVReceiver if nixl else mooncake_wire.MooncakeKVReceiver)


def test_a_handshake_is_made_without_standing_still_and_once_for_all(world: Any, monkeypatch) -> None:
    """The engine asks the bootstrap server on the scheduler's thread, for five seconds if it does not answer."""
    gate = gate_of(world, monkeypatch)
    receivers = [begin(world, room) for room in (1, 2, 3)]
    manager, registered = world.decode[0].manager, []
    for receiver in receivers:
        register = receiver._register_kv_args
        receiver._register_kv_args = lambda register=register: (registered.append(True), register())
    assert [receiver.poll() for receiver in receivers] == [KVPoll.Bootstrapping] * 3
    # Given up meanwhile: it stays so, and is nobody's concern.
    receivers[0].abort()
    assert receivers[0].poll() == KVPoll.Failed
    until(lambda: gate.asked == 1, "the question")
    gate.open.set()
    until(lambda: receivers[1].poll() == KVPoll.WaitingForInput, "the handshake")
    assert receivers[2].poll() == KVPoll.WaitingForInput and receivers[0].poll() == KVPoll.Failed
    assert gate.asked == 1 and registered == [True] and receivers[0].bootstrap_infos is None
    # One that comes later finds everything.
    later = begin(world, 4)
    assert later.poll() == KVPoll.WaitingForInput and gate.asked == 1
    assert not manager.connections._attempts


def test_what_the_bootstrap_server_does_not_say_fails_those_that_waited(world: Any, monkeypatch) -> None:
    gate = gate_of(world, monkeypatch)
    gate.answer = lambda answer: None
    receivers = [begin(world, room) for room in (1, 2)]
    gate.open.set()
    for receiver in receivers:
        until(lambda receiver=receiver: receiver.poll() == KVPoll.Failed, "its failure")
        with pytest.raises(Exception, match=r"handshake with prefill .* does not say where its ranks listen"):
            receiver.failure_exception()
    # The next one asks anew.
    gate.answer = lambda answer: answer
    later = begin(world, 3)
    until(lambda: later.poll() == KVPoll.WaitingForInput, "the handshake")


@pytest.mark.parametrize(
    "wrong", [{"rank_port": "5"}, {"rank_port": True}, {"rank_port": 65536}, {"rank_ip": ""}, {"rank_ip": None}, 7]
)
def test_an_answer_that_names_no_place_fails_those_that_waited(world: Any, monkeypatch, wrong: Any) -> None:
    """Who watches prefills would stumble over it at every look, and find out of none that it is gone."""
    gate = gate_of(world, monkeypatch)
    gate.answer = lambda answer: {**answer, **wrong} if isinstance(wrong, dict) else wrong
    receiver = begin(world, 1)
    gate.open.set()
    until(lambda: receiver.poll() == KVPoll.Failed, "its failure")
    with pytest.raises(Exception, match=f"prefill {receiver.bootstrap_addr} does not say where a rank listens: "):
        receiver.failure_exception()
    assert not world.decode[0].manager.connection_pool
    gate.answer = lambda answer: answer
    later = begin(world, 2)
    until(lambda: later.poll() == KVPoll.WaitingForInput, "the handshake")


def test_one_prefill_that_cannot_be_looked_at_hides_no_other(monkeypatch, caplog) -> None:
    """Nor does one whose loss cannot be told."""
    at = {"odd:1": "odd", "sad:1": "gone", "lost:1": "gone"}

    def look(endpoints: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        if ("odd", 1) in (asked := set(endpoints)):
            raise TypeError("what is this")
        return asked & {("gone", 1)}

    told: list[str] = []

    def on_gone(addr: str) -> None:
        told.append(addr)
        if addr == "sad:1":
            raise KeyError(addr)

    monkeypatch.setattr(peer_liveness, "gone", look)
    sweep: Any = SimpleNamespace(sweep=lambda: None)
    watch = peer_watch.PrefillWatch(
        lambda: {addr: {(host, 1)} for addr, host in at.items()}, lambda addr: True, on_gone, sweep
    )
    watch._check()
    assert told == ["sad:1", "lost:1"]
    assert "Could not look after prefill odd:1" in caplog.text and "Could not look after prefill sad:1" in caplog.text


@pytest.mark.parametrize("size", ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size"])
def test_a_prefill_of_no_ranks_cannot_be_used(world: Any, size: str) -> None:
    """The scheduler would divide by it."""
    manager = world.decode[0].manager
    sizes: Any = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
    info = PrefillServerInfo(**{**sizes, size: 0}, page_size=None, kv_cache_dtype=None, follow_bootstrap_room=True)
    with pytest.raises(ValueError, match=f"it says that its {size} is 0"):
        manager._resolve_rank_mapping(info)


def test_a_prefill_that_is_lost_while_it_is_asked_leaves_no_connection(world: Any, monkeypatch) -> None:
    gate = gate_of(world, monkeypatch)
    receiver = begin(world, 1)
    manager = world.decode[0].manager
    until(lambda: gate.asked == 1, "the question")
    info = manager.prefill_info_table[receiver.bootstrap_addr]
    manager._handle_node_failure(receiver.bootstrap_addr)
    assert receiver.poll() == KVPoll.Failed
    gate.open.set()
    until(lambda: manager.connections.get(receiver.bootstrap_addr, 0).over, "the end of the question")
    assert not manager.connection_pool and receiver.bootstrap_infos is None
    manager.prefill_info_table[receiver.bootstrap_addr] = info
    later = begin(world, 2)
    until(lambda: later.poll() == KVPoll.WaitingForInput, "a handshake of its own")
    assert gate.asked == 2


# ---- books that two threads use ----


def test_a_prefill_is_lost_while_the_scheduler_opens_and_closes_rooms(world: Any, monkeypatch) -> None:
    """The engine iterates over the set that the scheduler has in hand: an error, and the rest waited for 300 s."""
    receivers = [world.request(room, 24, 8).start_decode().receivers[0] for room in (1, 2, 3)]
    manager, addr = world.decode[0].manager, receivers[0].bootstrap_addr
    in_hand, update = manager.addr_to_rooms_tracker[addr], manager.update_status

    def interleaved(room: int, status: KVPoll) -> None:
        in_hand.add(room + 1000)
        update(room, status)

    monkeypatch.setattr(manager, "update_status", interleaved)
    manager._handle_node_failure(addr)
    assert [receiver.poll() for receiver in receivers] == [KVPoll.Failed] * 3
    with pytest.raises(Exception, match="Losing connection with prefill"):
        receivers[0].failure_exception()


# ---- decode ranks that end early ----


def test_a_decode_rank_is_looked_at_before_it_can_end(monkeypatch) -> None:
    """Of one that ended before the first look it was never known that it had been there, and its requests waited."""
    refused: set = set()
    monkeypatch.setattr(peer_liveness, "refusing", lambda endpoints: refused & set(endpoints))
    world = nixl_wire.World(monkeypatch)
    manager = world.prefill[0].manager
    threading.Thread(target=WATCH_DECODES, args=(manager.decode_watch,), daemon=True).start()
    # It says what waits in it, and its request is not here yet.
    world.push([b"NixlMsgGuard", b"7", b"127.0.0.1", b"5555", b"agent", b"queued"])
    until(lambda: ("127.0.0.1", 5555) in manager.decode_watch.reachable, "the look at it")
    refused.add(("127.0.0.1", 5555))
    lost = world.request(7).start_prefill()
    lost.wait_senders(KVPoll.Failed)
    with pytest.raises(RuntimeError, match="decode 127.0.0.1:5555 is gone"):
        lost.senders[0].failure_exception()


def test_a_decode_rank_that_is_gone_is_counted_once(monkeypatch, caplog) -> None:
    """However many of its requests come after that, which fail all the same; and once more where it has come back."""
    refused: set[tuple[str, int]] = set()
    monkeypatch.setattr(peer_liveness, "refusing", lambda endpoints: refused & set(endpoints))
    books: Any = SimpleNamespace(rooms=Rooms(), transfer_infos={})
    gone_ones: list[int] = []
    watch = peer_watch.DecodeWatch(
        books.rooms,
        lambda room: (),
        SimpleNamespace(sweep=lambda: None),  # type: ignore[arg-type]
        peer_watch.Unclaimed(books),
        lambda: gone_ones.append(1),
    )

    class Sender:
        bootstrap_room = 0

        def has_failed(self) -> bool:
            return False

        def poll(self) -> int:
            return 0

    def come(rooms: Iterable[int]) -> list[bool]:
        failed = []
        for room in rooms:
            books.rooms.note_waiting(room, "10.0.0.7", 5000)
            sender: Any = Sender()
            sender.bootstrap_room = room
            books.rooms.begin(room, sender)
            watch._check()
            failed.append(room in books.rooms.refused or room not in books.rooms.live)
        return failed

    assert come([0]) == [False]
    refused.add(("10.0.0.7", 5000))
    assert come(range(1, 5)) == [True] * 4
    assert len(gone_ones) == 1 and caplog.text.count("is gone, and with it") == 1
    refused.clear()
    assert come([5]) == [False]
    refused.add(("10.0.0.7", 5000))
    assert come([6, 7]) == [True] * 2
    assert len(gone_ones) == 2 and caplog.text.count("is gone, and with it") == 2


def test_a_look_at_many_rooms_leaves_the_lock_to_the_scheduler() -> None:
    books: Any = SimpleNamespace(rooms=Rooms(), transfer_infos={})
    lock, held, most = books.rooms.lock, 0, 0

    class Counted:
        def __enter__(self) -> None:
            nonlocal held
            held = 0
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            nonlocal most
            most = max(most, held)
            lock.release()

    def asked(room: int) -> list[tuple[str, int]]:
        nonlocal held
        held += 1
        return [("10.0.0.7", 5000 + room % 3)]

    count = 5 * peer_watch.AT_ONCE
    for room in range(count):
        books.rooms.live[room] = SimpleNamespace(has_failed=lambda: False)
        books.transfer_infos[count + room] = {}
    books.rooms.lock = Counted()
    watch = peer_watch.DecodeWatch(books.rooms, asked, SimpleNamespace(), peer_watch.Unclaimed(books))  # type: ignore[arg-type]
    found = watch._rooms_by_rank()
    assert sorted(room for rooms in found.values() for room in rooms) == [*range(2 * count)] and len(found) == 3
    assert most == peer_watch.AT_ONCE


def test_looks_that_take_long_come_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([1.0, 1.001, 1.101, 1.101])
    monkeypatch.setattr(peer_watch.time, "thread_time", lambda: next(spent))
    pause = peer_watch.Pause()
    assert [pause.seconds() for _ in range(3)] == [peer_watch.LOOK_S, pytest.approx(2.0), peer_watch.LOOK_S]


def test_who_speaks_for_the_first_time_is_noted_once() -> None:
    rooms = Rooms()
    rooms.note_waiting(1, "a", 1)
    rooms.note_peer("a", 1)
    rooms.note_peer("b", 1)
    rooms.wait_for_newcomers(LONG_S)
    assert rooms.take_newcomers() == {("a", 1), ("b", 1)} and rooms.hears_of_waiting
    rooms.note_peer("a", 1)
    assert not rooms._spoken.is_set() and rooms.take_newcomers() == set()
