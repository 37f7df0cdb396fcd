"""What one thread does at the wrong moment, another says or hears all the same; over both backends."""

from __future__ import annotations

import asyncio
import gc
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import test_mooncake_wire
import test_nixl_wire
from sglang.srt.disaggregation import decode_handshakes
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks, capabilities
from sglang.srt.disaggregation.common.delta_receiver import DeltaReceiver
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, parse_capabilities
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until

WORLDS = {"nixl": test_nixl_wire.World, "mooncake": test_mooncake_wire.World}


def shaken_hands(world: Any) -> None:
    """Decode has asked prefill what it can do."""
    manager = world.decode[0].manager
    answer = asyncio.run(capabilities(1, 1, True, RegisteredRanks().timeouts()))
    manager.prefills.capabilities |= dict.fromkeys(manager.prefill_info_table, parse_capabilities(answer))


def refuse(peer: dict, frames: list[bytes]) -> None:
    """Instead of a message."""
    raise NotTaken("the way is cut")


def given_up(world: Any, why: str) -> tuple[Any, Any]:
    """A request that decode has asked for and given up, which it could not say; and its receiver."""
    request = world.request(1, 24, 8).start_prefill().start_decode()
    shaken_hands(world)
    request.ask()
    request.wait_senders(KVPoll.WaitingForInput)
    (receiver,) = request.receivers
    receiver.fenced, receiver._send_to = True, refuse
    receiver.fail(why)
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    return request, receiver


@pytest.mark.parametrize("backend", WORLDS)
def test_pages_are_kept_for_as_long_as_prefill_may_write(monkeypatch: pytest.MonkeyPatch, backend: str):
    """Decode gives up after 30 s and cannot say so: others had its pages at 60 s, and prefill wrote until 300 s."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30")
    world: Any = WORLDS[backend](monkeypatch)
    monkeypatch.delenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    request, receiver = given_up(world, "timed out")
    given_up_at = receiver.state.given_up_at
    assert request.senders[0].state.due_at < given_up_at + 300
    for ago, done in ((31, False), (299, False), (301, True)):
        receiver.state.given_up_at = given_up_at - ago
        assert receiver.writers_done() == done


@pytest.mark.parametrize("other", [Capabilities(version=1, waiting_timeout=30), Capabilities()], ids=["30 s", "404"])
@pytest.mark.parametrize("backend", WORLDS)
def test_pages_are_kept_for_as_long_where_another_prefill_has_its_address(
    monkeypatch: pytest.MonkeyPatch, backend: str, other: Capabilities
):
    """What is said there by then is not said of the one that was asked, which stood still and may go on."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30")
    world: Any = WORLDS[backend](monkeypatch)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "600")
    _, receiver = given_up(world, "its prefill is lost")
    world.decode[0].manager.prefills.capabilities[receiver.bootstrap_addr] = other
    given_up_at = receiver.state.given_up_at
    for ago, done in ((31, False), (599, False), (601, True)):
        receiver.state.given_up_at = given_up_at - ago
        assert receiver.writers_done() == done


def test_pages_are_kept_for_as_long_where_an_error_hides_whether_prefill_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30")
    world: Any = test_nixl_wire.World(monkeypatch)
    monkeypatch.delenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    shaken_hands(world)
    (receiver,) = world.request(1).start_decode().receivers
    monkeypatch.delattr(DeltaReceiver, "writers_done")
    errors: list[Exception] = []
    for ago, done in ((31, False), (299, False), (301, True)):
        entry: Any = SimpleNamespace(kv_receiver=receiver, lose=errors.append, failed_at=time.monotonic() - ago)
        assert DecodeRequest.writers_done(entry) == done
    assert len(errors) == 3


class Waits:
    """A request that waits on decode for prefill ``addr``; when that was told of it, by the clock of the test."""

    def __init__(self, clock: Any, manager: Any, room: int, addr: str = test_nixl_wire.ADDR):
        self.kv_receiver = NixlKVReceiver(manager, addr, room)
        self.kv_receiver.init(0)
        assert self.kv_receiver.poll() == KVPoll.WaitingForInput
        self.told: list[float] = []
        self.kv_receiver._send_to = lambda peer, frames: self.told.append(clock.now)

    def lose(self, error: Exception | str) -> None:
        raise AssertionError(error)


