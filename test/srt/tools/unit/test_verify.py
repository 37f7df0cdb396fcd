"""`pd-radix verify`: what it asks, what it reads, what it makes of it, and what it says of bad usage."""

from __future__ import annotations

import json
import math
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli, verify
from sglang_pd_radix.tools.bench import deploy
from sglang_pd_radix.tools.progress import Display
from sglang_pd_radix.tools.rounding import Answer, Deviation
from sglang_pd_radix.tools.verification import asking, check, judging
from sglang_pd_radix.tools.verification.asking import ANSWER_TOKENS, Run, Truth
from sglang_pd_radix.tools.verification.judging import Found, Judge, Verdict
from sglang_pd_radix.tools.verification.kv_record import ByTokens, KvDifference, Record, Records
from sglang_pd_radix.tools.verification.script import Script, Wave, tokens_to_hold


def waves(page: int = 16, bigrams: bool = False) -> list[Wave]:
    return Script(range(100, 900), page, 3, bigrams).waves()


def in_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("bigrams", [False, True])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_the_script_asks_what_a_cache_can_get_wrong(page: int, bigrams: bool) -> None:
    found = {wave.name: wave for wave in waves(page, bigrams)}
    assert waves(page) == waves(page), "the same seed asks the same"
    seen: list[list[int]] = []
    for wave in found.values():
        for prompt, least in zip(wave.prompts, wave.least_held, strict=True):
            common = max((in_common(prompt, old) for old in seen), default=0)
            # What decode must hold is in an earlier prompt, to the page.
            assert least % page == 0 and least <= max(0, common - bigrams)
        seen += wave.prompts
    assert any(len(p) % page for p in found["new"].prompts) or page == 1
    assert all(held for wave in ("the same again", "longer", "cut off") for held in found[wave].least_held[2:])
    assert len({tuple(p) for p in found["a herd"].prompts}) == 8


@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_the_pool_holds_all_that_is_asked_again(page: int) -> None:
    script = Script(range(100, 900), page, 3)
    kept = [(len(p) + ANSWER_TOKENS, p) for wave in script.waves() for p in wave.prompts]
    turns = script.questions()
    chats = sum(len(turn[i]) + ANSWER_TOKENS for turn in turns for i in range(4))
    assert tokens_to_hold(page, ANSWER_TOKENS) >= sum(n for n, _ in kept) + chats
    assert verify._pool(["--page-size", str(page)]) > tokens_to_hold(page, ANSWER_TOKENS)
    assert verify._pool(["--page-size", str(page)]) % page == 0


# ---- the verdict

FINE = Deviation(1e-5, 1e-5, 0.0)


def kv(most: float) -> KvDifference:
    return KvDifference(most, 16, 2, "V", 0, 40)


def noise(dtype: str, answers: Deviation, most: float = 1e-6) -> Judge:
    return Judge.of([Found("new", 1, answers, (kv(most),))], dtype)


def flat(verdict: Verdict) -> str:
    """What is printed of it, with its lines joined."""
    return " ".join(verdict.text.split())


def test_the_verdict_is_a_table_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    verdict = Verdict({"sglang": "0.5.10.post1", "model": "m"})
    verdict.part("doctor").lines.append("nothing is wrong")
    verdict.part("cold cache, KV").lines.append("2 tokens")
    assert verdict.text.splitlines()[-1] == "pd-radix verify: PASSED"
    verdict.part("pools")
    assert verdict.sentence == "pd-radix verify: CANNOT BE JUDGED HERE: pools", "it ended before it came to that"
    verdict.part("cold cache, KV").failures.append("new, prompt 2: the KV that decode has is not its tokens'")
    verdict.part("rounding").unknown.append("it is as large as a fault")
    verdict.table["KV of windows"] = judging.Part(["there is no record of it"], left_out=True)
    assert verdict.text.splitlines() == [
        "sglang 0.5.10.post1, model m",
        "part            result      what it means",
        "doctor          ok          nothing is wrong",
        "cold cache, KV  FAILED      new, prompt 2: the KV that",
        "                            decode has is not its tokens'",
        "pools           not done",
        "rounding        not judged  it is as large as a fault",
        "KV of windows   n/a         there is no record of it",
        "pd-radix verify: FAILED: cold cache, KV; pools; rounding",
    ]
    document = json.loads(json.dumps(verdict.document()))
    assert document["lines"] == [
        *("doctor: nothing is wrong", "cold cache, KV: 2 tokens", "KV of windows: there is no record of it"),
    ]
    assert [(row["part"], row["result"]) for row in document["table"]][1] == ("cold cache, KV", "FAILED")
    assert not document["passed"] and document["failures"] == verdict.table["cold cache, KV"].failures


