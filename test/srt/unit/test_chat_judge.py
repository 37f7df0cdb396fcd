"""What `pd-radix demo` says of runs on a small stand-in, of its faults, and of figures made by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from chat_deployment import PAGE_BYTES, SMALL, Deployment, Silent, Words, compared, hold

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import chat_run, chat_tokens
from sglang_pd_radix.tools.chat_judge import Comparison, compare
from sglang_pd_radix.tools.chat_least import kept_of_answer
from sglang_pd_radix.tools.chat_load import Reply, Workload
from sglang_pd_radix.tools.chat_report import as_document, print_report
from sglang_pd_radix.tools.chat_run import Run, Turn


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Words:
    """What the demo finds as the model's tokenizer; give the same to the deployment."""
    words = Words()
    monkeypatch.setattr(chat_tokens, "load", lambda path: words)
    return words


# ---- bytes ----


@pytest.mark.parametrize(("overlapped", "on_pages"), [(False, 6 + 3 + 4), (True, 6 + 2 + 4)])
def test_a_sound_cache_passes(capsys: pytest.CaptureFixture[str], overlapped: bool, on_pages: int) -> None:
    comparison = compared(overlapped=overlapped)
    assert comparison.failures == comparison.differences == []
    assert comparison.page_bytes == PAGE_BYTES
    assert comparison.over_least == comparison.later_over_due == 1.0
    assert comparison.on.turns[0].reused_tokens == 0
    assert comparison.off.total("prompt_tokens") == comparison.on.total("prompt_tokens") == 3 * (23 + 36 + 49)
    assert comparison.bytes_ratio == pytest.approx((6 + 9 + 13) / on_pages)
    assert comparison.off.total("saved_bytes") == 0 < comparison.on.total("saved_bytes")
    print_report(comparison, "a title")
    shown = capsys.readouterr().out
    assert f"MiB on: {28 / on_pages:.2f}x" in shown and "1.000 times the least possible" in shown
    assert "9 of 9 identical" in shown and "sound on 4 workers" in shown and "FAILED" not in shown
    assert len([line for line in shown.splitlines() if line.strip()[:2] in ("1 ", "2 ", "3 ")]) == 3
    document = json.loads(json.dumps(as_document(comparison, SMALL, {"backend": "nixl"})))
    assert document["identical"] and document["sent_bytes_on_over_least_from_turn_2"] == 1.0
    assert document["runs"]["on"]["turns"][2]["turn"] == 3
    assert sum(turn["least"] for turn in document["pages_of_turns"]) == 3 * on_pages
    assert document["runs"]["off"]["totals"]["sent_bytes"] == comparison.off.total("sent_bytes")


# Prompt tokens of the documented chat: 4 clients, 5 turns, answers of 16 tokens, pages of 16.
PROMPTS, ANSWER, PAGE_SIZE, PAGE_OF_KV = (1008, 1094, 1180, 1266, 1352), 16, 16, 256 * 1024


def _documented(kind: str, page_size: int = PAGE_SIZE, answer: int = ANSWER, loose: int = 0) -> Run:
    """The documented chat with the flag ``off``, and on: ``sound``, or what a cache with a fault would send."""
    run = Run(1.0, page_size, "float32", "cpu", True, loose=loose)
    held = 0
    for number, prompt in enumerate(PROMPTS):
        have = held // page_size
        if kind == "missing" and number == 3:
            have += 1
        sent = 4 * (-(-prompt // page_size) - have) * PAGE_OF_KV
        replies = [Reply("x", prompt, answer, 1.0, 2.0)] * 4
        reused = 4 * have * page_size
        run.turns.append(Turn(4 * prompt, reused, 4 * prompt - reused, sent, 0, replies))
        kept = {
            "off": 0,
            "no answer": prompt,
            "no prompt": 0,
            "no answer from turn 4 on": prompt + (kept_of_answer(answer, True) if number < 3 else 0),
            "speculation": prompt + answer - 3,
        }
        held = kept.get(kind, prompt + kept_of_answer(answer, True))
    return run


def test_the_documented_chat_has_the_documented_bytes() -> None:
    comparison = compare(_documented("off"), _documented("sound"))
    assert comparison.failures == comparison.notes == []
    assert (comparison.off.total("sent_bytes"), comparison.on.total("sent_bytes")) == (371 * 2**20, 84 * 2**20)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        # All of it is 1.048 times the least of the whole chat, of which the first turn is most.
        ("no answer", "turns 2 to 5: earlier answers are not reused: 25.0 MiB were sent, the least possible is 21.0"),
        ("no answer from turn 4 on", "turn 5: earlier answers are not reused: 6.0 MiB were sent, the least possible"),
        ("no prompt", "turns 2 to 5: earlier prompts are not reused: 308.0 MiB were sent, the least possible is 21.0"),
        ("missing", "turn 4: fewer KV bytes are counted than any cache has to send: 5.0 MiB were sent, the least"),
    ],
)
def test_each_part_of_what_the_tree_is_for_is_judged_by_itself(kind: str, told: str) -> None:
    failures = compare(_documented("off"), _documented(kind)).failures
    assert failures[0].startswith(told)
    assert all("times the least possible was sent from turn 2 on, above 1.05" in more for more in failures[1:])


