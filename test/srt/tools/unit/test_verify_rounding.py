"""Whether answers differ by more than rounding, scored to their end."""

from __future__ import annotations

import math

import pytest

from sglang_pd_radix.tools.rounding import (
    LEAST_LIMIT,
    MARGIN,
    Answer,
    Deviation,
    Limits,
    deviation,
)


def answer(tokens, logprobs, likeliest=()) -> Answer:
    return Answer(tuple(tokens), tuple(logprobs), tuple(likeliest))


def scored(logprobs, likeliest) -> Answer:
    """Of tokens 0, 1, ...; likeliest: the log-probability of the likeliest of each place, which is another token."""
    tokens = range(len(logprobs))
    places = [{token: own, 99: best} for token, own, best in zip(tokens, logprobs, likeliest, strict=True)]
    return answer(tokens, logprobs, places)


def test_a_scored_answer_is_compared_to_its_end() -> None:
    made = answer(range(4), [-1.0, -1.0, -1.0, -2.0])
    found = deviation(made, scored([-1.0, -1.0, -1.3, -1.6], [-1.0, -0.9, -1.3, -1.6]))
    assert found.most == pytest.approx(0.4) and found.rms == pytest.approx(0.25) and found.behind == pytest.approx(0.1)


@pytest.mark.parametrize("none", [math.nan, None])
def test_what_is_no_number_is_no_rounding(none) -> None:
    fine = scored([-1.0], [-1.0])
    assert deviation(answer([0], [none]), fine).most == math.inf
    limits = Limits.of([Deviation(1e-6, 1e-6, 0.0)], "float32")
    for nowhere in (Deviation(math.nan, 0, 0), Deviation(0, math.nan, 0), Deviation(0, 0, math.nan)):
        assert limits.beyond(nowhere) is not None
    assert deviation(answer([0], [-1.0]), answer([0], [-1.0], [{0: none}])).behind == math.inf


def test_a_score_of_other_tokens_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="tokens of the answer"):
        deviation(answer([0], [-1.0]), answer([1], [-1.0]))


def test_nonsense_behind_a_place_where_two_tokens_are_alike_is_found() -> None:
    """It parts at its first token within rounding and is nonsense from the second on, where nothing was compared."""
    off = scored([-1.05, *[-1.0] * 15], [-1.0] * 16)
    nonsense = answer(range(16), [-1.0, *[-30.0] * 15])
    limits = Limits.of([Deviation(0.05, 0.02, 0.03)], "bfloat16")
    assert limits.beyond(deviation(answer(range(16), [-1.0] * 16), off)) is None
    assert "off by up to 29" in (limits.beyond(deviation(nonsense, off)) or "")


def test_a_token_that_is_far_from_the_likeliest_is_found_though_its_own_log_probability_is_right() -> None:
    limits = Limits.of([Deviation(0.05, 0.02, 0.03)], "bfloat16")
    assert limits.beyond(deviation(answer([0], [-3.0]), scored([-3.0], [-0.5]))) is not None
    # Two tokens that may each be off by rounding.
    assert limits.beyond(deviation(answer([0, 1], [-1.0, -1.0]), scored([-1.0, -1.05], [-1.0, -0.8]))) is None


def test_the_limit_is_what_the_noise_says_below_the_ceiling() -> None:
    limits = Limits.of([Deviation(0.01, 0.002, 0.0), Deviation(0.002, 0.004, 0.02)], "bfloat16")
    assert limits.most == pytest.approx(MARGIN * 0.01) and limits.rms == pytest.approx(MARGIN * 0.004)
    assert Limits.of([Deviation(0.0, 0.0, 0.0)], "float32").most == LEAST_LIMIT