def judged(judge: Judge, *found: Found) -> Verdict:
    verdict = Verdict({})
    judge.judge_noise(verdict)
    judge.judge(verdict, found, "cold cache", same=len(found))
    return verdict


def test_the_verdict_names_the_prompt_that_is_wrong() -> None:
    judge = noise("float32", FINE)
    fine = judged(judge, Found("new", 1, FINE, (kv(1e-6),)), Found("new", 2, FINE, (kv(1e-6),)))
    assert not fine.failures and fine.word == "PASSED" and "2 are the reference's" in flat(fine)
    wrong = judged(judge, Found("new", 1, FINE, (kv(0.0),)), Found("new", 2, Deviation(0.1, 0.01, 0.0), (kv(1e-6),)))
    assert "FAILED" in wrong.text and len(wrong.failures) == 1 and "new, prompt 2" in wrong.failures[0]


@pytest.mark.parametrize("dtype, rounding", [("float32", 1e-5), ("bfloat16", 0.02), ("bfloat16", 0.25)])
def test_a_page_that_the_answer_hardly_shows_is_seen_in_kv(dtype: str, rounding: float) -> None:
    """A page of another prompt in one layer moved 24 tokens by less than rounding may in bf16, 23 times of 24."""
    judge = noise(dtype, FINE, rounding)
    verdict = judged(judge, Found("longer", 3, FINE, (kv(rounding), kv(1.2))))
    assert [f.partition(":")[0] for f in verdict.failures] == ["cold cache, longer, prompt 3"]
    assert "V of token 17 in layer 3, rank 0 is off by 1.2" in verdict.failures[0]
    assert not judged(judge, Found("longer", 3, FINE, (kv(rounding),))).failures


def test_kv_of_which_nothing_is_known_is_not_taken_for_right() -> None:
    judge = noise("float32", FINE)
    assert "left no record" in flat(judged(judge, Found("new", 1, FINE, (kv(0.0),), missing=(1,))))
    assert "left no record" in flat(judged(judge, Found("new", 1, FINE, missing=(-1,))))
    # Where no worker can tell of its KV, answers alone are judged.
    blind = Judge.of([Found("new", 1, FINE)], "float32", has_kv=False)
    assert judged(blind, Found("new", 1, FINE, missing=(-1,))).word == "PASSED"


@pytest.mark.parametrize(
    "answers, most",
    [(Deviation(1.0, 0.1, 0.0), 1e-6), (FINE, 0.5), (FINE, math.inf)],
)
def test_where_rounding_is_as_large_as_a_fault_nothing_is_passed(answers: Deviation, most: float) -> None:
    judge = noise("bfloat16", answers, most)
    verdict = judged(judge, Found("new", 1, FINE, (kv(0.0),)))
    assert verdict.word == "CANNOT BE JUDGED HERE" and verdict.unknown and "not judged" in verdict.text
    # And what is worse is a failure all the same.
    assert judged(judge, Found("new", 1, Deviation(2.9, 0.5, 0.0), (kv(0.0),))).word == "FAILED"


