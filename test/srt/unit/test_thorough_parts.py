"""The parts of `pd-radix verify --thorough`: that their commands are ones that there are, and what results come to."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import chaos
import pytest
from bench_documents import a_document

from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.arguments import join_values
from sglang_pd_radix.tools.bench import command as bench
from sglang_pd_radix.tools.bench import report
from sglang_pd_radix.tools.cluster import option_value
from sglang_pd_radix.tools.doctor import Check
from sglang_pd_radix.tools.thorough import host, parts, readings, runner, storm
from sglang_pd_radix.tools.thorough.child import Ended
from sglang_pd_radix.tools.thorough.host import Gpu, Host
from sglang_pd_radix.tools.thorough.outcome import FAILED, PASSED, UNJUDGED
from sglang_pd_radix.tools.thorough.runner import Done
from sglang_pd_radix.tools.thorough.setting import Setting

ROOT = Path(__file__).parents[3]
GPUS = (Gpu("0", "H100", 81559), Gpu("1", "H100", 81559))
SETTINGS = {
    "two GPUs": Setting(Host(False, GPUS, ROOT, True), Path("/models")),
    "a small GPU without a checkout": Setting(Host(False, (Gpu("0", "L4", 23034),)), Path("/models")),
    "in small": Setting(Host(True, (), ROOT, True), Path("/models")),
    "a model": Setting(
        Host(False, GPUS, ROOT, True),
        Path("/models"),
        "org/model",
        "mooncake",
        "smg",
        ["--tp", "2", "--attention-backend", "fa3", "--page-size", "64"],
    ),
}


def commands(setting: Setting, name: str) -> list[list[str]]:
    (part,) = parts.parts(setting, [name])
    return [[*step.command] for step in part.steps(Path("/parts") / name, 300.0)]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", parts.NAMES)
def test_every_command_is_one_that_there_is(name, setting):
    (part,) = parts.parts(setting, [name])
    if part.needs():
        return
    for python, *words in commands(setting, name):
        assert python == sys.executable
        if words[1] == "sglang_pd_radix.tools.cli":
            args = cli.build_parser(words[2]).parse_args(join_values(words[2:]))
            if words[2] == "bench":
                bench.chosen_sizes(args), bench.chosen_sides(args)
            given = getattr(args, "engine_options", [])
            if "--tp" in setting.engine_options and words[2] != "make-model":
                page = "1" if name == "linear" else "64"
                assert option_value(given, "--tp") == "2" and option_value(given, "--page-size") == page
                exact = words[2] == "demo"
                assert option_value(given, "--attention-backend") == ("triton" if exact else "fa3")
        elif words[0].endswith("chaos.py"):
            assert Path(words[0]).is_file()
            given = chaos.parse(words[1:]).options
            assert "--dtype float32" in given and "triton" in given and "fa3" not in given
            assert {word for word in setting.engine_options if word != "fa3"} <= set(given.split())
        elif words[1] == "pytest":
            assert Path(words[-1]).is_file()
        else:
            assert words[:2] == ["-m", "sglang_pd_radix.tools.thorough.storm"]


def test_what_each_host_is_asked():
    two, l4, small, own = SETTINGS.values()
    missing = {name: [part.name for part in parts.parts(s) if part.needs()] for name, s in SETTINGS.items()}
    assert missing == {
        "two GPUs": [],
        "a small GPU without a checkout": ["kernels", "placement"],
        "in small": ["placement"],
        "a model": ["mooncake"],
    }
    # Workers that start one after the other take longer, so fewer parts have room.
    least = [sum(p.least_s for p in parts.parts(s, ["exactness", "shared"])) for s in (two, l4, small, own)]
    assert least[1] == least[3] == 2 * least[0] > least[2]
    # Exactness is a matter of float32 in torch's layers; on a CPU it is float32 anyway.
    (step,) = (s for s in parts.parts(two, ["exactness"])[0].steps(Path("/p"), 300) if s.name == "chat")
    assert step.environment == (("SGLANG_TORCH_LAYERS", "1"),)
    assert option_value(step.command, "--mem-fraction-static") == "0.8", "they start together"
    assert option_value(commands(l4, "exactness")[-1], "--mem-fraction-static") is None
    assert option_value(commands(own, "exactness")[-1], "--mem-fraction-static") is None
    for setting in (small, two):
        assert option_value(commands(setting, "rounding")[-1], "--dtype") == "bfloat16"
    # Nor is there a float32 kernel for chunks of linear attention on a GPU.
    for name in ("mla", "linear"):
        assert "verify" in commands(two, name)[-1] and option_value(commands(two, name)[-1], "--dtype") == "bfloat16"
        assert "demo" in commands(small, name)[-1]
    assert option_value(commands(own, "rounding")[-1], "--dtype") is None, "the model's own"
    # The engine would make float16 of a made model.
    assert option_value(commands(two, "shared")[-1], "--dtype") == "bfloat16"
    assert option_value(commands(own, "shared")[-1], "--dtype") is None
    # Another backend than Triton reads nothing once.
    assert any("shared:SGLANG_TRITON" in word for word in commands(two, "shared")[-1])
    assert not any("--compare" in word for word in commands(own, "shared")[-1])
    visible = [
        dict(step.environment).get("CUDA_VISIBLE_DEVICES")
        for step in parts.parts(two, ["placement"])[0].steps(Path("/p"), 300)
    ]
    assert visible == [None, "0", "0,1"]
    bounds = [option_value(command, "--max-running-requests") for command in commands(small, "exchange")]
    assert bounds == list(parts.SMALL_BOUNDS)


def test_no_option_of_the_user_makes_another_part_of_one():
    given = ["--max-running-requests", "64", "--page-size", "64", "--speculative-algorithm", "EAGLE3"]
    draft = ["--speculative-draft-model-path=/data/draft", "--speculative-num-steps", "5", "--tp", "2"]
    setting = Setting(Host(False, GPUS, ROOT, True), Path("/models"), "org/model", engine_options=[*given, *draft])
    bounds = [option_value(command, "--max-running-requests") for command in commands(setting, "exchange")]
    assert bounds == list(parts.BOUNDS)
    eagle, linear = commands(setting, "eagle")[-1], commands(setting, "linear")[-1]
    assert option_value(eagle, "--speculative-draft-model-path") == "/models/eagle/draft"
    assert [eagle.count(name) for name in ("--speculative-algorithm", "--speculative-num-steps")] == [1, 1]
    assert option_value(linear, "--page-size") == "1" and linear.count("--page-size") == 1
    # A draft is of the model that the user has given, and of no made one.
    for name in parts.NAMES:
        drafted = any("/data/draft" in word for command in commands(setting, name) for word in command)
        assert drafted == (name in ("exactness", "rounding", "shared", "exchange", "chat", "placement")), name
        if name != "kernels":
            assert any("--tp" in word for word in commands(setting, name)[-1])


def test_no_secret_is_in_a_command_of_the_report():
    secret = ["--api-key", "SECRET", "--speculative-draft-model-path", "/home/me/draft", "--chat-template=/home/me/x"]
    setting = Setting(Host(False, GPUS, ROOT, True), Path("/models"), "org/model", engine_options=secret)
    for part in parts.parts(setting):
        for step in part.steps(Path("/parts") / part.name, 600.0) if not part.needs() else ():
            told = runner.as_typed(step, Path("/parts") / part.name)
            assert "SECRET" not in told and "/home/me" not in told, told
            assert "--api-key" in told or step.name in ("make-model", "pytest")


def test_optional_libraries_are_what_doctor_says():
    found = host.look([Check("mooncake", "warn", "installed, but it lacks libibverbs", "apt-get install")])
    assert found.mooncake == "installed, but it lacks libibverbs; apt-get install"
    assert host.look([Check("mooncake", "ok", "loads; transfers over TCP", "")]).mooncake == ""
    assert host.checkout(Path(host.__file__)) == ROOT
    assert host.checkout(Path("/usr/lib/python3/site-packages/sglang_pd_radix/tools/thorough/host.py")) is None


# ---- readings


def done(tmp_path, file: str = "", document: object = None, name: str = "only", **ended) -> Done:
    result = tmp_path / name
    (result / "report").mkdir(parents=True, exist_ok=True)
    if isinstance(document, str):
        (result / file).write_text(document)
    elif document is not None:
        (result / file).write_text(json.dumps(document))
    (result / "log").write_text("Traceback\npd-radix: GPU out of memory\n")
    code = 1 if document is None else 0
    return Done(name, [], Ended(**{"code": code, "seconds": 1.0, **ended}), result)


READERS = {
    "verify": readings.verify,
    "demo": readings.demo,
    "bench": lambda steps: readings.bench(steps, ("ttft",)),
    "exchange": readings.exchange,
    "placement": readings.placement,
    "tests": readings.tests,
    "storm": readings.storm,
    "chaos": readings.chaos,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_command_without_a_result_has_crashed_or_was_stopped(read, tmp_path):
    crashed = read([done(tmp_path)])
    assert crashed.verdict == FAILED and "GPU out of memory" in crashed.why and crashed.tail
    assert read([done(tmp_path, stopped="stopped after 3 s")]).verdict == UNJUDGED


def test_verify_is_read(tmp_path):
    found = {"setting": {"dtype": "bfloat16"}, "lines": ["a line"], "failures": [], "unknown": []}
    assert readings.verify([done(tmp_path, readings.VERIFY, found)]).verdict == PASSED
    unknown = readings.verify([done(tmp_path, readings.VERIFY, {**found, "unknown": ["rounding is too large"]})])
    assert (unknown.verdict, unknown.why) == (UNJUDGED, "rounding is too large")
    wrong = readings.verify(
        [done(tmp_path, readings.VERIFY, {**found, "failures": ["KV", "KV too"], "unknown": ["x"]})]
    )
    assert (wrong.verdict, wrong.why) == (FAILED, "KV (and 1 more)") and "FAILED: KV too" in wrong.lines


def test_a_benchmark_is_read(tmp_path):
    found = readings.bench([done(tmp_path, readings.BENCH, a_document(), code=0)], ("ttft", "running", "none such"))
    assert found.verdict == PASSED and [table.title for table in found.tables][0] == "Over all"
    assert len(found.pictures) == 2 and all("<svg" in picture.svg for picture in found.pictures)
    wrong = a_document()
    wrong["workloads"][0]["problems"] = ["on, run 1: decode-1: 16 tokens of KV are lost"]
    assert "KV are lost" in readings.bench([done(tmp_path, readings.BENCH, wrong)], ()).why
    # As it is in JSON, which has no NaN.
    unknown = json.loads(report.as_json(a_document()))
    assert unknown["workloads"][0]["ratios"]["on"]["running_max"]["worst"] is None
    again = readings.bench([done(tmp_path, readings.BENCH, unknown, code=0)], ("ttft", "running", "none such"))
    assert again.tables == found.tables


def test_that_a_side_is_left_out_is_told(tmp_path):
    two, *_, own = SETTINGS.values()
    (part,) = parts.parts(two, ["shared"])

    def read(setting: Setting, **more):
        one = done(tmp_path, readings.BENCH, a_document(), "bench", **more)
        return part.read([dataclasses.replace(one, command=commands(setting, "shared")[-1])])

    whole = read(two)
    assert (whole.verdict, whole.why) == (PASSED, "") and "left out" not in str(whole.lines)
    found = read(own)
    assert found.verdict == PASSED and "without the side that reads once" in found.why and "it is fa3" in found.why
    assert found.why in found.lines and found.pictures
    wrong = a_document()
    wrong["workloads"][0]["problems"] = ["KV are lost"]
    one = done(tmp_path, readings.BENCH, wrong, "bench")
    failed = part.read([dataclasses.replace(one, command=commands(own, "shared")[-1])])
    assert failed.verdict == FAILED and "KV are lost" in failed.why and found.why in failed.lines


def test_a_benchmark_that_does_not_tell_of_all_workloads_has_failed(tmp_path):
    half = dataclasses.replace(done(tmp_path, readings.BENCH, a_document(), code=1), command=["bench", "--only", "a,i"])
    found = readings.bench([half], ())
    assert found.verdict == FAILED and "exit status 1 and without (i): GPU out of memory" in found.why
    assert found.tables, "what there is of it is told"
    stopped = dataclasses.replace(half, ended=Ended(-2, 1.0, "stopped after 1 s"))
    assert readings.bench([stopped], ()).verdict == PASSED, "the runner says that it was stopped"


@pytest.mark.parametrize("name", ["exchange", "placement"])
def test_the_first_of_several_benchmarks_that_crashed_is_told(name, tmp_path):
    well = done(tmp_path, readings.BENCH, a_document(), "well")
    crashed = done(tmp_path, name="first")
    late = done(tmp_path, name="late", stopped="stopped after 3 s")
    for more in (well, late):
        found = READERS[name]([crashed, more])
        assert found.verdict == FAILED and found.why.startswith("first ended with exit status 1 and without a result")
    with_figures = done(tmp_path, readings.BENCH, a_document(), "figures", code=-11)
    found = READERS[name]([with_figures, well])
    assert found.verdict == FAILED and "figures ended with exit status -11" in found.why
    nothing = done(tmp_path, readings.BENCH, {**a_document(), "workloads": []}, "nothing", code=1)
    assert READERS[name]([nothing, well]).why.startswith("nothing ended with exit status 1")


def bounded(requests_per_s: dict[str, float], itl_s: dict[str, float]) -> dict:
    document = a_document()
    for side, of in document["workloads"][0]["summary"].items():
        of["requests_per_s"]["median"], of["itl_mean_s"]["median"] = requests_per_s[side], itl_s[side]
    return document


def test_the_exchange_of_itl_for_requests(tmp_path):
    few = bounded({"off": 5, "on": 6}, {"off": 0.010, "on": 0.010})
    many = bounded({"off": 10, "on": 26}, {"off": 0.020, "on": 0.050})
    steps = [done(tmp_path, readings.BENCH, few, "16"), done(tmp_path, readings.BENCH, many, "256")]
    found = readings.exchange([done(tmp_path, name="make-model"), *steps])
    assert found.verdict == PASSED and found.lines[0] == "2 bounds of 2"
    # At 20 ms, a quarter of the way from 6 to 26: 11 over 10.
    assert "at off's mean ITL of 20.0 ms: 1.10 times its requests/s (11.00 and 10.00" in "\n".join(found.lines)
    assert len(found.tables[0].rows) == 4 and "off" in found.pictures[0].svg
    # One that was stopped is not there; one that crashed is a failure.
    part = readings.exchange([steps[0], done(tmp_path, name="48", stopped="stopped after 3 s")])
    assert part.verdict == PASSED and part.lines[0] == "1 bounds of 2"
    assert readings.exchange([steps[0], done(tmp_path, name="48")]).verdict == FAILED
    apart = {"off": [(1.0, 0.5)], "on": [(1.0, 0.1), (2.0, 0.2)]}
    assert readings.at_equal(apart) == [
        "no mean ITL of off lies between two of on's, so there is none at which they can be compared"
    ]


def test_both_placements_are_needed(tmp_path):
    steps = [done(tmp_path, readings.BENCH, a_document(), name) for name in ("same-gpu", "another-gpu")]
    found = readings.placement(steps)
    assert found.verdict == PASSED and [row[:2] for row in found.tables[0].rows][2] == ["another-gpu", "off"]
    assert readings.placement([steps[0], done(tmp_path, name="lost")]).verdict == FAILED


def junit(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_tests_that_were_skipped_have_not_passed(tmp_path):
    well, left = "<testcase name='a'/>", "<testcase name='b'><skipped message='no GPU'/></testcase>"
    wrong = "<testcase name='c'><failure message='assert 1 == 2&#10;more'/></testcase>"

    def read(*cases: str, code: int = 0):
        return readings.tests([done(tmp_path, readings.PYTEST, junit(*cases), code=code)])

    assert read(well).verdict == PASSED and read().verdict == UNJUDGED
    assert read(well, left).verdict == UNJUDGED and "no GPU" in read(well, left).why
    assert (read(well, wrong).verdict, read(well, wrong).why) == (FAILED, "c: assert 1 == 2")
    assert read(well, code=3).verdict == FAILED


def test_a_chaos_that_was_too_short_for_growth_is_judged_by_the_rest(tmp_path):
    storm = {"requests": 90, "seconds": 60.0, "ended": {"whole": 80, "failed": 10}}
    found = {"problems": [], "not_judged": ["growth"], "judged": ["pace 1.0"], "storm": storm, "events": [1]}
    open_ = readings.chaos([done(tmp_path, readings.STORM, found)])
    assert (open_.verdict, open_.why) == (UNJUDGED, "growth"), "which is of growth, chaos says"
    found["growth_not_judged"] = ["growth"]
    never = readings.chaos([done(tmp_path, readings.STORM, {**found, "not_judged": ["growth", "kill of decode-0"]})])
    assert (never.verdict, never.why) == (UNJUDGED, "kill of decode-0")
    ended = {**found, "problems": ["ended by signal 2"], "ended": "ended by signal 2"}
    assert readings.chaos([done(tmp_path, readings.STORM, ended)]).verdict == UNJUDGED
    ended["problems"] = ["wrong", *ended["problems"]]
    assert readings.chaos([done(tmp_path, readings.STORM, ended)]).why == "wrong"
    outcome = readings.chaos([done(tmp_path, readings.STORM, found)])
    assert outcome.verdict == PASSED and "not judged in so short a storm: growth" in outcome.lines
    storm["ended"]["whole"] = 0
    assert readings.chaos([done(tmp_path, readings.STORM, found)]).verdict == UNJUDGED
    assert readings.chaos([done(tmp_path, readings.STORM, {**found, "problems": ["wrong"]})]).verdict == FAILED


# ---- the storm

RIGHT = [(1, 2), (3, 4)]


def judged(*told: storm.Told, may_fail: bool = False) -> storm.Report:
    report = storm.Report()
    storm.judge(report, "kill", told, RIGHT, lambda number, tokens: tokens == (9, 9), may_fail)
    return report


def test_every_answer_of_a_storm_is_compared():
    well = storm.Told(0, (1, 2), "", 1.0, held=16)
    report = judged(well, storm.Told(1, (3, 4), "", 2.0), storm.Told(1, (9, 9), "", 1.0))
    (found,) = report.rounds
    assert not report.problems and (found.right, found.tied, found.held, found.slowest_s) == (2, 1, 16, 2.0)
    assert "1 answers are wrong, the first to prompt 1" in judged(storm.Told(0, (3, 4), "", 1.0)).problems[0]
    lost = storm.Told(1, None, "HTTP 502", 1.0)
    assert "nothing explains it: HTTP 502" in judged(well, lost).problems[0]
    assert not judged(well, lost, may_fail=True).problems
    assert judged(well, may_fail=True).not_judged == ["kill: it met no request"]
    assert "waited 61 s" in judged(storm.Told(1, None, "", 61.0), may_fail=True).problems[0]


def test_only_a_whole_answer_is_one():
    def reply(tokens: int, **meta) -> bytes:
        return json.dumps({"output_ids": [7] * tokens, "meta_info": meta}).encode()

    tokens, held, error = storm.read_answer(200, reply(storm.ANSWER, cached_tokens_details={"decode_prefix": 32}))
    assert (len(tokens or ()), held, error) == (storm.ANSWER, 32, "")
    assert storm.read_answer(200, reply(3, finish_reason="abort"))[0] is None
    assert "HTTP 0: refused" in storm.read_answer(0, b"refused")[2]
    shared = storm.prompts()
    assert len(set(shared)) == 12 and len({prompt[: storm.SHARED] for prompt in shared}) == 3
    assert all(token in storm.WORDS for token in shared[0]) and not re.search(r"\D", str(shared[0][0]))
