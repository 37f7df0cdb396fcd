"""How often decode takes a step over prompts while others wait: so that their gaps grow by a part that is stated."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation import local_pace
from sglang.srt.disaggregation.decode_admission import Transfers
from sglang.srt.disaggregation.local_pace import AHEAD, MANY, ONE_IN, ONE_IN_SLOW, PROBE, SLOW, Pace, note_charge
from sglang.srt.disaggregation.local_prefill import AUTO, LocalReq
from sglang.srt.disaggregation.step_time import PS, Parts
from test_prompts_computed_here import FAST_PREFILL, SLOW_PREFILL, UNPACED, arrive, local_loop, played

MS = PS // 1000
SLICE = 64


@pytest.fixture(autouse=True)
def never_slow(monkeypatch):
    """Prefill is not taken for one that takes many times as long, but where a test is about that."""
    monkeypatch.setattr(local_pace, "SLOW", 10**9)


def is_sooner(pace: Pace, *asked: int) -> bool:
    return pace.wait(*asked) is not None


def pace_of(step_ms: int, fixed_ms: int, transfer_ms: int = 0, per_token_us: int = 100) -> Pace:
    pace = Pace()
    pace.take([step_ms * MS, fixed_ms * MS, per_token_us * MS // 1000, 0, transfer_ms * MS, 0, 0])
    return pace


@given(
    step_ms=st.integers(5, 60),
    fixed_ms=st.integers(1, 200),
    tokens=st.integers(1, SLICE),
    requests=st.integers(MANY, 200),
)
@settings(max_examples=60, deadline=None)
def test_many_that_decode_lose_no_more_than_the_stated_part(step_ms, fixed_ms, tokens, requests):
    """However many prompts come: one waits for every step."""
    pace = pace_of(step_ms, fixed_ms)
    cost = pace._charged(tokens, requests)
    computed = steps = 0
    while computed < 20:
        # A decode step between two, as the loop has it.
        steps += 1
        pace.decoded(requests, SLICE)
        if pace.has_time:
            pace.computed(tokens, requests)
            computed += 1
    # Without what may be taken in advance.
    assert (computed - AHEAD - 1) * cost * ONE_IN <= steps * pace.decode_step
    assert computed * cost * ONE_IN >= (steps - 1) * pace.decode_step * 0.9 or computed == steps


def test_few_lose_together_as_much_time_as_many():
    one, many = pace_of(20, 50), pace_of(20, 50)
    for pace, requests in ((one, 2), (many, 2 * MANY)):
        pace.computed(SLICE, requests)
        spent, steps = pace.spare, 0
        while not pace.has_time:
            pace.decoded(requests, SLICE)
            steps += 1
        lost_by_all = -spent * requests / (steps * pace.decode_step)
        assert lost_by_all == pytest.approx(MANY / ONE_IN if requests < MANY else requests / ONE_IN, rel=0.1)


def test_while_nobody_decodes_nothing_is_paid_and_all_is_earned():
    pace = pace_of(20, 50)
    for _ in range(9):
        pace.computed(SLICE, 0)
    assert pace.spare == 0
    pace.computed(SLICE, 8)
    assert not pace.has_time
    pace.decoded(0, SLICE)
    for _ in range(AHEAD):
        assert pace.has_time
        pace.computed(SLICE, 8)
    assert pace.has_time
    pace.computed(1, 8)
    assert not pace.has_time


def test_a_remainder_that_would_wait_longer_than_prefill_takes_is_prefills():
    pace = pace_of(20, 50, transfer_ms=300)
    assert is_sooner(pace, 40, 0, SLICE, 8)
    pace.computed(40, 8)
    # 54 ms, of which each step of 20 earns 1: more than 1000 ms.
    assert not is_sooner(pace, 40, 0, SLICE, 8)
    assert is_sooner(pace_of(20, 50, transfer_ms=5000), 40, 0, SLICE, 8)
    pace.take([20 * MS, 50 * MS, MS // 10, 0, 2000 * MS, 0, 0])
    assert is_sooner(pace, 40, 0, SLICE, 8)
    # With others before it that fill steps.
    assert not is_sooner(pace, 40, 3 * SLICE, SLICE, 8)
    while not pace.has_time:
        pace.decoded(8, SLICE)
    # Prefill is sooner than the step itself, or nothing is known of it.
    pace.take([20 * MS, 50 * MS, MS // 10, 0, 50 * MS, 0, 0])
    assert not is_sooner(pace, 40, 0, SLICE, 8)
    pace.take([20 * MS, 50 * MS, MS // 10, 0, 0, 0, 0])
    assert is_sooner(pace, 40, 0, SLICE, 8), "without a wait, where nothing is known of prefill"
    pace.computed(40, 8)
    assert not is_sooner(pace, 40, 0, SLICE, 8)


def test_what_all_that_decode_lose_counts_against_what_one_gains():
    """A step of 54 ms, and no wait: one of 64 gains 200 - 54 ms, all of them lose 54."""
    pace = pace_of(20, 50, transfer_ms=200)
    assert is_sooner(pace, 40, 0, SLICE, 8)
    assert not is_sooner(pace, 40, 0, SLICE, 64)
    # A busy prefill.
    assert is_sooner(pace_of(20, 50, transfer_ms=4000), 40, 0, SLICE, 64)


def test_nothing_is_known_at_first_and_nothing_held_back():
    pace = Pace()
    assert pace.own() == [0] * pace.width
    for _ in range(5):
        assert pace.has_time and is_sooner(pace, 64, 500, SLICE, 8)
        pace.computed(64, 8)


def test_what_is_measured_is_what_ranks_agree_on():
    pace = Pace(lambda: 0.25)
    decode = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False, is_idle=lambda: False)
    extend = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True, is_idle=lambda: False)
    now = 100.0
    pace.note_step(SimpleNamespace(forward_mode=decode, reqs=[0] * 8, global_num_tokens=None), now=now)
    for i in range(60):
        now += 0.02
        pace.note_step(SimpleNamespace(forward_mode=decode, reqs=[0] * 8, global_num_tokens=None), now=now)
        tokens = 16 + i % 3 * 24
        now += 0.03 + 0.0005 * tokens
        stats = SimpleNamespace(log_input_tokens=tokens)
        pace.note_step(
            SimpleNamespace(forward_mode=extend, prefill_stats=stats, reqs=[0], global_num_tokens=None), now=now
        )
    # What passes while there is nothing to do is no step's.
    pace.idle()
    pace.note_step(SimpleNamespace(forward_mode=decode, reqs=[0] * 8, global_num_tokens=None), now=now + 50)
    step, fixed, per_token, _, transfer, *_ = pace.own()
    assert len(pace.own()) == pace.width and all(isinstance(figure, int) for figure in pace.own())
    assert step == pytest.approx(0.02 * PS, rel=0.01) and transfer == PS // 4
    assert Parts(fixed, per_token, 0).of(50, 0) == pytest.approx(0.055 * PS, rel=0.05)


def test_only_what_prefill_does_now_counts(monkeypatch):
    transfers = Transfers()
    assert transfers.short() is None
    now = 1000.0
    monkeypatch.setattr("sglang.srt.disaggregation.decode_admission.time.monotonic", lambda: now)
    transfers.done("a", 50, 0.4)
    transfers.done("b", 2560, 4.0)
    transfers.done("b", 30, 0.1)
    assert transfers.short() == 0.4
    now += Transfers.LATE_S + 1
    assert transfers.short() is None
    transfers.done("a", 50, 0.7)
    assert transfers.short() == 0.7


# ---- in the real loop ----


def turns_of(measured: tuple[int, ...]) -> tuple[list[int], int]:
    """In which turns three remainders are computed beside one request that decodes, and how many prefill is asked."""
    script = {1: arrive([1] * 9, max_new=120)}
    for turn, token in ((12, 3), (13, 4), (14, 5), (15, 2)):
        script[turn] = arrive([1] * 8 + [token] * 4, max_new=1)
    loop = played(script, slice_tokens=4, measured=measured, size=256)
    return sorted(turn for part, turn in loop.extended_in.items() if part[0] != "r1"), len(loop.asked_in)


def test_the_loop_keeps_to_it():
    """A step over prompts takes what 8 decode steps of one request earn; of two that are earned in advance no more."""
    turns, asked = turns_of(UNPACED)
    assert asked == 0 and [b - a for a, b in zip(turns, turns[1:], strict=False)] == [2, 2, 2]
    turns, asked = turns_of(SLOW_PREFILL)
    paces = [b - a for a, b in zip(turns, turns[1:], strict=False)]
    assert asked == 0 and len(turns) == 4 and sum(paces) >= 8, turns
    turns, asked = turns_of(FAST_PREFILL)
    assert asked == 4 - len(turns) > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_the_result_of_a_step_comes_with_what_it_was_charged(overlap, monkeypatch):
    """Where others decode; of the first prompt both steps are taken while nobody does."""
    charges: list[object] = []
    note_step = Pace.note_step

    def noted(pace: Pace, batch: object, result: object = None) -> None:
        if batch.forward_mode.is_extend() and batch.prefill_stats is not None:
            charges.append(batch.prefill_stats.charge)
        note_step(pace, batch, result)

    monkeypatch.setattr(Pace, "note_step", noted)
    script = {1: arrive([1] * 9, max_new=120), 12: arrive([1] * 8 + [3] * 4, max_new=1)}
    played(script, measured=SLOW_PREFILL, size=256, overlap=overlap)
    # 300 ps, 5 for a token; of one request each decode step earns 8 twentieths.
    assert charges == [None, None, (320, PROBE * 40, ONE_IN)]


def test_a_step_waits_until_the_last_one_has_been_earned():
    local = local_loop(4, SLOW_PREFILL).transfer.local
    local.pace.take(list(SLOW_PREFILL))
    local.pace.computed(4, 8)
    assert not local.may_step(8) and local.may_step(0)


def test_a_time_that_is_believed_too_long_is_measured_again():
    """Else nothing would be computed here any more, and no sample would come."""
    pace = pace_of(20, 800, transfer_ms=300)
    taken = []
    for step in range(3 * PROBE):
        pace.decoded(16, SLICE)
        if is_sooner(pace, SLICE, 0, SLICE, 16):
            pace.computed(SLICE, 16)
            taken.append(step)
    assert 1 <= len(taken) <= 3 and taken[0] == PROBE - 1
    assert not is_sooner(pace, SLICE, 0, SLICE, 16)


# ---- what steps have taken ----

DECODE = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False, is_idle=lambda: False)
EXTEND = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True, is_idle=lambda: False)


class Worker:
    """One rank that decodes, and always has a remainder that waits. Times are seconds."""

    def __init__(self, step: float, requests: int = 16, transfer: float = 4.0) -> None:
        self.pace, self.step, self.requests = Pace(lambda: transfer), step, requests
        self.now, self.decoded = 100.0, 0
        # In which decode step each step over prompts was, and what it took.
        self.taken: list[tuple[int, float]] = []
        self.decode()

    def decode(self) -> None:
        self.now += self.step
        self.decoded += 1
        batch = SimpleNamespace(forward_mode=DECODE, reqs=[0] * self.requests, global_num_tokens=None)
        self.pace.note_step(batch, now=self.now)

    def compute(self, seconds: float) -> None:
        self.taken.append((self.decoded, seconds))
        stats = SimpleNamespace(log_input_tokens=SLICE)
        batch = SimpleNamespace(forward_mode=EXTEND, prefill_stats=stats, reqs=[0], global_num_tokens=None)
        note_charge(batch, self.pace.computed(SLICE, self.requests))
        self.now += seconds
        self.pace.note_step(batch, now=self.now)

    def run(self, steps: int, seconds: Callable[[], float], agree: bool = True) -> None:
        for _ in range(steps):
            if agree:
                self.pace.take(self.pace.own())
            self.pace.decoded(self.requests, SLICE)
            self.decode()
            if self.pace.has_time and is_sooner(self.pace, SLICE, 0, SLICE, self.requests):
                self.compute(seconds())


@pytest.mark.parametrize("short, long, part", [(0.03, 0.03, 0.0), (0.02, 0.2, 0.4), (0.02, 0.2, 0.1), (0.02, 0.4, 0.2)])
@pytest.mark.parametrize("requests", [2, 16])
def test_the_mean_is_kept_where_steps_differ(requests, short, long, part):
    """Behind long prefixes they take longer. The median of the last ones is what is believed of all."""
    draws, worker = random.Random(1), Worker(0.02, requests)
    worker.run(20000, lambda: long if draws.random() < part else short)
    lost = sum(seconds for _, seconds in worker.taken)
    earned = worker.decoded * worker.step / ONE_IN * max(1, MANY / requests)
    # Without what may be taken in advance.
    assert 0.98 * earned <= lost <= earned + (AHEAD + 1) * long


@pytest.mark.parametrize("slow, number", [(3.0, 2), (3.0, 5), (30.0, 3), (60.0, 1)])
def test_slow_first_steps_are_not_believed_for_long(slow, number):
    worker = Worker(0.02, transfer=0.4)
    times = iter([slow] * number)
    worker.run(20 * PROBE, lambda: next(times, 0.02))
    steps = [step for step, _ in worker.taken]
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= PROBE
    # As many good ones as there were slow ones, and no more.
    assert len(steps) > 19 * PROBE // ONE_IN - 2 * number * PROBE // ONE_IN


def test_after_so_many_steps_one_is_taken_however_many_decode_by_then():
    """What one request earns in as many steps, many do not."""
    pace = pace_of(20, 800, transfer_ms=300)
    pace.computed(SLICE, 1)
    for _ in range(PROBE):
        assert not pace.has_time and not is_sooner(pace, SLICE, 0, SLICE, 64)
        pace.decoded(64, SLICE)
    assert pace.has_time and is_sooner(pace, SLICE, 0, SLICE, 64)
    assert not is_sooner(pace, SLICE, SLICE, SLICE, 64), "one, and not all that come by then"


def test_what_is_known_late_is_paid_with_what_was_earned_meanwhile():
    """Ranks agree when a request comes, which may be long after."""
    worker = Worker(0.02)
    worker.run(PROBE, lambda: 0.02)
    pace, most = worker.pace, AHEAD * worker.pace._cost(SLICE)
    worker.compute(0.22)
    # 20 ms of 220 are charged; each step earns 1 ms.
    before = pace.spare
    for _ in range(100):
        pace.decoded(worker.requests, SLICE)
    assert pace.spare == most
    pace.take(pace.own())
    assert pace.spare == before + (100 - 200) * MS
    for _ in range(400):
        pace.decoded(worker.requests, SLICE)
    worker.compute(0.22)
    for _ in range(400):
        pace.decoded(worker.requests, SLICE)
    pace.take(pace.own())
    assert pace.spare == most


def test_what_is_charged_for_nothing_is_not_charged_later():
    """While nobody decodes, behind an idle moment, and for prompts without a prefill."""
    worker = Worker(0.02)
    worker.run(PROBE, lambda: 0.02)
    pace = worker.pace
    pace.take(pace.own())
    before = pace.spare
    worker.requests = 0
    worker.compute(5.0)
    assert pace.own()[5:] == [0, 0]
    worker.requests = 16
    pace.idle()
    worker.compute(5.0)
    assert pace.own()[5:] == [0, 0] and pace.spare == before - pace._cost(SLICE)
    worker.decode()
    worker.compute(5.0)
    assert pace.own()[5] > 0
    pace.decoded(0, SLICE)
    assert pace.own()[5:] == [0, 0], "an idle moment forgives"


def test_all_ranks_count_what_the_first_has_measured():
    first, other = Worker(0.02), Worker(0.02)
    draws = random.Random(2)
    for _ in range(3000):
        if draws.random() < 0.3:
            figures = first.pace.own()
            for worker in (first, other):
                worker.pace.take(list(figures))
        for worker in (first, other):
            worker.pace.decoded(16, SLICE)
            worker.decode()
        if first.pace.has_time:
            first.compute(draws.choice((0.01, 0.1)))
            # By its own clock it takes something else.
            other.compute(0.05)
        assert first.pace.spare == other.pace.spare
    assert len(first.taken) > 50


# ---- where prefill takes many times as long ----


@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_behind_a_slow_prefill_the_part_is_larger_and_kept(seconds, monkeypatch):
    monkeypatch.setattr(local_pace, "SLOW", SLOW)
    worker = Worker(0.02, transfer=40.0)
    worker.run(20000, lambda: seconds)
    lost = sum(each for _, each in worker.taken)
    assert lost == pytest.approx(worker.decoded * worker.step / ONE_IN_SLOW, rel=0.05)


def test_when_a_prefill_is_slow(monkeypatch):
    """By what a step costs all that wait for it: 50 ms and 6.4 for its tokens, and of 8 half as much again."""
    monkeypatch.setattr(local_pace, "SLOW", SLOW)
    for requests, most_ms in ((0, 56.4), (8, 56.4 * 1.5), (64, 56.4 * 5)):
        for times, slow in ((0.98, False), (1.02, True)):
            pace = pace_of(20, 50, transfer_ms=round(times * SLOW * most_ms))
            pace.decoded(requests, SLICE)
            assert pace.is_slow(requests) == slow
    unknown = pace_of(20, 50)
    assert not unknown.is_slow(8)


def test_more_may_wait_and_be_owed_where_prefill_is_slow():
    """A turn that went there after all would be the slowest of all."""
    assert AUTO.should_compute(60, 190, 0, True) and not AUTO.should_compute(60, 200, 0, True)
    assert AUTO.should_compute(60, 200, 0, True, slow=True) and not AUTO.should_compute(60, 2000, 0, True, slow=True)
    assert AUTO.should_compute(60, 0, 450, True) and not AUTO.should_compute(60, 0, 460, True)
    assert AUTO.should_compute(60, 0, 460, True, slow=True) and not AUTO.should_compute(60, 0, 4090, True, slow=True)


def test_a_request_waits_no_longer_than_expected():
    """Whatever has been earned by then: of what was expected of steps, they may have taken twice as long."""
    local = local_loop(4, SLOW_PREFILL).transfer.local
    pace = local.pace
    pace.take(list(SLOW_PREFILL))
    pace.decoded(8, 4)
    pace.computed(4, 8)
    req = SimpleNamespace(origin_input_ids=[1] * 9, to_finish=None)
    wait = pace.wait(4, 0, 4, 8)
    assert wait
    one = LocalReq(SimpleNamespace(req=req, kv_receiver=None), 0, pace.steps + wait, agreed=True)
    local.waiting = [one]
    pace.spare -= 10**6
    for _ in range(wait):
        assert not local.may_step(8)
        pace.decoded(8, 4)
    assert local.may_step(8) and not pace.has_time


def test_the_rest_of_a_prompt_waits_for_one_decode_step_only():
    local = local_loop(4, SLOW_PREFILL).transfer.local
    local.pace.take(list(SLOW_PREFILL))
    local.pace.computed(4, 8)
    req = SimpleNamespace(origin_input_ids=[1] * 9, to_finish=None)
    local.waiting = [LocalReq(SimpleNamespace(req=req, kv_receiver=None), 4, 10**6, agreed=True, begun=True)]
    assert local.may_step(8) and not local.pace.has_time


def test_nothing_new_begins_beside_what_has_begun_while_no_time_is_left():
    """Or of a burst each would begin at the end of a slice of the one before, and all go on."""
    local = local_loop(4, SLOW_PREFILL).transfer.local
    local.pace.take(list(SLOW_PREFILL))
    local.pace.computed(4, 8)
    reqs = [SimpleNamespace(origin_input_ids=[1] * n, to_finish=None) for n in (6, 9)]
    begun, other = (LocalReq(SimpleNamespace(req=req, kv_receiver=None), 4, 10**6, agreed=True) for req in reqs)
    begun.begun, local.waiting = True, [begun, other]
    assert local.may_step(8) and local.pick(4, 8, lambda req: True) == [(begun, 6)]
    assert local.may_step(0) and [one for one, _ in local.pick(8, 8, lambda req: True)] == [begun, other]