@pytest.mark.parametrize("dtype, many", [("float32", 1.0), ("torch.float32", 1.0), ("bfloat16", 50.0)])
@pytest.mark.parametrize("what", ["most", "rms", "behind", "kv"])
def test_what_is_as_large_as_the_noise_is_no_failure(dtype: str, many: float, what: str) -> None:
    """Above its ceiling the noise once made a run that was like it FAILED, beside CANNOT BE JUDGED."""
    answers, most = {"most": 0.0, "rms": 0.0, "behind": 0.0}, 1e-6
    if what == "kv":
        most = 0.02 * many
    else:
        answers[what] = 0.03 * many
    judge = noise(dtype, Deviation(**answers), most)
    same = Deviation(**{name: 1.2 * value for name, value in answers.items()})
    assert judged(judge, Found("new", 1, same, (kv(1.2 * most),))).word == "CANNOT BE JUDGED HERE"
    # Of twice the noise something can be said.
    worse = Deviation(**{name: 2 * value for name, value in answers.items()})
    assert judged(judge, Found("new", 1, worse, (kv(2 * most),))).word == "FAILED"


def test_a_run_that_is_bit_for_bit_the_other_one_with_the_flag_off_passes() -> None:
    """Both part from the reference at a token that it did not name among its likeliest: neither is wrong."""
    wave = [Wave("new", [[1, 2]], [0])]
    answers = Answer(tuple(range(500, 516)), (-1.0,) * 16)
    score = Answer(answers.tokens, (-1.02,) * 16, tuple({t: -1.02, 9: -1.0} for t in answers.tokens))
    truth = Truth("http://x", Records.__new__(Records), {((1, 2), answers.tokens): score})
    run = Run([[answers]], [[0]], [[{}]])
    found = judging.findings(wave, run, truth)
    judge = Judge.of(found, "bfloat16", has_kv=False)
    assert judged(judge, *found).word == "PASSED"


def test_many_failures_of_a_kind_are_counted() -> None:
    found = [Found("new", n, Deviation(3.0, 1.0, 0.0), (kv(0.0),)) for n in range(1, 31)]
    verdict = judged(noise("float32", FINE), *found)
    assert len(verdict.failures) == judging.MOST_TOLD + 1 and "22 more" in verdict.failures[-1]


def record(tokens: list[int], prompt: int, kv: np.ndarray, rank: int = 0, ranks: int = 1) -> Record:
    return Record(tuple(tokens), prompt, kv, 2, rank, ranks)


def test_answers_and_their_kv_are_found_by_their_tokens() -> None:
    prompt, tokens = [5, 6, 7], (8, 9)
    answer = Answer(tokens, (-1.0, -1.0))
    score = Answer(tokens, (-1.0, -1.2), ({8: -1.0}, {9: -1.2}))
    truth_kv = np.ones((5, 4, 16), dtype=np.float32)
    seen = truth_kv[:4].copy()
    seen[2, 3] = -1.0
    truth = Truth("http://x", Records.__new__(Records), {((5, 6, 7), tokens): score})
    truth.kv = ByTokens({(5, 6, 7, 8, 9): {0: record([5, 6, 7, 8, 9, 1], 5, truth_kv, 0, 2)}})
    run = Run([[answer]], [[0]], [[{0: record([5, 6, 7, 8, 9], 3, seen, 0, 2)}]])
    (found,) = judging.findings([Wave("new", [prompt], [0])], run, truth)
    assert found.deviation.most == pytest.approx(0.2)
    assert found.missing == (1,), "two ranks, of which one has said nothing"
    (difference,) = found.kv
    assert (difference.token, difference.layer, difference.kind) == (2, 1, "V") and difference.most == pytest.approx(2)


# ---- reuse


def answered(*tokens: tuple[int, ...]) -> list[Answer]:
    return [Answer(each, (-1.0,) * len(each)) for each in tokens]


def held(waves: list[Wave], found: list[list[int]], reference: Run | None = None, run: Run | None = None) -> list[str]:
    verdict = Verdict({})
    run = run or Run()
    run.held = found
    judging.judge_reuse(verdict, waves, reference or Run(), run, 16)
    return [failure.partition(":")[0] for failure in verdict.failures]


