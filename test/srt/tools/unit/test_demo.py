"""The command `pd-radix demo`: what it asks of the benchmark, and what it makes of the runs. No server is started."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import demo
from sglang_pd_radix.tools.bench import least, report
from sglang_pd_radix.tools.cluster import RADIX_FLAG

PAGE, PAGE_BYTES = 4, 100


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    small = "--clients 2 --turns 3 --document 20 --question 5 --answer 8"
    return parser.parse_args([*small.split(), *arguments])


def turn(args: argparse.Namespace, number: int, side: str, more_pages: int = 0, computed: int = 0) -> dict[str, Any]:
    """What a turn of such a chat comes to, where nothing is wrong."""
    asked = args.document + number * (args.question + args.answer)
    held = (asked - args.question) // PAGE * PAGE if number and side != "off" else 0
    pages, fewest = -(-asked // PAGE), -(-asked // PAGE) - ((asked - args.question) // PAGE if number else 0)
    sent = (pages if side == "off" else fewest) + more_pages
    counts = {
        "requests": args.clients,
        "duration_s": 1.0,
        "ttft_p50_s": 0.1,
        "least_pages": fewest * args.clients,
        "prompt_pages": pages * args.clients,
        "asked_tokens": asked * args.clients,
        "prompt_tokens": asked * args.clients,
        "reused_tokens": held * args.clients,
        "computed_tokens": computed,
        "transferred_tokens": (asked - held) * args.clients - computed,
        "sent_bytes": sent * args.clients * PAGE_BYTES,
    }
    return counts


def measured(args: argparse.Namespace, sides: tuple[str, ...] = ("off", "on"), **wrong: dict[str, Any]) -> dict:
    """The benchmark's entry of the chat. wrong: of a side, what its turns from the second on have instead."""
    runs = []
    for side in sides:
        rounds = [turn(args, n, side, computed=4 * (side == "local" and n > 0)) for n in range(args.turns)]
        for one in rounds[1:]:
            one |= wrong.get(side, {})
        totals = {key: sum(one[key] for one in rounds) for key in rounds[0]}
        figures = {figure.key: 1.0 for figure in (*report.FIGURES, *report.CHAT_FIGURES)} | totals
        runs.append({"variant": side, "radix": side != "off", "figures": figures, "rounds": rounds})
        runs[-1]["different_answers"] = 0
    entry = {"key": "c", "title": "chat", "requests": args.clients * args.turns, "variants": [*sides], "runs": runs}
    entry |= {"problems": [], "differences": [], "sizes": {}, "page_size": PAGE}
    report.finish(entry)
    return entry


def found(*arguments: str, info: dict[str, Any] | None = None, **more: Any) -> demo.Found:
    args = _parse(*arguments)
    about = {"page_size": PAGE, "dtype": "torch.float32", "device": "cpu"} | (info or {})
    made = demo.Found(args, about, measured(args, **more))
    demo.judge(made)
    return made


def test_the_least_here_is_that_of_a_cache_that_forgets_nothing() -> None:
    """What the stand-in's runs take for the lower bound, by the benchmark's own `Keeper`."""
    args = _parse()
    keeper, history, sent = least.Keeper(least.PageIndex(PAGE)), [], []
    for number in range(args.turns):
        history += range(1000 * number, 1000 * number + (args.question if number else args.document))
        sent.append(args.clients * keeper.send(history))
        answer = [*range(1000 * number + 500, 1000 * number + 500 + args.answer)]
        keeper.answered(history, answer)
        history += answer
    assert sent == [turn(args, number, "on")["least_pages"] for number in range(args.turns)]


def test_a_cache_that_reuses_all_is_no_failure() -> None:
    made = found(sides=("off", "on", "local"))
    assert not made.failures and not made.notes and made.identical
    assert made.total("on", "sent_over_least") == 1.0


@pytest.mark.parametrize(
    ("side", "wrong", "told"),
    [
        ("on", {"sent_bytes": 10 * PAGE_BYTES}, "on: 2.500 times the lower bound was sent from turn 2 on"),
        ("on", {"sent_bytes": 2 * PAGE_BYTES}, "on: fewer KV bytes are counted from turn 2 on than any cache has to"),
        ("off", {"reused_tokens": 8}, "with the flag off, decode reused part of a prompt"),
        ("on", {"transferred_tokens": 1}, "on: decode counted 198 prompt tokens of 198, of which"),
        ("local", {"sent_bytes": 10 * PAGE_BYTES}, "local: 2.500 times the lower bound"),
    ],
)
def test_what_is_wrong_with_a_run_is_found(side: str, wrong: dict[str, Any], told: str) -> None:
    made = found(sides=("off", "on", "local"), **{side: wrong})
    assert any(failure.startswith(told) for failure in made.failures), made.failures