def test_what_a_tree_for_speculation_leaves_out_is_no_fault() -> None:
    assert compare(_documented("off"), _documented("speculation")).failures != []
    comparison = compare(_documented("off"), _documented("speculation", loose=5))
    assert comparison.failures == []
    assert compare(_documented("off"), _documented("no prompt", loose=5)).failures != []


def test_answers_that_fill_no_page_are_said_not_to_show() -> None:
    off, on = (_documented(kind, page_size=300) for kind in ("off", "no answer"))
    (note,) = compare(off, on).notes
    assert note.startswith("whether answers are reused cannot be told: those of 16 tokens end no page of 300")
    assert compare(off, on).failures == []
    assert compare(off, _documented("no prompt", page_size=300)).failures[0].startswith("turns 2 to 5: earlier prompts")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("keeps_no_answer", "turns 2, 3: earlier answers are not reused"),
        ("keeps_no_prompt", "turns 2, 3: earlier prompts are not reused"),
    ],
)
def test_a_cache_that_forgets_fails(fault: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compared(**{fault: True})
    assert comparison.failures[0].startswith(told)
    print_report(comparison, "a title")
    assert f"FAILED:   {told}" in capsys.readouterr().out


def test_sending_too_much_fails_in_every_turn() -> None:
    failures = compared(extra_pages=1).failures
    assert failures[0].startswith("with the flag on, turn 1 took")
    assert any("times the least possible was sent from turn 2 on, above 1.05" in failure for failure in failures)


def test_a_template_that_rewrites_answers_is_not_the_caches_fault(tokenizer: Words) -> None:
    tokenizer.rewrites = True
    off, on = hold(False, words=tokenizer), hold(True, words=tokenizer)
    assert compare(off, on).failures != []
    on.find_ids(SMALL, "model")
    comparison = compare(off, on)
    assert comparison.failures == []
    # Of each of 3 clients the 4 of the first answer, then these with the 9 of the second message and another 4.
    assert any(note.startswith("63 prompt tokens that follow the earlier chat are not") for note in comparison.notes)
    # And a cache that keeps no prompt fails all the same.
    on = hold(True, words=tokenizer, keeps_no_prompt=True)
    on.find_ids(SMALL, "model")
    assert any("earlier prompts are not reused" in failure for failure in compare(off, on).failures)


def test_a_pool_without_room_is_named() -> None:
    notes = compared(keeps_no_prompt=True, pool_size=100).notes
    assert any("room for 100 tokens, and the conversations have 159" in note for note in notes)
    assert not any("room for" in note for note in compared(keeps_no_prompt=True).notes + compared(pool_size=100).notes)


def test_a_leaking_pool_fails() -> None:
    assert compared(pool={"locks_released": 4}).failures == ["flag on: decode-0: 5 locks were taken and 4 released"]


def test_reuse_with_the_flag_off_fails() -> None:
    assert "with the flag off, decode reused part of a prompt" in compare(hold(True), hold(True)).failures


@pytest.mark.parametrize(("slower", "noted"), [(1.05, False), (1.3, True), (0.7, True)])
def test_a_busy_machine_is_noticed_in_the_first_turn(slower: float, noted: bool) -> None:
    off, on = hold(False), hold(True)
    for run, ttft in ((off, 1.0), (on, slower)):
        run.turns[0].replies = [dataclasses.replace(reply, ttft_s=ttft) for reply in run.turns[0].replies]
    notes = compare(off, on).notes
    assert [note.startswith("turn 1 is the same work in both runs") for note in notes] == [True] * noted


def test_one_turn_has_nothing_to_reuse(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compared(Workload(clients=2, turns=1, document=20, answer=4))
    assert comparison.failures == [] and comparison.bytes_ratio == 1.0
    print_report(comparison, "a title")
    assert "from turn 2 on" not in capsys.readouterr().out


def test_a_run_without_the_flag_that_counts_no_bytes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """As where its KV goes another way than the one that is counted; it once ended in a division by zero."""
    off, on = _documented("off"), _documented("sound")
    for turn in off.turns:
        turn.sent_bytes = 0
    comparison = compare(off, on)
    (failure,) = comparison.failures
    assert failure.startswith("with the flag off, no KV bytes were counted")
    print_report(comparison, "a title")
    assert f"FAILED:   {failure}" in capsys.readouterr().out
    json.dumps(as_document(comparison, SMALL, {}), allow_nan=False)
    assert len(compare(off, off).failures) == 1


# ---- answers ----


def test_other_answers_fail_and_show_where(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compared(answers={1: [2], 2: [2]})
    assert comparison.failures[0] == "6 answers are not identical"
    assert comparison.differences[0].startswith("turn 2, client 1: the answers part after 13 characters, off ")
    assert comparison.differences[0].endswith('off "...w36.0 w36.1 w36.2 w36.3", on "...w36.0 w36.1 other2 w36.3"')
    print_report(comparison, "a title")
    shown = capsys.readouterr().out
    assert "3 of 9 identical" in shown and "FAILED:   6 answers are not identical" in shown
    assert "turn 3, client 3" in shown


def _rounded(words: Words, noise: float = 0.05, **faults: Any) -> Comparison:
    """In bfloat16, where decode says ``noise`` nats other than prefill with the flag off."""
    off = hold(False, dtype="bfloat16", words=words, rounds=noise)
    return compare(off, hold(True, **{"dtype": "bfloat16", "words": words, "rounds": noise, **faults}))


def test_a_token_as_likely_is_rounding(tokenizer: Words) -> None:
    """All clients part in their first answer, by what rounding allows; all that follows is right."""
    comparison = _rounded(tokenizer, answers={0: [1]}, behind=0.1)
    assert len(comparison.differences) == 3 and comparison.rounding_limit == pytest.approx(0.15)
    assert not any("log-prob" in failure for failure in comparison.failures)
    assert any("3 conversations part from those with the flag off" in note for note in comparison.notes)
    assert any("log-probabilities of 9 answers are at most 0.05 off" in note for note in comparison.notes)


def test_nonsense_behind_a_token_as_likely_is_seen(tokenizer: Words) -> None:
    """The first answers part within rounding. What is said in the later turns is judged all the same."""
    words, likely = tokenizer, {0: [1]}
    off = hold(False, dtype="bfloat16", words=words, rounds=0.05)
    on = hold(True, dtype="bfloat16", words=words, rounds=0.05, answers=likely, behind=0.1)
    assert compare(off, on).failures == []
    assert on.scores is not None
    for turn, scores in list(zip(on.turns, on.scores, strict=True))[1:]:
        for client, (reply, scored) in enumerate(zip(turn.replies, scores, strict=True)):
            assert reply.answer and scored
            # Decode and prefill agree on how unlikely these tokens are: they were not the likeliest.
            scores[client] = dataclasses.replace(scored, logprobs=(-30.0,) * 4)
            turn.replies[client] = dataclasses.replace(
                reply, answer=dataclasses.replace(reply.answer, logprobs=(-30.0,) * 4)
            )
    (failure,) = compare(off, on).failures
    assert "6 answers beyond that, the first in turn 2 of client 1" in failure


def test_log_probabilities_that_drift_fail_though_every_token_is_the_same(tokenizer: Words) -> None:
    assert _rounded(tokenizer, rounds=0.14).failures == []
    (failure,) = _rounded(tokenizer, rounds=0.16).failures
    assert (
        "log-probabilities of 9 answers are at most 0.16 off" in failure and "(limit 0.15). 9 answers beyond" in failure
    )


def test_an_unlikely_token_fails(tokenizer: Words) -> None:
    assert _rounded(tokenizer, answers={1: [3]}, behind=0.29).failures == []
    (failure,) = _rounded(tokenizer, answers={1: [3]}, behind=0.31).failures
    assert "a token is 0.31 behind the likeliest (limit 0.3)" in failure and "3 answers beyond that" in failure


def test_a_run_with_the_flag_off_that_is_no_measure_fails(tokenizer: Words) -> None:
    (failure,) = _rounded(tokenizer, noise=1.5).failures
    assert "with the flag off: answers without any cache on decode differ by up to 1.5 nats" in failure


def test_what_nobody_can_judge_is_no_pass(monkeypatch: pytest.MonkeyPatch, tokenizer: Words) -> None:
    """Without the ids of the tokens, what follows a parting could be anything."""

    def none(path: str) -> Words:
        raise PdRadixError("its tokenizer has no chat template")

    monkeypatch.setattr(chat_tokens, "load", none)
    assert _rounded(tokenizer).failures == []
    (failure,) = _rounded(tokenizer, answers={0: [1]}).failures
    assert "3 conversations part" in failure and "9 of 9 answers could be compared with nothing: its" in failure
    (failure,) = _rounded(tokenizer, answers={2: [1]}).failures
    assert "and 3 of 9 answers could be compared with nothing" in failure


def test_a_router_that_hands_on_no_scores_is_named(tokenizer: Words) -> None:
    (failure,) = _rounded(tokenizer, answers={0: [1]}, scores_nothing=True).failures
    assert "could be compared with nothing" in failure and "scored 0 tokens" in failure


# ---- the run ----


def test_in_float32_nothing_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_run, "score", None)
    assert hold(True).scores is None


def test_a_dead_worker_is_the_answer_to_a_failed_request() -> None:
    deployment = Deployment(cached=True, status=500)

    def dead() -> None:
        raise PdRadixError("decode-0 exited with code 1")

    deployment.check = dead  # type: ignore[method-assign]
    with pytest.raises(PdRadixError, match="decode-0 exited"):
        chat_run.hold(deployment, "on", SMALL, Silent())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("info", "loose"),
    [({}, 0), ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 6}, 7)],
)
def test_speculation_is_asked_for(info: dict[str, Any], loose: int) -> None:
    assert hold(True, info=info).loose == loose