def test_the_verdict_tells_of_a_cache_that_does_not_hold() -> None:
    few = [Wave("longer", [[1] * 40, [2] * 40], [32, 32])]
    assert held(few, [[32, 16]]) == ["cold cache, longer, prompt 2"]
    assert held(few, [[32, 32]]) == []


def test_a_prompt_that_decode_computes_itself_is_held_but_for_its_last_token() -> None:
    """Once a page less than all of a prompt of whole pages was a failure of the cache."""
    few = [Wave("the same again", [[1] * 32, [2] * 33], [32, 32])]
    for computed, least in (([[0, 0]], 32), ([[16, 17]], 16)):
        assert held(few, [[least, 32]], run=Run(computed=computed)) == []
        names = ["cold cache, the same again, prompt 1", "cold cache, the same again, prompt 2"]
        assert held(few, [[least - 16, 16]], run=Run(computed=computed)) == names


def test_what_was_asked_before_is_held_to_the_page_in_a_warm_run() -> None:
    """Once it was measured there, and not judged."""
    script = Script(range(100, 900), 16, 3)
    few = [Wave("new", [[1] * 40], [0]), Wave("chats, turn 2", [[1] * 90], [0], follows=True)]
    warm = script.warm(few)
    assert [wave.least_held for wave in warm] == [[32], [80]]
    assert held(warm, [[0], [80]]) == ["cold cache, new, prompt 1"]
    assert held(warm, [[32], [80]]) == []
    assert Script(range(100, 900), 16, 3, bigrams=True).warm([Wave("new", [[1] * 32], [0])])[0].least_held == [16]


def test_a_chat_that_parts_within_rounding_need_not_be_held_as_the_other_run_went_on() -> None:
    """In half precision decode holds its own answer, and the next prompt has the reference's."""
    first = Wave("chats, turn 1", [[1] * 100, [2] * 100], [0, 0])
    second = Wave("chats, turn 2", [[1] * 150, [2] * 150], [112, 112], follows=True)
    reference = Run([answered((1, 2, 3, 4, 5), (1, 2, 3, 4, 5)), []])
    run = Run([answered((1, 2, 3, 4, 9), (1, 2, 3, 4, 5)), []])
    assert held([first, second], [[0, 0], [96, 112]], reference, run) == []
    names = ["cold cache, chats, turn 2, prompt 1", "cold cache, chats, turn 2, prompt 2"]
    assert held([first, second], [[0, 0], [80, 96]], reference, run) == names


# ---- the engine, and the command


def test_an_answer_of_the_engine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [[-0.5, token, None] for token in range(ANSWER_TOKENS)]
    meta = {"output_token_logprobs": places, "cached_tokens_details": {"decode_prefix": 16, "decode_computed": 3}}
    monkeypatch.setattr(asking.forced, "http", lambda *a, **k: (200, json.dumps({"meta_info": meta}).encode()))
    found, *tokens = asking.ask("http://x", [1, 2])
    assert found == Answer(tuple(range(ANSWER_TOKENS)), (-0.5,) * ANSWER_TOKENS) and tokens == [16, 3]
    del places[3:]
    with pytest.raises(PdRadixError, match="answered with 3 tokens"):
        asking.ask("http://x", [1, 2])
    monkeypatch.setattr(asking.forced, "http", lambda *a, **k: (500, b"no room"))
    with pytest.raises(PdRadixError, match="HTTP 500: no room"):
        asking.ask("http://x", [1])


def test_each_answer_is_scored_once_and_its_kv_kept(monkeypatch, tmp_path) -> None:
    asked = []

    def score(url, prompt, answer, top, prefill_alone):
        asked.append((tuple(prompt), answer))
        return Answer(answer, (-1.0,) * len(answer))

    monkeypatch.setattr(asking.forced, "score", score)
    records = Records(tmp_path)
    monkeypatch.setattr(records, "take_all_of", lambda wanted, whole: ByTokens({tokens: {} for tokens in wanted}))
    truth = Truth("http://x", records)
    few = [Wave("new", [[1], [2]], [0, 0])]
    truth.learn(few, [Run([answered((3,), (4,))]), Run([answered((3,), (5,))])])
    assert asked == [((1,), (3,)), ((2,), (4,)), ((2,), (5,))] and set(truth.kv) == {(1, 3), (2, 4), (2, 5)}


