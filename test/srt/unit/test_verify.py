"""`pd-radix verify`: what it asks, and what it makes of the answers."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli, verify
from sglang_pd_radix.tools.rounding import LEAST_LIMIT, MARGIN, Answer, Difference, difference, limit_of


def answer(tokens, logprobs, likeliest=()) -> Answer:
    return Answer(tuple(tokens), tuple(logprobs), tuple(likeliest))


REFERENCE = answer([1, 2, 3], [-0.1, -0.2, -0.7], [{1: -0.1, 9: -5.0}, {2: -0.2, 9: -4.0}, {3: -0.7, 4: -0.71}])


@pytest.mark.parametrize(
    "other, found",
    [
        (answer([1, 2, 3], [-0.1, -0.2, -0.7]), Difference(0.0)),
        (answer([1, 2, 3], [-0.1, -0.25, -0.7]), Difference(0.05)),
        # Two tokens that are almost as likely, as rounding makes it.
        (answer([1, 2, 4], [-0.1, -0.21, -0.7]), Difference(0.01, 2, 0.01)),
        # A token that was far behind, and one that was not among the likeliest at all.
        (answer([1, 9, 3], [-0.1, -0.2, -0.7]), Difference(0.0, 1, 3.8)),
        (answer([1, 7, 3], [-0.1, -0.2, -0.7]), Difference(0.0, 1, math.inf)),
        (answer([1, 2], [-0.1, -0.2]), Difference(0.0, 2, math.inf)),
        # No number at all, as it is and as JSON has it.
        (answer([1, 2, 3], [-0.1, math.nan, -0.7]), Difference(math.inf)),
        (answer([1, 2, 3], [-0.1, None, -0.7]), Difference(math.inf)),
    ],
)
def test_where_two_answers_part_and_how_far_they_have_drifted(other: Answer, found: Difference) -> None:
    seen = difference(REFERENCE, other)
    assert seen.parted_at == found.parted_at
    assert seen.drift == pytest.approx(found.drift) and seen.behind == pytest.approx(found.behind)


def test_the_limit_is_what_the_noise_says_and_never_nothing() -> None:
    assert limit_of([Difference(0.0)]) == LEAST_LIMIT
    assert limit_of([Difference(0.01), Difference(0.002, 3, 0.02)]) == pytest.approx(MARGIN * 0.02)
    # What was not among the likeliest says nothing of how large rounding is.
    assert limit_of([Difference(0.01, 3, math.inf)]) == pytest.approx(MARGIN * 0.01)


@given(st.integers(0, 2), st.floats(0.2, 5))
def test_wrong_kv_is_not_taken_for_rounding(place: int, moved: float) -> None:
    """Of float32, where two runs agree to 1e-6, and of bf16, where they differ by some hundredths."""
    logprobs = [value - (moved if i >= place else 0) for i, value in enumerate(REFERENCE.logprobs)]
    wrong = difference(REFERENCE, answer(REFERENCE.tokens, logprobs))
    for noise in (Difference(1e-6), Difference(0.02), Difference(0.03, 2, 0.05)):
        assert not wrong.within(limit_of([noise]))


def waves(page: int = 16) -> list[verify.Wave]:
    return verify.Script(range(100, 900), page, seed=3).waves()


@pytest.mark.parametrize("page", [1, 16, 64])
def test_the_script_asks_what_a_cache_can_get_wrong(page: int) -> None:
    found = {wave.name: wave for wave in waves(page)}
    assert waves(page) == waves(page), "the same seed asks the same"
    seen: list[list[int]] = []
    for wave in found.values():
        for prompt, least in zip(wave.prompts, wave.least_held, strict=True):
            common = max((len(common_start(prompt, old)) for old in seen), default=0)
            # What decode must hold is in an earlier prompt, to the page.
            assert least % page == 0 and least <= common
        seen += wave.prompts
    assert any(len(p) % page for p in found["new"].prompts) or page == 1
    assert all(held for wave in ("the same again", "longer", "cut off") for held in found[wave].least_held) or page > 16
    assert len({tuple(p) for p in found["a herd"].prompts}) == 8


def common_start(a: list[int], b: list[int]) -> list[int]:
    return [x for i, (x, y) in enumerate(zip(a, b, strict=False)) if a[: i + 1] == b[: i + 1]]


def judged(on: list[list[Difference]], noise: float = 1e-6) -> verify.Verdict:
    verdict = verify.Verdict({})
    few = [verify.Wave("new", [[1], [2]], [0, 0])]
    verify.judge(verdict, few, [[Difference(noise), Difference(0.0)]], on, "cold cache")
    return verdict


def test_the_verdict_names_the_prompt_that_is_wrong() -> None:
    fine = judged([[Difference(2e-6), Difference(0.0)]])
    assert not fine.failures and "PASSED" in fine.text and "2 of 2 answers" in fine.text
    wrong = judged([[Difference(0.0), Difference(0.3, 4, 2.5)]])
    assert "FAILED" in wrong.text and "new, prompt 2" in wrong.text and "from token 5 on" in wrong.text
    # The same in bf16, where the runs with the flag off part as well.
    assert not judged([[Difference(0.1, 4, 0.1), Difference(0.0)]], noise=0.05).failures


def test_the_verdict_tells_of_a_cache_that_does_not_hold() -> None:
    verdict = verify.Verdict({})
    few = [verify.Wave("longer", [[1] * 40, [2] * 40], [32, 32])]
    verify.judge_reuse(verdict, few, [[32, 16]], [[Difference(0.0)] * 2], 16)
    assert verdict.failures == ["longer, prompt 2: decode held 16 tokens, not 32"]
    assert "48 of 80" in verdict.text


def test_a_chat_that_parts_within_rounding_need_not_be_held_as_the_other_run_went_on() -> None:
    """In half precision decode holds its own answer, and the next prompt has the reference's."""
    first = verify.Wave("chats, turn 1", [[1] * 100, [2] * 100], [0, 0])
    second = verify.Wave("chats, turn 2", [[1] * 150, [2] * 150], [112, 112], follows=True)
    on = [[Difference(0.05, 4, 0.05), Difference(0.0)], [Difference(0.0)] * 2]
    verdict = verify.Verdict({})
    verify.judge_reuse(verdict, [first, second], [[0, 0], [96, 112]], on, 16)
    assert not verdict.failures
    verify.judge_reuse(verdict, [first, second], [[0, 0], [80, 96]], on, 16)
    assert [f.partition(":")[0] for f in verdict.failures] == ["chats, turn 2, prompt 1", "chats, turn 2, prompt 2"]


