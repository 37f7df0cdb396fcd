"""A step's time as learned from steps: known parts found again under noise, outliers, pauses and drift."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.step_time import LEAST_SEEN, MOST_SEEN, SEEN, WIDTH, Estimate, Parts, StepTimes

MS = 1e-3


def true_seconds(parts: tuple[float, float, float], requests: int, tokens: int) -> float:
    fixed, per_request, per_token = parts
    return fixed + per_request * requests + per_token * tokens


def said(times: StepTimes, requests: int, tokens: int) -> float:
    parts = times.parts()
    assert parts is not None
    return parts.of(requests, tokens) / 1e12


def batches(rng: random.Random, count: int, most: int = 64) -> list[tuple[int, int]]:
    """Sizes of steps as a load makes them: batches that last for a while and grow, of prompts of all lengths."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        requests = rng.randint(1, most)
        tokens = sum(rng.randint(10, 2000) for _ in range(requests))
        for n in range(rng.randint(3, 40)):
            found.append((requests, tokens + n * requests))
    return found[:count]


@settings(deadline=None, max_examples=60)
@given(
    fixed=st.floats(0.5, 20),
    per_request=st.floats(0, 0.5),
    per_token=st.floats(0, 1e-3),
    noise=st.floats(0, 0.1),
    outliers=st.floats(0, 0.1),
    seed=st.integers(0, 9999),
)
def test_known_parts_are_found(fixed, per_request, per_token, noise, outliers, seed):
    """Of sizes as have been seen, and such that their mean is that of steps of which many were held up."""
    rng = random.Random(seed)
    parts = fixed * MS, per_request * MS, per_token * MS
    times = StepTimes()
    for requests, tokens in batches(rng, 3000):
        seconds = true_seconds(parts, requests, tokens) * (1 + rng.uniform(-noise, noise))
        times.note(requests, tokens, seconds * (2 if rng.random() < outliers else 1))
    for requests, tokens in batches(random.Random(seed + 1), 200):
        truth = true_seconds(parts, requests, tokens) * (1 + outliers)
        assert abs(said(times, requests, tokens) / truth - 1) < 0.2 + noise, (requests, tokens)


def test_a_machine_that_becomes_slower_is_noticed_and_a_better_day_too():
    times, rng = StepTimes(), random.Random(2)
    parts = 4 * MS, 0.1 * MS, 2e-4 * MS
    for requests, tokens in batches(rng, 1000):
        times.note(requests, tokens, true_seconds(parts, requests, tokens))
    for factor in (1.5, 0.8):
        for n in range(2 * LEAST_SEEN):
            times.note(20, 20000 + 20 * (n % 40), factor * true_seconds(parts, 20, 20000 + 20 * (n % 40)))
        assert said(times, 20, 20800) == pytest.approx(factor * true_seconds(parts, 20, 20800), rel=0.05)
        # Also of a size that has not come since.
        assert said(times, 60, 90000) == pytest.approx(factor * true_seconds(parts, 60, 90000), rel=0.25)


def test_what_requests_waited_for_counts_with_their_next_step():
    times = StepTimes()
    assert times.waits() == 1.0
    for n in range(2 * SEEN):
        times.note(8, 8000, 10 * MS, waited=0 if n % 2 else 5 * MS)
    assert said(times, 8, 8000) == pytest.approx(10 * MS, rel=0.01) and times.waits() == pytest.approx(1.25, rel=0.01)
    assert times.seconds() == pytest.approx(12.5 * MS, rel=0.05)
    assert times.seconds_explained() == pytest.approx(12.5 * MS, rel=0.01)


def test_a_pause_counts_as_some_steps_and_is_forgotten():
    times = StepTimes()
    for _ in range(SEEN):
        times.note(8, 8000, 10 * MS)
    times.note(8, 8000, 30.0)
    assert said(times, 8, 8000) == pytest.approx(10 * MS * (1 + 2 * (MOST_SEEN - 1) / LEAST_SEEN), rel=0.01)
    for _ in range(3 * LEAST_SEEN):
        times.note(8, 8000, 10 * MS)
    assert said(times, 8, 8000) == pytest.approx(10 * MS, rel=0.001)


def test_the_mean_is_of_more_steps_where_answers_are_longer():
    said_after = []
    for answer in (0, 100, 10**6):
        times = StepTimes()
        times.expect(answer)
        for _ in range(2 * SEEN):
            times.note(8, 8000, 20 * MS)
        for _ in range(LEAST_SEEN):
            times.note(8, 8000, 10 * MS)
        said_after.append(said(times, 8, 8000))
    assert 10 * MS < said_after[0] < said_after[1] < said_after[2] < 20 * MS


def test_what_cannot_be_a_step_is_left_out():
    times = StepTimes()
    for requests, tokens, seconds in ((0, 10, 1.0), (1, 10, 0.0), (1, 10, -1.0), (1, 10, math.inf), (1, 10, math.nan)):
        times.note(requests, tokens, seconds)
    assert times.seconds() is None


def test_any_number_of_sizes_costs_as_much():
    times = StepTimes()
    for requests in range(1, 400):
        for tokens in (10, 10**3, 10**5, 10**7, 10**8):
            for _ in range(3):
                times.note(requests, requests * tokens, MS)
    assert len(times._sizes) <= 128
    assert times.most()[0] >= 395


@given(
    decode=st.tuples(*[st.integers(0, 10**13)] * 3),
    rest=st.tuples(st.integers(1, 10**5), *[st.integers(0, 10**9)] * 5),
)
def test_an_estimate_survives_the_way_between_ranks(decode, rest):
    estimate = Estimate(Parts(*decode), *rest)
    figures = estimate.figures()
    assert len(figures) == WIDTH
    assert Estimate.of(figures + [0] * 3) == estimate
    assert Estimate.of([0] * WIDTH) is None