class FakeDeployment:
    """Two sides, and what is done to them."""

    def __init__(self) -> None:
        self.variants, self.done, self.prefill_urls, self.lossy = ("off", "on"), [], ["prefill"], ""

    def url(self, variant):
        return variant

    def use(self, variant):
        self.done.append(variant)

    def problems(self, variant):
        """Each request of ``lossy`` has lost KV, until the caches are emptied."""
        return [f"{variant}: 16 tokens are lost"] * (self.done[-1] == f"asked {self.lossy}" == f"asked {variant}")


def test_what_is_judged_is_computed_anew(monkeypatch, tmp_path) -> None:
    """Prefill's cache is emptied before it scores; of the side with the flag only what comes before the cold run."""
    deployment, done = FakeDeployment(), []
    monkeypatch.setattr(check, "ask_together", lambda url, *a: deployment.done.append(f"asked {url}") or Run())
    monkeypatch.setattr(check, "ask_alone", lambda url, *a: deployment.done.append(f"asked {url}") or ([], Run()))
    monkeypatch.setattr(Truth, "learn", lambda self, *a: deployment.done.append(f"scored {self.url}"))
    monkeypatch.setattr(check.Judge, "of", lambda *a, **k: done)
    script = Script(range(9), 16, 0)
    one = check.Check(deployment, script, {"dtype": "float32"}, *(Records(tmp_path / n) for n in "abc"))
    one.measure_noise()
    one.empty_on()
    one.ask_on()
    one.ask_on()
    one._learn([])
    expected = ["off", "asked off", "off", "asked off", "off", "scored prefill"]
    assert deployment.done == [*expected, "on", "asked on", "asked on", "off", "scored prefill"]


@pytest.mark.parametrize(("lossy", "looks"), [("off", 2), ("on", 1), ("", 0)])
def test_what_requests_leave_is_seen_before_the_caches_are_emptied(monkeypatch, tmp_path, lossy, looks) -> None:
    deployment, verdict = FakeDeployment(), Verdict({})
    deployment.lossy = lossy
    monkeypatch.setattr(check, "ask_together", lambda url, *a: deployment.done.append(f"asked {url}") or Run())
    monkeypatch.setattr(check, "ask_alone", lambda url, *a: deployment.done.append(f"asked {url}") or ([], Run()))
    monkeypatch.setattr(Truth, "learn", lambda self, *a: None)
    monkeypatch.setattr(check, "findings", lambda *a: [])
    monkeypatch.setattr(check.Judge, "of", lambda *a, **k: SimpleNamespace(judge_noise=lambda v: None))
    monkeypatch.setattr(check.Check, "judge_on", lambda self, *a: self._learn([]))
    records = [Records(tmp_path / name) for name in "abc"]
    verify._judge_answers(
        check.Check(deployment, Script(range(9), 16, 0), {"dtype": "float32"}, *records), verdict, Display()
    )
    assert verdict.failures == [f"{lossy}: 16 tokens are lost"] * looks


@pytest.mark.parametrize(
    "info, may_lack",
    [
        ({}, 0),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 6}, 6),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": None}, 4),
    ],
)
def test_with_speculation_kv_may_end_before_the_last_step(monkeypatch, tmp_path, info, may_lack) -> None:
    given = []
    monkeypatch.setattr(check, "findings", lambda waves, run, truth, may_lack: given.append(may_lack) or [])
    one = check.Check(FakeDeployment(), Script(range(9), 16, 0), info, *(Records(tmp_path / n) for n in "abc"))
    one.waves = []
    one._findings(Run())
    assert given == [may_lack]


