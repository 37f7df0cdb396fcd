"""When decode computes a remainder: what others lose by it is bounded, and what prefill does sooner goes there."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation import local_policy
from sglang.srt.disaggregation.local_policy import (
    AUTO,
    FORGOTTEN,
    FULL,
    MANY,
    MORE_DEBT,
    ONE_IN,
    ONE_IN_SLOW,
    SLOW,
    UNIT,
    Bucket,
    ShortTransfers,
)
from sglang.srt.disaggregation.local_prefill import LocalReq
from test_prompts_computed_here import FAST_PREFILL, SLOW_PREFILL, UNPACED, arrive, local_loop, plain, played

DECODE = SimpleNamespace(is_extend=lambda: False)
EXTEND = SimpleNamespace(is_extend=lambda: True)


@pytest.fixture
def never_slow(monkeypatch):
    """No prefill counts as slow."""
    monkeypatch.setattr(local_policy, "SLOW", 10**9)


def bucket_of(cost: int, prefill: int = 0) -> Bucket:
    """Both in decode steps."""
    bucket = Bucket()
    bucket.take([cost * UNIT, prefill * UNIT])
    return bucket


class Worker:
    """One rank that decodes while a remainder of one step always waits. Times in seconds; a decode step takes 20 ms."""

    def __init__(self, requests: int, prefill_s: float) -> None:
        self.bucket, self.requests, self.now = Bucket(lambda: prefill_s), requests, 100.0
        self.taken: list[float] = []
        self.decoded, self.due = 0, None

    def note(self, mode, seconds: float) -> None:
        self.now += seconds
        stats, requests = (object(), 1) if mode is EXTEND else (None, self.requests)
        batch = SimpleNamespace(forward_mode=mode, prefill_stats=stats, reqs=[0] * requests, global_num_tokens=None)
        self.bucket.note_step(batch, now=self.now)

    def run(self, steps: int, seconds) -> None:
        for _ in range(steps):
            self.bucket.decoded(self.requests)
            self.note(DECODE, 0.02)
            self.decoded += 1
            self.bucket.take(self.bucket.own())
            wait = self.bucket.wait(1, self.requests) if self.due is None else None
            if wait is not None:
                self.bucket.spend(1)
                self.due = self.bucket.steps + wait
            if self.due is not None and self.due <= self.bucket.steps:
                self.due = None
                self.taken.append(seconds())
                self.note(EXTEND, self.taken[-1])


@pytest.mark.parametrize("short, long, part", [(0.03, 0.03, 0.0), (0.02, 0.06, 0.4), (0.05, 0.2, 0.2)])
@pytest.mark.parametrize("requests", [2, 16])
def test_the_mean_of_the_gaps_grows_by_the_stated_part(never_slow, requests, short, long, part):
    """However many remainders come, and where some steps take longer."""
    draws, worker = random.Random(1), Worker(requests, prefill_s=60.0)
    worker.run(20000, lambda: long if draws.random() < part else short)
    allowed = worker.decoded * 0.02 / ONE_IN * max(1, MANY / requests)
    assert 0.85 * allowed <= sum(worker.taken) <= 1.1 * allowed


def test_where_prefill_is_slow_the_part_is_larger():
    worker = Worker(MANY, prefill_s=60.0)
    worker.run(20000, lambda: 0.03)
    assert sum(worker.taken) == pytest.approx(worker.decoded * 0.02 / ONE_IN_SLOW, rel=0.05)


def test_what_prefill_does_sooner_is_prefills():
    bucket = bucket_of(3, prefill=10)
    assert bucket.wait(1, 8) == 0
    for _ in range(FULL + 1):
        bucket.spend(1)
    # A step of 8 requests gives a twentieth: 60 steps.
    assert bucket.wait(1, 8) is None
    bucket.take([3 * UNIT, 100 * UNIT])
    assert bucket.wait(1, 8) > 0
    # Sooner than the step itself; or nothing is known of it.
    bucket.decoded(0)
    bucket.take([3 * UNIT, 3 * UNIT])
    assert bucket.wait(1, 8) is None
    bucket.take([3 * UNIT, 0])
    bucket.decoded(0)
    assert bucket.wait(1, 8) == 0
    bucket.spend(FULL + 1)
    assert bucket.wait(1, 8) is None


def test_a_cost_that_is_believed_too_high_is_measured_again():
    """Or nothing would be computed here any more, and no sample would come."""
    bucket = bucket_of(40, prefill=15)
    taken = []
    for step in range(3 * FORGOTTEN):
        bucket.decoded(16)
        if bucket.wait(1, 16) is not None:
            bucket.spend(1)
            taken.append(step)
    assert 1 <= len(taken) <= 3 and taken[0] == FORGOTTEN - 1


def test_only_what_prefill_does_now_counts(monkeypatch):
    transfers = ShortTransfers()
    assert transfers.short() is None
    now = 1000.0
    monkeypatch.setattr("sglang.srt.disaggregation.local_policy.time.monotonic", lambda: now)
    transfers.done(50, 0.4)
    transfers.done(2560, 4.0)
    transfers.done(30, 0.1)
    assert transfers.short() == 0.4
    now += ShortTransfers.LATE_S + 1
    assert transfers.short() is None
    transfers.done(50, 0.7)
    assert transfers.short() == 0.7


# ---- in the real loop ----


def turns_of(measured: tuple[int, ...]) -> tuple[list[int], int]:
    """In which turns three remainders are computed beside one request that decodes, and how many prefill is asked."""
    script = {1: arrive([1] * 9, max_new=120)}
    for turn, token in ((12, 3), (13, 4), (14, 5), (15, 2)):
        script[turn] = arrive([1] * 8 + [token] * 4, max_new=1)
    loop = played(script, slice_tokens=4, measured=measured, size=256)
    return sorted(turn for part, turn in loop.extended_in.items() if part[0] != "r1"), len(loop.asked_in)


def test_the_loop_keeps_to_it(never_slow):
    """A step over prompts costs what 8 decode steps of one request give; the bucket holds two."""
    turns, asked = turns_of(UNPACED)
    assert asked == 0 and [b - a for a, b in zip(turns, turns[1:], strict=False)] == [2, 2, 2]
    turns, asked = turns_of(SLOW_PREFILL)
    paces = [b - a for a, b in zip(turns, turns[1:], strict=False)]
    assert asked == 0 and len(turns) == 4 and sum(paces) >= 8, turns
    turns, asked = turns_of(FAST_PREFILL)
    assert asked == 4 - len(turns) > 0


def waits_here(tokens: int, due: int, **more: bool) -> LocalReq:
    req = SimpleNamespace(origin_input_ids=[1] * tokens, to_finish=None)
    return LocalReq(SimpleNamespace(req=req, kv_receiver=None), 4, due, agreed=True, **more)


def test_nothing_that_is_not_due_begins_beside_what_has_begun():
    """Or of a burst each would begin at the end of a slice of the one before, and all go on."""
    local = local_loop(4, SLOW_PREFILL).transfer.local
    begun, other = waits_here(6, 10**6, begun=True), waits_here(9, 10**6)
    local.waiting = [begun, other]
    assert local.may_step(8) and local.pick(4, 8, lambda req: True) == [(begun, 6)]
    assert local.may_step(0) and [one for one, _ in local.pick(8, 8, lambda req: True)] == [begun, other]


@pytest.mark.parametrize(
    ("delta", "debt", "slow", "takes"),
    [
        (AUTO.most, 0, False, True),
        (AUTO.most + 1, 0, True, False),
        (60, AUTO.debt - 60, False, True),
        (60, AUTO.debt - 59, False, False),
        (60, AUTO.debt - 59, True, True),
        (60, AUTO.debt * MORE_DEBT - 59, True, False),
    ],
)
def test_limits_in_tokens(monkeypatch, delta, debt, slow, takes):
    local = local_loop(4).transfer.local
    local.policy = AUTO
    local.bucket.take([UNIT, SLOW * 2 * UNIT if slow else 3 * UNIT])
    monkeypatch.setattr("sglang.srt.disaggregation.local_prefill.unknown_to_prefill", lambda found: debt)
    req = plain(origin_input_ids=[1] * (delta + 16))
    assert local.should_compute(req, SimpleNamespace(length=16), lambda: 8) == takes