class Telling:
    """Decode's words to prefills, step by step of 0.25 s and 4 words; every second request waits for the second."""

    SECOND, STEP_S = "10.0.0.10:8998", 0.25
    # Words in a step.
    most = 4

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first_s: int, second_s: int):
        """first_s, second_s: the prefills' SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT."""
        monkeypatch.setattr(decode_handshakes, "ANNOUNCEMENTS", 4)
        self.manager = test_nixl_wire.World(monkeypatch).decode[0].manager
        monkeypatch.setattr(decode_handshakes, "time", self)
        table, known = self.manager.prefill_info_table, self.manager.prefills.capabilities
        table[self.SECOND] = table[test_nixl_wire.ADDR]
        for addr, seconds in ((test_nixl_wire.ADDR, first_s), (self.SECOND, second_s)):
            known[addr] = Capabilities(version=1, queued=True, bootstrap_timeout=seconds)
        self.now = self.began = time.monotonic()
        self.announcements: Any = decode_handshakes.Announcements(300 / 4)
        self.first = [self.arrive() for _ in range(60)]
        self.second = [self.arrive(self.SECOND) for _ in range(60)]
        self.waiting = [request for both in zip(self.first, self.second, strict=True) for request in both]
        for request in self.waiting:
            self.announcements.add(request)

    def monotonic(self) -> float:
        return self.now

    def arrive(self, addr: str = test_nixl_wire.ADDR) -> Any:
        return Waits(self, self.manager, len(self.manager.request_status) + 1, addr)

    def step(self, seconds: float) -> int:
        """Returns in how many steps prefills were told of anything."""
        telling = 0
        for _ in range(int(seconds / self.STEP_S)):
            before = self._words()
            self.announcements.announce(self.waiting)
            words = self._words() - before
            assert words <= self.most
            telling += words > 0
            self.now += self.STEP_S
        return telling

    def _words(self) -> int:
        return sum(len(request.told) for request in (*self.first, *self.second))

    def unheard_s(self, requests: list[Any]) -> float:
        """The longest for which a prefill has not heard of one of ``requests``."""
        each = [[self.began, *request.told, self.now] for request in requests]
        return max(later - before for told in each for before, later in pairwise(told))


def test_prefill_hears_of_what_waits_before_its_own_time_is_over(monkeypatch: pytest.MonkeyPatch):
    """It failed what waited for memory after its 30 s; decode says so every quarter of what it takes to be right.

    Words began at the head of the queue again before its end had had its turn, so what was far behind was never told.
    """
    telling = Telling(monkeypatch, 300, 80)
    telling.step(620)
    # As long as it takes to tell of all that are due, beside a quarter of the time.
    assert telling.unheard_s(telling.second) < 80 / 4 + 32 < 80
    assert telling.unheard_s(telling.first) < 300 / 4 + 32
    # And no more often than that.
    assert max(len(request.told) for request in telling.first) <= 1 + 620 / 75
    assert max(len(request.told) for request in telling.second) <= 1 + 620 / 20


def test_a_prefill_of_little_patience_is_at_nobody_elses_expense(monkeypatch: pytest.MonkeyPatch):
    """Its requests are more than can be told of in its time; once it has none, words are as rare as without it."""
    telling = Telling(monkeypatch, 300, 2)
    # All that wait, twice in its half second.
    telling.most = 120
    telling.step(320)
    assert telling.unheard_s(telling.first) < 300 / 4 + 10
    newcomer = telling.arrive()
    telling.first.append(newcomer)
    telling.waiting.append(newcomer)
    telling.announcements.add(newcomer)
    telling.step(telling.STEP_S)
    assert newcomer.told
    telling.waiting = [*telling.first]
    telling.step(2)
    assert telling.step(300) <= 4 * len(telling.first)
    assert telling.unheard_s(telling.first[:-1]) < 300 / 4 + 10
    assert [*telling.announcements.listeners] == [test_nixl_wire.ADDR]


def test_those_whose_hands_are_not_shaken_hold_up_no_words_of_others(monkeypatch: pytest.MonkeyPatch):
    telling = Telling(monkeypatch, 40, 300)
    # Of all that wait, twice in the ten seconds of the first.
    telling.most = 6
    silent = telling.first[1:]
    for request in silent:
        request.kv_receiver.bootstrap_infos = None
    telling.step(320)
    assert not any(request.told for request in silent)
    assert telling.unheard_s(telling.first[:1]) < 40 / 4 + 1
    assert telling.unheard_s(telling.second) < 300 / 4 + 40
    for request in silent:
        request.kv_receiver.bootstrap_infos = telling.first[0].kv_receiver.bootstrap_infos
    telling.step(20)
    assert all(request.told for request in silent)


@pytest.mark.parametrize("step_s", [0.001, 0.02, 2, 15])
def test_words_are_spread_over_steps_and_fall_behind_in_none(monkeypatch: pytest.MonkeyPatch, step_s: float):
    """256 requests of a prefill with four ranks took 13.5 ms of one step."""
    monkeypatch.setattr(decode_handshakes, "time", clock := SimpleNamespace(now=time.monotonic()))
    clock.monotonic = lambda: clock.now
    manager = test_nixl_wire.World(monkeypatch, prefill_tp=4).decode[0].manager
    manager.prefills.capabilities[test_nixl_wire.ADDR] = Capabilities(version=1, queued=True, bootstrap_timeout=300)
    waiting: Any = [Waits(clock, manager, room) for room in range(1, 257)]
    announcements: Any = decode_handshakes.Announcements(300 / 4)
    for request in waiting:
        announcements.add(request)
    began, sent, words, all_told = clock.now, 0, [], 0.0
    while clock.now < began + 150:
        announcements.announce(waiting)
        words.append(sum(len(request.told) for request in waiting) - sent)
        sent += words[-1]
        all_told = all_told or (all(request.told for request in waiting) and clock.now - began)
        # Nobody is told in between steps, and nothing is due for long.
        clock.now += step_s if not all_told else max(step_s, 0.1)
    # What is due in a long step beside what a short one takes, four words each.
    assert max(words) <= 16 + 4 * (1 + 2 * 256 * max(step_s, 0.1) / 75)
    assert 0 < all_told <= max(64 * step_s, 75 / 2 + step_s)
    for request in waiting:
        each = [began, *request.told, clock.now]
        assert max(later - before for before, later in pairwise(each)) < 2 * 75 < 300