@pytest.mark.parametrize(
    "options, env, told",
    [
        (["--json", "/none/of/this/x.json"], {}, "there is no directory"),
        (["--model", "/none/of/this"], {}, "no model"),
        (["--log-dir", "/proc/none/of/this"], {}, "it cannot be made"),
        (["--", "--page-size", "x"], {}, "--page-size x: must be"),
        (["--", "--disaggregation-decode-enable-radix-cache"], {}, "remove it"),
        ([], {"SGLANG_PD_RADIX": "0"}, "unset it"),
    ],
)
def test_bad_usage_is_told_at_once(monkeypatch, capsys, options, env, told) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verify.doctor, "diagnose", lambda: pytest.fail("it takes its time"))
    monkeypatch.setattr(verify, "_verify", lambda *a: pytest.fail("nothing may be started"))
    assert cli.main(["verify", *options]) == 1
    assert told in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "failures, unknown, code", [([], [], 0), (["x"], [], 1), ([], ["rounding"], 1), (["x"], ["rounding"], 1)]
)
def test_only_what_is_passed_exits_with_0(monkeypatch, capsys, tmp_path, failures, unknown, code) -> None:
    monkeypatch.setattr(verify.doctor, "diagnose", list)

    def found(args, model, logs, records, verdict, show):
        verdict.table |= {"KV": judging.Part(["right"], failures), "rounding": judging.Part(["small"], unknown=unknown)}

    monkeypatch.setattr(verify, "_verify", found)
    out = tmp_path / "x.json"
    assert cli.main(["verify", "--json", str(out)]) == code
    assert json.loads(out.read_text())["passed"] is (code == 0)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "PASSED" in line] == ["pd-radix verify: PASSED"] * (code == 0)
    assert said[-1].startswith("pd-radix verify: ")


@pytest.mark.parametrize("backend, other", [("nixl", "mooncake"), ("mooncake", "nixl")])
def test_what_the_run_does_not_use_is_not_judged(monkeypatch, capsys, backend, other) -> None:
    monkeypatch.setattr(verify, "_verify", lambda *a: None)
    for name, code in ((other, 0), (backend, 1), ("engine", 1)):
        fail = verify.doctor.Check(name, "fail", "ImportError: libcudart.so.12", "install it")
        monkeypatch.setattr(verify.doctor, "diagnose", lambda fail=fail: [fail])
        assert cli.main(["verify", "--backend", backend]) == code
        assert ("libcudart" in capsys.readouterr().out) is bool(code)


@pytest.mark.parametrize("late, needed", [("loader", True), ("nixl", True), ("router", False), ("mooncake", None)])
def test_what_doctor_could_not_check_is_named(monkeypatch, capsys, late, needed) -> None:
    """needed: whether the run needs it; None of a backend that it does not use."""
    monkeypatch.setattr(verify, "_verify", lambda *a: None)
    late_one = verify.doctor._of(late, lambda answer: pytest.fail("no answer"), {"late": "no answer within 20 s"})
    monkeypatch.setattr(verify.doctor, "diagnose", lambda: [verify.doctor.Check("python", "ok", "3.11"), late_one])
    assert cli.main(["verify"]) == (1 if needed else 0)
    said = " ".join(capsys.readouterr().out.split())
    # A cell has why something is not judged, or else what was found.
    assert (f"doctor ok nothing is wrong; not checked: {late}" in said) is (needed is False)
    assert (f"doctor not judged doctor: {late}: not checked: no answer within 20 s" in said) is bool(needed)


def test_the_verdict_is_written_though_nobody_reads_it(monkeypatch, tmp_path) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(verify.doctor, "diagnose", list)
    monkeypatch.setattr(verify, "_verify", lambda *given: given[4].part("KV").failures.append("wrong"))
    out = tmp_path / "x.json"
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Closed())
        with pytest.raises(BrokenPipeError):
            verify.run(cli.build_parser("verify").parse_args(["verify", "--json", str(out)]))
    assert json.loads(out.read_text())["failures"] == ["wrong"]


