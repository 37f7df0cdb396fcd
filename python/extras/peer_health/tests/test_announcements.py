"""Prefills know of the requests that wait on decode; over both backends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import ref

import mooncake_world
import nixl_world
import pytest
from decode_world import World
from engine_classes import engine_class
from sglang.srt.disaggregation import announcements as module
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import waiting_rooms
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, parse_capabilities
from sglang.srt.disaggregation.common.rooms import Rooms
from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer
from sglang.srt.disaggregation.nixl.conn import NixlKVBootstrapServer, NixlKVReceiver
from sglang.srt.managers.scheduler import Scheduler
from waiting import until

KNOWN = Capabilities(version=1, others={"queued": 1}, bootstrap_timeout=300)


class Waits:
    """A request that waits on decode for prefill ``addr``; when that was told of it, by the clock of the test."""

    def __init__(self, clock: Any, manager: Any, room: int, addr: str = nixl_world.ADDR):
        self.kv_receiver = NixlKVReceiver(manager, addr, room)
        self.kv_receiver.init(0)
        assert self.kv_receiver.poll() == KVPoll.WaitingForInput
        self.told: list[float] = []
        self.kv_receiver._send_to = lambda peer, frames: self.told.append(clock.now)

    def mark_failed(self, error: Exception | str) -> None:
        raise AssertionError(error)


class Telling:
    """Decode's words to prefills, step by step of 0.25 s and 4 words; every second request waits for the second."""

    SECOND, STEP_S = "10.0.0.10:8998", 0.25
    # Words in a step.
    most = 4

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first_s: int, second_s: int):
        """first_s, second_s: the prefills' SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT."""
        monkeypatch.setattr(module, "ANNOUNCEMENTS", 4)
        self.manager = nixl_world.World(monkeypatch).decode[0].manager
        monkeypatch.setattr(module, "time", self)
        table, known = self.manager.prefill_info_table, self.manager.prefills.capabilities
        table[self.SECOND] = table[nixl_world.ADDR]
        for addr, seconds in ((nixl_world.ADDR, first_s), (self.SECOND, second_s)):
            known[addr] = Capabilities(version=1, others={"queued": 1}, bootstrap_timeout=seconds)
        self.now = self.began = time.monotonic()
        self.announcements: Any = module.Announcements(300 / 4)
        self.first = [self.arrive() for _ in range(60)]
        self.second = [self.arrive(self.SECOND) for _ in range(60)]
        self.waiting = [request for both in zip(self.first, self.second, strict=True) for request in both]
        for request in self.waiting:
            self.announcements.add(request)

    def monotonic(self) -> float:
        return self.now

    def arrive(self, addr: str = nixl_world.ADDR) -> Any:
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
    assert [*telling.announcements.listeners] == [nixl_world.ADDR]


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
    monkeypatch.setattr(module, "time", clock := SimpleNamespace(now=time.monotonic()))
    clock.monotonic = lambda: clock.now
    manager = nixl_world.World(monkeypatch, prefill_tp=4).decode[0].manager
    manager.prefills.capabilities[nixl_world.ADDR] = KNOWN
    waiting: Any = [Waits(clock, manager, room) for room in range(1, 257)]
    announcements: Any = module.Announcements(300 / 4)
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
    monkeypatch.setattr(module, "time", clock := SimpleNamespace(now=time.monotonic()))
    clock.monotonic = lambda: clock.now
    manager = nixl_world.World(monkeypatch, prefill_tp=2).decode[0].manager
    manager.prefills.capabilities[nixl_world.ADDR] = KNOWN
    request = Waits(clock, manager, 1)
    ports = [peer["rank_port"] for peer in request.kv_receiver.bootstrap_infos]
    told: dict[int, list[float]] = {port: [] for port in ports}
    stands_still = True

    def send(peer: dict, frames: list[bytes]) -> None:
        if stands_still and peer["rank_port"] == ports[deaf]:
            raise NotTaken("its queue is full")
        told[peer["rank_port"]].append(clock.now)

    request.kv_receiver._send_to = send
    announcements: Any = module.Announcements(300 / 4)
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
    assert not announcements.listeners[nixl_world.ADDR].missed


def test_what_waits_on_decode_is_forgotten_with_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(waiting_rooms.time, "monotonic", lambda: now[0])
    books = Rooms()
    rooms = waiting_rooms.WaitingRooms(books, lambda host, port: setattr(books, "has_met_flag", True))
    assert rooms.silent_s(1, since=40.0) == 0.0, "no decode worker that would say so has been heard of"
    rooms.note(1, "a", 1)
    assert rooms.silent_s(1, since=40.0) == 0.0
    now[0] = 107.0
    assert rooms.silent_s(1, since=40.0) == 7.0
    # Another rank of it still waits.
    rooms.note(1, "b", 1)
    now[0] = 110.0
    assert rooms.silent_s(1, since=40.0) == 3.0
    # Its request came later; and any may wait where nobody says so.
    assert rooms.silent_s(1, since=109.0) == 1.0
    rooms.silent_peer_at = 108.0
    assert rooms.silent_s(1, since=40.0) == 2.0
    assert rooms.silent_s(2, since=90.0) == 2.0
    books.end(1)
    del rooms[1]
    rooms.note(1, "a", 1)
    assert 1 not in rooms, "a word that comes too late"


def test_ranks_that_write_nothing_hear_of_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They gave it up after the time-out of a handshake, and with it all ranks."""
    world = mooncake_world.World(monkeypatch, prefill_tp=2, decode_tp=1, mla=True)
    request = world.request(1, 24, 4).start_prefill().start_decode()
    known = world.decode[0].manager.prefills.capabilities
    known[world.addr] = dataclasses.replace(known[world.addr], others={"queued": 1})
    request.receivers[0].announce()
    until(lambda: all(1 in rank.manager.waiting for rank in world.prefill), "both have read it")
    world.close()


def test_prefills_are_told_what_waits_when_the_step_has_admitted(monkeypatch):
    """Not of who is admitted in its first step."""
    world, scheduler, told = World(size=64, page_size=4), object.__new__(Scheduler), []
    scheduler.token_to_kv_pool_allocator, scheduler.tree_cache = world.allocator, world.tree
    scheduler.disagg_decode_prealloc_queue, scheduler.max_total_num_tokens = world.queue, 64
    queue = world.queue
    first, second = world.arrive(list(range(1, 9))), world.arrive(list(range(1, 13)))
    monkeypatch.setattr(queue.announcements, "announce", lambda waiting: told.append([*waiting]))
    engines = engine_class(SchedulerDisaggregationDecodeMixin)
    monkeypatch.setattr(engines, "process_decode_queue", lambda self: queue.queue.remove(first))
    scheduler.process_decode_queue()
    assert told == [[second]]


@pytest.mark.parametrize(
    ("kind", "hears"), [(CommonKVBootstrapServer, 0), (NixlKVBootstrapServer, 1), (MooncakeKVBootstrapServer, 1)]
)
def test_a_prefill_says_that_it_wants_to_know_what_waits(monkeypatch: pytest.MonkeyPatch, kind: type, hears: int):
    server: Any = object.__new__(kind)
    server.ranks, server.pp_size, server.attn_cp_size = RegisteredRanks(), 1, 1
    monkeypatch.setattr(server, "_all_have_come", lambda: True)
    answer = asyncio.run(server._capabilities())
    assert answer["queued"] == hears and ("queued" in parse_capabilities(answer).others) == bool(hears)