def test_what_has_ended_is_not_kept_to_be_told_of_again(monkeypatch: pytest.MonkeyPatch):
    telling = Telling(monkeypatch, 300, 300)
    telling.step(40)
    assert all(request.told for request in telling.waiting)
    gone = [ref(request) for request in telling.waiting]
    telling.waiting, telling.first, telling.second = [], [], []
    gc.collect()
    assert not any(request() for request in gone)
    telling.step(150)
    assert not telling.announcements.listeners


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_prefill_rank_that_takes_no_word_is_told_soon_and_keeps_none_from_the_others(
    monkeypatch: pytest.MonkeyPatch, deaf: int
):
    """It stands still with its queue full, and when it goes on has soon read what others waited for."""
    monkeypatch.setattr(decode_handshakes, "time", clock := SimpleNamespace(now=time.monotonic()))
    clock.monotonic = lambda: clock.now
    manager = test_nixl_wire.World(monkeypatch, prefill_tp=2).decode[0].manager
    manager.prefills.capabilities[test_nixl_wire.ADDR] = Capabilities(version=1, queued=True, bootstrap_timeout=300)
    request = Waits(clock, manager, 1)
    ports = [peer["rank_port"] for peer in request.kv_receiver.bootstrap_infos]
    told: dict[int, list[float]] = {port: [] for port in ports}
    stands_still = True

    def send(peer: dict, frames: list[bytes]) -> None:
        if stands_still and peer["rank_port"] == ports[deaf]:
            raise NotTaken("its queue is full")
        told[peer["rank_port"]].append(clock.now)

    request.kv_receiver._send_to = send
    announcements: Any = decode_handshakes.Announcements(300 / 4)
    announcements.add(request)

    def step(seconds: float) -> float:
        for _ in range(int(4 * seconds)):
            announcements.announce([request])
            clock.now += 0.25
        return clock.now

    woke_at = step(80)
    assert len(told[ports[1 - deaf]]) == 2 and not told[ports[deaf]]
    stands_still = False
    step(3)
    assert len(told[ports[deaf]]) == 1 and told[ports[deaf]][0] < woke_at + 3
    step(60)
    assert len(told[ports[deaf]]) == 1, "once is enough"
    step(30)
    assert len(told[ports[deaf]]) == 2 and len(told[ports[1 - deaf]]) == 3
    assert not announcements.listeners[test_nixl_wire.ADDR].missed


@pytest.mark.parametrize(
    ("where", "name"), [(conn, "FastQueue"), (conn.MooncakeKVManager, "register_buffer_to_engine")]
)
def test_decode_may_register_while_a_prefill_over_mooncake_still_starts(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str
):
    """The engine's thread reads messages before the manager is complete, and decode registers once.

    name: of what the engine does after its thread has started, or before; what has come by then is read at once.
    """
    world = test_mooncake_wire.World(monkeypatch)
    decode = world.decode[0].manager
    # Its predecessor at this address is lost.
    decode._handle_node_failure(world.addr)
    go_on, receivers = getattr(where, name), []

    def register(*args: Any) -> Any:
        if not receivers:
            until(lambda: decode.try_ensure_parallel_info(world.addr), "prefill answers")
            receiver = MooncakeKVReceiver(decode, world.addr, 5)
            receivers.append(receiver)
            receiver.init(0)
            until(lambda: receiver.poll() == KVPoll.WaitingForInput, "hands are shaken")
            # Until the thread has read it, if there is one.
            time.sleep(0.3)
        return go_on(*args)

    def start(manager: Any) -> None:
        start_thread(manager)
        time.sleep(0.3)

    start_thread = conn.MooncakeKVManager.start_prefill_thread
    monkeypatch.setattr(conn.MooncakeKVManager, "start_prefill_thread", start)
    monkeypatch.setattr(where, name, register)
    world.prefill = world._ranks(DisaggregationMode.PREFILL, 1, 1, 1, 1)
    world.fill_prefill()
    (prefill,) = world.prefill
    assert receivers
    table = prefill.manager.decode_kv_args_table
    until(lambda: list(table) == [decode.get_session_id()], "the registration is read", lambda: list(table))
    world.request(6, 24, 8).bootstrap().send().finish()