@pytest.mark.parametrize("when", ["starting", "asking", "judging", "passed", "interrupted", "a full disk"])
def test_logs_that_an_error_names_stay(monkeypatch, capsys, tmp_path, when) -> None:
    monkeypatch.setattr(verify.doctor, "diagnose", list)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def found(args, model, logs, records, verdict, show):
        (logs / "decode-0.log").write_text("x")
        records.mkdir()
        if when == "interrupted":
            raise KeyboardInterrupt
        if when == "a full disk":
            raise OSError(28, "No space left on device")
        if when == "asking":
            verdict.setting["model"] = "m"
        if when == "judging":
            verdict.part("KV").failures.append("KV is wrong")
        elif when != "passed":
            raise PdRadixError(f"decode-0 has ended; its log is {logs / 'decode-0.log'}")

    monkeypatch.setattr(verify, "_verify", found)
    assert cli.main(["verify"]) == {"passed": 0, "interrupted": 130}.get(when, 1)
    said = capsys.readouterr()
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ([] if when in ("passed", "interrupted") else ["decode-0.log"])
    assert all(str(path.parent) in said.out + said.err for path in left)
    assert len([*tmp_path.iterdir()]) == len(left)


def test_what_was_found_is_written_when_it_is_interrupted(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(verify.doctor, "diagnose", list)
    found: dict[str, str] = {}

    def ended(args, model, logs, records, verdict, show):
        verdict.setting |= found
        verdict.part("KV").failures.append("KV is wrong")
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_verify", ended)
    out = tmp_path / "x.json"
    assert cli.main(["verify", "--json", str(out)]) == 130 and not out.exists(), "nothing has run"
    found["model"] = "m"
    assert cli.main(["verify", "--json", str(out)]) == 130
    written = json.loads(out.read_text())
    assert written["failures"] == ["KV is wrong"] and written["unknown"] == ["it was interrupted before it was done"]


def test_the_report_says_of_which_workers_the_pages_were_counted(monkeypatch, tmp_path) -> None:
    """A tree of the engine's over several kinds of KV tells nothing of them."""
    rows = ("req_slots", "free_req_slots", "metadata_buffers", "free_metadata_buffers")
    sound = dict.fromkeys(rows, 8) | {"idle": True}
    pages = {"size": 64, "available": 60, "evictable": 4, "protected": 0}
    tree = {"locks_taken": 1, "locks_released": 1, "audit": []}
    made = deploy.Deployment("m", deploy.Shape(500, 20), [], "nixl", tmp_path)
    made.cluster.processes = made.cluster.plan()
    pools = {"prefill-0": sound, "decode-0": sound | pages, "decode-1": sound | pages | tree}
    names = {process.url: process.name for process in made.cluster.processes}
    monkeypatch.setattr(deploy, "idle_pools", lambda url: [pools[names[url]]])
    off, on = made.variants
    assert made.problems(off) == made.problems(on) == []
    line = verify._pools_told(made.counts_pages)
    assert "no lock was left, on decode-0, decode-1;" in line and "prefill-0 does not report its pages" in line
    pools["prefill-0"] = sound | pages
    assert made.problems(on) == []
    assert verify._pools_told(made.counts_pages).endswith("no lock was left, on prefill-0, decode-0, decode-1")


def test_the_last_token_that_answers_share_is_no_pair_of_a_tree_for_speculation() -> None:
    """48 tokens in common, of which a tree with pairs of tokens as keys can match 47: two pages of 16."""
    asked = [Wave("one", [[1] * 40], [0]), Wave("two", [[1] * 40 + [2] * 20], [48], follows=True)]
    reference, run = Run(), Run()
    reference.answers = [answered((2,) * 20), answered((3,))]
    run.answers = [answered((2,) * 8 + (9,) * 12), answered((3,))]
    for bigrams, least in ((False, 48), (True, 32)):
        for tokens, wrong in ((least, 0), (least - 16, 1)):
            verdict, run.held = Verdict({}), [[0], [tokens]]
            judging.judge_reuse(verdict, asked, reference, run, 16, bigrams=bigrams)
            assert len(verdict.failures) == wrong