def test_what_decode_computes_itself_need_not_be_sent() -> None:
    few = {"sent_bytes": 0}
    assert not found(sides=("off", "on", "local"), local=few).failures


def test_what_the_tokenizer_writes_otherwise_is_no_fault_of_the_cache() -> None:
    """The history has other tokens than the answers had: no cache can reuse these."""
    split = {"asked_tokens": 99, "prompt_tokens": 99, "transferred_tokens": 99, "reused_tokens": 0}
    made = found(on={**split, "sent_bytes": 90 * PAGE_BYTES})
    assert not made.failures and "no cache can reuse" in made.notes[0]


def test_the_end_of_an_answer_may_be_missing_from_a_tree_for_speculation() -> None:
    one_page_more = {"sent_bytes": 6 * PAGE_BYTES}
    assert found(on=one_page_more).failures
    assert not found(on=one_page_more, info={"speculative_algorithm": "EAGLE"}).failures


def test_a_prefill_that_counts_nothing_cannot_be_judged() -> None:
    made = found("--turns", "1")
    for run in made.entry["runs"]:
        run["figures"]["sent_bytes"] = 0
    report.finish(made.entry)
    demo.judge(made)
    assert "no KV bytes were counted" in made.failures[0]


@pytest.mark.parametrize(
    ("most", "computed", "failures", "notes"), [(64, 0, 1, 0), (64, 4, 0, 0), (2, 0, 0, 0), (None, 0, 0, 1)]
)
def test_whether_decode_computes_what_is_short(most: int | None, computed: int, failures: int, notes: int) -> None:
    made = found(sides=("off", "on", "local"))
    made.runs["local"]["figures"]["computed_tokens"] = computed
    demo._judge_computed(made, most)
    assert (len(made.failures), len(made.notes)) == (failures, notes)