def test_an_answer_of_the_engine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 3, None]], [[-0.25, 8, None]]],
        "cached_tokens_details": {"decode_prefix": 16},
    }
    monkeypatch.setattr(verify, "http", lambda *a, **k: (200, json.dumps({"meta_info": meta}).encode()))
    found, held = verify.ask("http://x", [1, 2], likeliest=2)
    assert found == Answer((7, 8), (-0.5, -0.25), ({7: -0.5, 3: -1.5}, {8: -0.25})) and held == 16
    monkeypatch.setattr(verify, "http", lambda *a, **k: (500, b"no room"))
    with pytest.raises(PdRadixError, match="HTTP 500: no room"):
        verify.ask("http://x", [1])


@pytest.mark.parametrize(
    "options, env, told",
    [
        (["--json", "/none/of/this/x.json"], {}, "there is no directory"),
        (["--model", "/none/of/this"], {}, "no model"),
        (["--", "--disaggregation-decode-enable-radix-cache"], {}, "remove it"),
        ([], {"SGLANG_PD_RADIX": "0"}, "unset it"),
    ],
)
def test_bad_usage_is_told_at_once(monkeypatch, capsys, options, env, told) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verify.doctor, "diagnose", list)
    monkeypatch.setattr(verify, "_verify", lambda *a: pytest.fail("nothing may be started"))
    assert cli.main(["verify", *options]) == 1
    assert told in "".join(capsys.readouterr())
