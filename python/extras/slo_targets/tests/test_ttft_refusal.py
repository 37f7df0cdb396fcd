"""Requests that come too late for the TTFT target are refused when they come; nobody is who could be in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World, queue, tokens
from engine_classes import engine_class
from ranked_world import Rank
from ranks import assert_same
from sglang.srt.disaggregation import decode, ttft_refusal
from sglang.srt.disaggregation.ttft_refusal import ENOUGH, FINISH_REFUSED, RECENT, TtftRefusal
from sglang.srt.disaggregation.ttft_target import EVERY, TtftTarget
from sglang.srt.managers.refused_answer import KEY, RefusedAnswers
from test_ttft_target import own_clock, target

TARGET_S = 2.0
REFUSE = target("2000,refuse")


@pytest.fixture
def clock(monkeypatch) -> Iterator[Any]:
    with own_clock() as found:
        monkeypatch.setattr(ttft_refusal, "time", SimpleNamespace(monotonic=lambda: found.now))
        yield found


class Load:
    """Requests that come to a worker of which ten first tokens can come in a second, one per step."""

    def __init__(self, world: World, clock: Any):
        del world.pool.free_slots[1:]
        self.world, self.clock = world, clock
        self.came: dict[int, tuple[float, Any]] = {}
        self.refused: list[int] = []
        self.served: list[int] = []
        self.number = self.in_time = 0

    def run(self, steps: int, load: float, burst: int = 1) -> float:
        """First tokens within the target per step. load: requests per step, which come in bursts of so many."""
        refusal: TtftRefusal | None = self.world.transfer.ttft_refusal
        first, self.in_time = self.number, 0
        for step in range(steps):
            self.clock.now += 0.1
            while self.number < first + burst * int(step * load / burst):
                self.number += 1
                if refusal is not None and refusal.refuses(0) is not None:
                    self.refused.append(self.number)
                else:
                    self._queue(self.number)
            self._serve()
        return self.in_time / steps

    def _queue(self, number: int) -> None:
        (decode_req,) = queue(self.world, [1 + number % 90, 1 + number // 90, 1, 1])
        self.came[id(decode_req.req)] = self.clock.now, decode_req, number

    def _serve(self) -> None:
        self.world.step()
        for decode_req in list(self.world.transfer.queue):
            self.world.complete(decode_req)
        self.world.step()
        for req in list(self.world.running):
            came, _, number = self.came.pop(id(req))
            self.served.append(number)
            self.in_time += self.clock.now - came <= TARGET_S
            self.world.finish(req)


def test_at_twice_the_capacity_half_are_refused_and_the_others_are_in_time(clock):
    goodput, refused = {}, {}
    for name, options, load in (("some", REFUSE, 1.2), ("half", REFUSE, 2.0), ("none", target(1000 * TARGET_S), 2.0)):
        loaded = Load(World(size=512, page_size=4, reserved=2, options=options), clock)
        # Those that came before enough was measured are served by turns.
        loaded.run(350, load)
        loaded.refused.clear()
        goodput[name], refused[name] = loaded.run(250, load), len(loaded.refused)
    best = max(goodput.values())
    assert goodput["half"] >= 0.9 * best and refused["half"] == pytest.approx(250, rel=0.05)
    assert goodput["some"] >= 0.9 * best and refused["some"] == pytest.approx(50, rel=0.2)
    # Without, each fourth that is admitted is late.
    assert goodput["none"] < 0.8 * best and not refused["none"]


@pytest.mark.parametrize("load, burst", [(0.5, 1), (0.8, 1), (0.8, 4), (0.8, 8), (0.3, 15)])
def test_nobody_is_refused_who_can_be_in_time(clock, load, burst):
    loaded = Load(World(size=512, page_size=4, reserved=2, options=REFUSE), clock)
    assert loaded.run(800, load, burst) == pytest.approx(load, rel=0.07) and not loaded.refused


def test_one_long_prompt_is_not_the_pace_of_those_behind_it(clock):
    refusal = TtftRefusal(TtftTarget(0.5))
    for arrival in range(RECENT):
        refusal.joined(arrival, 0)
        refusal.admitted(arrival)
        clock.now += 6.0 if arrival == 40 else 0.1
        refusal.first_token()
        refusal.left(arrival)
    refusal.take(refusal.own())
    refusal.joined(RECENT, 0)
    assert refusal.refuses(0) is None
    assert refusal.expected_s(0) == pytest.approx(2 * (0.1 * (RECENT - 1) + 0.4) / RECENT, rel=1e-4)


def overloaded(refusal: TtftRefusal, clock: Any, waiting: int, seconds: float) -> None:
    """So many wait while each second so many first tokens come; they all stay."""
    for arrival in range(waiting + RECENT):
        refusal.joined(arrival, 0)
        if arrival >= waiting:
            clock.now += seconds
            refusal.admitted(arrival - waiting)
            refusal.first_token()
            refusal.left(arrival - waiting)
    refusal.take(refusal.own())


def test_those_of_lower_priority_do_not_count(clock):
    refusal = TtftRefusal(TtftTarget(TARGET_S))
    overloaded(refusal, clock, 20, 0.1)
    assert refusal.refuses(0) is not None and refusal.refuses(7) is not None
    assert refusal.refuses(-1) is None
    for arrival in range(500, 520):
        refusal.joined(arrival, -1)
    assert refusal.refuses(-1) is not None and refusal.refused_requests == 3


def test_what_is_late_does_not_count_but_for_its_turns(clock):
    late_before = TtftTarget(TARGET_S)
    refusal = TtftRefusal(late_before)
    overloaded(refusal, clock, 10, 0.1)
    assert refusal.expected_s(0) == pytest.approx(11 * 0.1)
    late_before.late_before = RECENT + 6
    # Four are left, of ten.
    assert refusal.expected_s(0) == pytest.approx(5 * 0.1 * EVERY / (EVERY - 1))
    late_before.late_before = 1000
    assert refusal.expected_s(0) == 0


def test_those_count_whose_kv_waits_for_a_place_to_decode(clock):
    world = World(options=REFUSE)
    refusal = world.transfer.ttft_refusal
    overloaded(refusal, clock, 10, 0.1)
    world.scheduler.waiting_queue = [object()] * 5
    assert refusal.expected_s(0) == pytest.approx(1.5 * 10 * 0.1)
    overloaded(refusal, clock, 10, 0.1)
    assert refusal.expected_s(0) == pytest.approx((10 + 10 + 5 + 1) * 0.1)


def test_many_first_tokens_of_one_step(clock):
    """Most of them come at once: that is not the time of each."""
    refusal = TtftRefusal(TtftTarget(TARGET_S))
    for step in range(20):
        for arrival in range(16 * step, 16 * step + 16):
            refusal.joined(arrival, 0)
            refusal.admitted(arrival)
        clock.now += 0.8
        for arrival in range(16 * step, 16 * step + 16):
            refusal.first_token()
            refusal.left(arrival)
    pace_us, _ = refusal.own()
    assert pace_us == pytest.approx(0.8e6 / 16, rel=0.01)


def test_when_to_come_again(clock):
    refusal = TtftRefusal(TtftTarget(TARGET_S))
    overloaded(refusal, clock, 60, 0.1)
    end = refusal.refuses(0)
    assert end is not None and end.to_json() == {
        "type": "abort",
        "message": "this worker is overloaded: a first token is expected in 6.1 s, more than 0.75 of the target of 2 s",
        "status_code": 503,
        "err_type": "ServiceUnavailable",
        "retry_after": 5,
    }


def test_without_enough_first_tokens_nobody_is_refused(clock):
    refusal = TtftRefusal(TtftTarget(TARGET_S))
    for arrival in range(1000):
        refusal.joined(arrival, 0)
    for arrival in range(ENOUGH - 1):
        clock.now += 10
        refusal.admitted(arrival)
        refusal.first_token()
        refusal.left(arrival)
        refusal.take(refusal.own())
        assert refusal.refuses(0) is None


def test_what_is_refused_when_it_comes(monkeypatch):
    """Not a warm-up, one that decode has begun, one that has failed, nor a copy of one: prefill would drop that one."""
    world = World(options=REFUSE)
    told: list[str] = []
    queued: list[str] = []
    base = engine_class(decode.DecodePreallocQueue)
    monkeypatch.setattr(base, "add", lambda queue, req, is_retracted=False: queued.append(req.rid))
    world.scheduler._tell_peer = lambda req, reason: told.append(req.rid)
    world.transfer.ttft_refusal.refuses = lambda priority: FINISH_REFUSED("late", 3)
    copy, warmup, refused, failed, retracted = (world.arrive(tokens(n, 8), warmup=n == 2).req for n in range(1, 6))
    for room, req in enumerate((warmup, refused, failed, retracted), 100):
        req.bootstrap_room = room
    failed.to_finish = FINISH_REFUSED("other", 1)
    for req in (copy, warmup, refused, failed):
        world.queue.add(req)
    world.queue.add(retracted, is_retracted=True)
    assert told == [refused.rid] and queued == [req.rid for req in (warmup, failed, retracted)]
    assert refused.finished_reason.to_json()["retry_after"] == 3 and world.streamed == [copy, refused]
    assert copy.finished_reason.status_code == 400


def test_without_refuse_nothing_is_measured():
    for options in ({}, target(2000.0)):
        world = World(options=options)
        assert world.transfer.ttft_refusal is None
        assert not any(isinstance(of(), TtftRefusal) for of in world.transfer.hooks.measured)
    assert World().transfer.ttft_target is None


# ---- ranks ----


def refused_on(rank: int) -> list[Any]:
    me = Rank(rank, 512, options=REFUSE)
    with own_clock() as clock, pytest.MonkeyPatch.context() as patch:
        # The clock of the second rank goes ten times as slowly: by its own, it would refuse nobody.
        patch.setattr(ttft_refusal, "time", SimpleNamespace(monotonic=lambda: clock.now * (1.0, 0.1)[rank]))
        loaded = Load(me.world, clock)
        loaded.run(120, 2.0)
    return [loaded.refused, loaded.served, me.world.queue.ranks.disagreements]


def test_ranks_refuse_the_same_by_the_first_ones_clock(pair):
    refused, served, disagreements = assert_same(pair.run(refused_on))
    assert disagreements == 0 and len(refused) > 20 and len(served) > 100


# ---- the answer ----


@pytest.mark.parametrize("refused_after", [None, 0, 1])
def test_only_a_stream_that_has_not_begun_becomes_an_error(refused_after):
    """One prompt of a batch may be refused while others have been streamed: their stream goes on as the engine's."""
    sent: list[Any] = []
    parts = [b"data: 1\n\n", b"data: 2\n\n", b""]

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        assert sent == [], "the head waits for the first part of the body"
        for n, part in enumerate(parts):
            if n == refused_after:
                scope[KEY].refuse(FINISH_REFUSED("too many", 7).to_json())
            await send({"type": "http.response.body", "body": part, "more_body": part != b""})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RefusedAnswers(app)({"type": "http"}, None, send))
    head, *body = sent
    if refused_after != 0:
        assert head["status"] == 200 and [message["body"] for message in body] == parts
        return
    assert head["status"] == 503 and (b"retry-after", b"7") in head["headers"]
    (only,) = body
    assert "more_body" not in only and json.loads(only["body"])["message"] == "too many"