# ---- the command ----


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Runs of the demo on stand-ins; yields what it has asked them for."""
    asked: dict[str, Any] = {}

    class Deployment:
        def __init__(self, model: str, shape: Any, options: Any, *rest: Any, **more: Any) -> None:
            asked.update(model=model, shape=shape, options=options, **more)
            self.variants = [SimpleNamespace(name=side.name) for side in more["sides"]]

        def __enter__(self) -> Deployment:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def info(self, variant: Any) -> dict[str, Any]:
            return {"page_size": PAGE, "dtype": "float32", "device": "cpu"}

        def decode_urls(self, variant: Any) -> list[str]:
            return [variant.name]

    def measure_all(deployment: Any, load: Any, workload: Any, runs: int, *rest: Any) -> dict[str, Any]:
        asked.update(workload=workload, runs=runs)
        args = argparse.Namespace(**{key: workload.sizes[key] for key in ("clients", "turns", *asked["lengths"])})
        return measured(args, tuple(variant.name for variant in deployment.variants))

    def run_once(deployment: Any, load: Any, workload: Any, variant: Any, *rest: Any) -> Any:
        asked["steady"] = workload.steady
        return SimpleNamespace(figures={"later_ttft_p50_s": 0.5}, problems=[])

    asked["lengths"] = ("document", "question", "answer")
    load = SimpleNamespace(wait_ready=lambda: None, words=range(100, 200), close=lambda: None)
    monkeypatch.setattr(demo.deploy, "Deployment", Deployment)
    monkeypatch.setattr(demo.measure, "LoadGenerator", lambda *args: load)
    monkeypatch.setattr(demo.measure, "run_once", run_once)
    monkeypatch.setattr(demo.turns, "measure_all", measure_all)
    monkeypatch.setattr(demo, "idle_pools", lambda url: [{"computes_up_to": 64}])
    yield asked


def test_the_command(benchmark: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    args = _parse(
        *("--work-dir", str(tmp_path / "work"), "--json", str(figures), "--", "--tp", "2", "--api-key", "a secret")
    )
    assert demo.run(args) == 0
    assert [(side.name, side.radix, side.options) for side in benchmark["sides"]] == [
        ("off", False, ()),
        ("on", True, (demo.LOCAL_FLAG, "off")),
        ("local", True, ()),
    ]
    assert benchmark["options"][:5] == ["--tp", "2", "--api-key", "a secret", "--enable-metrics"]
    assert benchmark["runs"] == 1 and benchmark["workload"].chat and benchmark["steady"].clients == 2
    assert (tmp_path / "work" / "model" / "config.json").exists()
    document = json.loads(figures.read_text())
    # What nobody is to read is in no report.
    assert "a secret" not in figures.read_text() and "..." in document["setting"]["engine_options"]
    assert document["runs"]["local"]["totals"]["computed_tokens"] == 8 and document["identical"]
    assert document["workload"] == {
        **{"clients": 2, "turns": 3, "document": 20, "question": 5, "answer": 8},
        "seed": 0,
    }
    shown = capsys.readouterr().out
    assert "on is 1.000 times the lower bound" in shown and "decode computed 8 of 198 prompt tokens" in shown
    assert (
        "beside 2 clients with prompts of 3000 tokens, turns 2 and 3: 0.500 s off, 0.500 s on, 0.500 s local" in shown
    )
    assert "Answers:  identical on all sides: all 18" in shown and "FAILED" not in shown


def test_a_failure_is_told_and_is_the_exit_code(
    benchmark: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_all(*_: Any) -> dict[str, Any]:
        return measured(_parse(), on={"sent_bytes": 99 * PAGE_BYTES}) | {"problems": ["on, run 1: a page is lost"]}

    monkeypatch.setattr(demo.turns, "measure_all", measure_all)
    monkeypatch.setattr(demo.loader, "extras", lambda: [])
    assert demo.run(_parse("--work-dir", str(tmp_path))) == 1
    shown = capsys.readouterr().out
    assert "FAILED:   on, run 1: a page is lost" in shown and "times the lower bound was sent from turn 2" in shown
    assert [side.name for side in benchmark["sides"]] == ["off", "on"], "without the extra that computes prompts"


def test_a_gpu_gives_answers_that_do_not_depend_on_the_batch_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.cpu_host, "active", lambda: False)
    made = demo.engine_options([], True)
    assert "--enable-deterministic-inference" in made and made[-2:] == ["--attention-backend", "triton"]
    assert "--enable-deterministic-inference" in demo.engine_options(["--attention-backend", "fa3"], False)
    assert "--enable-deterministic-inference" not in demo.engine_options(["--attention-backend", "x"], False)
    # In float32 nothing has to be done for it, and the engine's default backend has no float32.
    monkeypatch.setenv("SGLANG_TORCH_LAYERS", "1")
    exact = ["--dtype", "float32", "--attention-backend"]
    assert demo.engine_options([], True)[-4:] == [*exact, "triton"]
    assert demo.engine_options([*exact, "x"], False)[:4] == [*exact, "x"]
    assert "--enable-deterministic-inference" not in demo.engine_options([], False)


def test_users_options_win(benchmark: dict[str, Any], tmp_path: Path) -> None:
    options = demo.engine_options(["--page-size=64", "--dtype", "float16"], True)
    assert options.count("--page-size") == 0 and options.count("--dtype") == 1
    given = ("--work-dir", str(tmp_path), "--", "--max-total-tokens", "999")
    demo.run(_parse(*given))
    assert benchmark["shape"].pool == 999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "--clients 0"),
        (["--answer", "1"], "--answer 1: must be at least 2"),
        (["--", "--page-size", "maybe"], "--page-size maybe: must be a whole number"),
        (["--model", "no/such/model"], "no model at no/such/model"),
        (["--json", "no-such-directory/figures.json"], "there is no directory"),
        (["--", RADIX_FLAG], "remove it from the engine options"),
    ],
)
def test_bad_usage_starts_nothing(benchmark: dict[str, Any], arguments: list[str], message: str) -> None:
    with pytest.raises(PdRadixError, match=message):
        demo.run(_parse(*arguments))
    assert "model" not in benchmark


def test_switched_off_patch_set_is_refused(benchmark: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for no in ("0", "false"):
        monkeypatch.setenv("SGLANG_PD_RADIX", no)
        with pytest.raises(PdRadixError, match="SGLANG_PD_RADIX=0"):
            demo.run(_parse())
    assert "model" not in benchmark
