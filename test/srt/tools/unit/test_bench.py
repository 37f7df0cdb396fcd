"""`pd-radix bench`: the workloads, the lower bound, the figures and the report. No server is started here."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from bench_documents import a_document, run_entry

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.bench import chart, command, deploy, least, measure, report, stats, workload

TOKENS = workload.Tokens(range(400, 1900), 0)
PAGE = 4


def make(key: str, **sizes):
    entry = dataclasses.replace(workload.KINDS[key](), **sizes)
    entry.check(key)
    return entry.make(key, TOKENS)


# ---- workloads ----


@pytest.mark.parametrize("key", workload.KINDS)
def test_a_workload_is_the_same_every_time_and_other_with_another_seed(key):
    sizes = workload.KINDS[key]()
    again = workload.Tokens(range(400, 1900), 0)
    other = workload.Tokens(range(400, 1900), 1)
    assert sizes.make(key, TOKENS).rounds == sizes.make(key, again).rounds
    assert sizes.make(key, TOKENS).rounds != sizes.make(key, other).rounds


def test_shared_prefixes_share_what_they_say():
    made = make("a", prefixes=3, shared=20, suffix=2, requests=9, answer=10, rounds=1)
    (asked,) = made.rounds
    assert sorted(r.group for r in asked) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for r in asked:
        assert len(r.ids) == 22 and 5 <= r.answer <= 15
        assert all((r.ids[:20] == other.ids[:20]) == (r.group == other.group) for other in asked)
    assert len({r.ids for r in asked}) == 9


def prefixes_of(made, shared):
    return [{r.ids[:shared] for r in asked} for asked in made.rounds]


def test_shared_prefixes_come_cold_all_at_once_and_again_in_every_round():
    made = make("a", prefixes=5, shared=20, suffix=2, requests=33, rounds=3)
    assert not made.warm
    assert [len(asked) for asked in made.rounds] == [11, 11, 11] and made.requests == 33
    first, *later = prefixes_of(made, 20)
    assert len(first) == 5 and all(used == first for used in later)
    orders = [[r.group for r in asked] for asked in made.rounds]
    assert orders[0] != sorted(orders[0]) and orders[0] != orders[1]
    assert len({r.ids for asked in made.rounds for r in asked}) == 33


def test_rounds_of_a_follow_without_a_pause_and_those_of_churn_wait():
    assert make("a").stream and not make("g").stream
    assert not make("a", pause=1).stream and make("a", pause=1).rounds == make("a").rounds


def test_churn_has_new_prefixes_in_every_round():
    made = make("g", prefixes=4, shared=20, suffix=2, requests=24, rounds=3)
    used = prefixes_of(made, 20)
    assert [len(u) for u in used] == [4, 4, 4] and len(set.union(*used)) == 12
    assert not made.warm


def test_warm_prefixes_come_some_at_a_time_and_each_was_asked_for():
    made = make("aw", prefixes=5, at_once=2, shared=20, suffix=2, requests=20)
    assert [{r.group for r in asked} for asked in made.rounds] == [{0, 1}, {2, 3}, {4}]
    assert [[r.group for r in warm] for warm in made.warm] == [[0, 1], [2, 3], [4]]
    assert made.requests == 20
    for asked, warm in zip(made.rounds, made.warm, strict=True):
        assert {r.ids[:20] for r in asked} == {w.ids[:20] for w in warm}
        assert not {w.ids for w in warm} & {r.ids for r in asked}
    together = make("aw", prefixes=5, at_once=5, shared=20, suffix=2, requests=20)
    assert {r.ids for r in together.rounds[0]} == {r.ids for asked in made.rounds for r in asked}


def test_a_chat_behind_long_prompts_of_others():
    made = make("i", clients=2, turns=3, document=9, question=4, answer=2, others=3, prompt=20)
    assert [[r.beside for r in asked] for asked in made.rounds] == [[True] * 3 + [False] * 2] * 3
    others = [r for asked in made.rounds for r in asked if r.beside]
    assert len({r.ids for r in others}) == len({r.group for r in others}) == 9 and {len(r.ids) for r in others} == {20}
    assert not {r.group for r in others} & {0, 1} and made.concurrency == 5 and made.chat
    assert [len(r.ids) for asked in made.rounds for r in asked if r.group == 1] == [9, 4, 4]
    assert made.longest == 9 + 4 + 4 + 3 * 2 and make("i", prompt=5000).longest == 5002


def test_a_chat_of_short_and_long_turns():
    made = make("j", clients=2, turns=5, document=9, question=4, long=30)
    assert [len(r.ids) for asked in made.rounds for r in asked if r.group == 0] == [9, 4, 30, 4, 30]
    assert made.longest == 77 + 5 * 32


def test_who_is_there_for_the_others_counts_but_for_its_first_token():
    def one(ttft, beside):
        return measure.Asked([1, 2, 3, 4], 3, "x", 0.0, ttft, ttft + 0.2, [0.1, 0.1], beside)

    asked = [one(9.0, True), one(0.5, False), one(0.7, False)]
    counted = dict.fromkeys(("sent_bytes", "prompt_tokens", "reused_tokens", "blocked", "prefill_cpu_s"), 3.0)
    counted |= {"decode_cpu_s": 3.0, "cpu_s": 6.0}
    record = measure._round_of(asked, 1, PAGE, dict.fromkeys(counted, 0.0), counted)
    assert record["ttft_p50_s"] == pytest.approx(0.6) and record["requests"] == 3
    figures = measure.figures_of(asked, [record], 0, least.PageIndex(PAGE), 4)
    assert math.isnan(figures["ttft_p99_s"]) and figures["requests_per_s"] == pytest.approx(3 / 9.2)


@pytest.mark.parametrize("key", command.QUICK_KEYS)
def test_a_quick_workload_fits_the_one_quick_deployment(key):
    sizes = workload.KINDS[key]()
    for name, value in {**command.QUICK.get(key, {}), **command.QUICK_SHAPE}.items():
        assert hasattr(sizes, name)
        setattr(sizes, name, value)
    sizes.check(key)
    made = sizes.make(key, TOKENS)
    assert made.longest + sizes.reserve < sizes.pool
    assert made.requests <= 130


@pytest.mark.parametrize(
    "setting, said",
    [
        ("a.shared", "KEY.SIZE=VALUE"),
        ("x.shared=1", "KEY.SIZE=VALUE"),
        ("a.sharde=1", "a has the sizes pool"),
        ("a.shared=many", "takes int"),
        ("a.answer=1", "--set a.answer=1: must be at least 2"),
        ("a.requests=0", "--set a.requests=0: must be at least 1"),
        ("a.rounds=1001", "--set a.rounds=1001: there are only 1000 requests"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused(setting, said):
    with pytest.raises(PdRadixError, match=re.escape(said)):
        workload.apply_settings({"a": workload.SharedPrefixes()}, [setting])


# ---- traces ----


def write_trace(path: Path, *records) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def record(at, length, answer, *blocks):
    return {"timestamp": at, "input_length": length, "output_length": answer, "hash_ids": list(blocks)}


def test_a_trace_keeps_lengths_blocks_and_times(tmp_path):
    path = write_trace(
        tmp_path / "t.jsonl",
        record(1000, 1024, 64, 7, 8),
        record(3000, 700, 32, 7, 9),
        record(2000, 1536, 1, 7, 8, 10),
    )
    (asked,) = make("f", file=str(path), shrink=8, speed=2.0, requests=3).rounds
    assert [len(r.ids) for r in asked] == [128, 192, 88]
    assert [r.answer for r in asked] == [8, 2, 4]
    assert [r.arrival_s for r in asked] == [0, 0.5, 1.0]
    first, second, third = (r.ids for r in asked)
    assert second[:128] == first and third[:64] == first[:64]
    assert third[64:] != first[64:88]


def test_a_trace_without_times_is_sent_as_fast_as_the_concurrency_allows(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", record(0, 600, 9, 1, 2), record(9, 600, 9, 1, 2))
    made = make("f", file=str(path), speed=0.0, concurrency=5)
    assert made.concurrency == 5
    assert [r.arrival_s for r in made.rounds[0]] == [None, None]


@pytest.mark.parametrize(
    "line", ["{", '{"timestamp": 1}', "[]", json.dumps(record(0, 1, 1)), json.dumps(record(-1, 1, 1, 1)), '"x"']
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = write_trace(tmp_path / "t.jsonl", record(0, 600, 9, 1, 2), line)
    with pytest.raises(PdRadixError, match=r"t\.jsonl, line 2: not a record"):
        make("f", file=str(path))


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(PdRadixError, match="cannot read the trace .*none.jsonl: No such file"):
        make("f", file=str(tmp_path / "none.jsonl"))


def test_the_made_trace_reads_like_a_real_one(tmp_path):
    records = workload.made_trace(50)
    path = write_trace(tmp_path / "made.jsonl", *records)
    assert workload.read_trace(path, 50) == records
    for r in records:
        assert len(r["hash_ids"]) == math.ceil(r["input_length"] / workload.TRACE_BLOCK)
    assert len({r["hash_ids"][1] for r in records}) < 50  # some go on


# ---- the lower bound ----


def test_least_to_send_counts_a_shared_page_once_and_a_partial_page_each_time():
    keeper = least.Keeper(least.PageIndex(PAGE))
    assert keeper.send([1, 2, 3, 4, 5, 6]) == 2
    assert keeper.send([1, 2, 3, 4, 5, 6]) == 1  # the rest of two tokens cannot be shared
    assert keeper.send([1, 2, 3, 4, 5, 6, 7, 8]) == 1
    assert keeper.send([1, 2, 3, 4, 5, 6, 7, 8]) == 0  # a full hit


def test_an_answer_is_kept_and_its_last_token_if_steps_overlap():
    prompt = [1, 2, 3]
    for overlapped, answer, then in [
        (False, [4, 5], 1),  # holds 1 2 3 4
        (False, [4], 2),  # holds 1 2 3, and not 4
        (True, [4], 2),  # prefill has made it, and no step has run
        (False, [4, 5, 6, 7, 8], 1),  # holds 1 to 7
        (True, [4, 5, 6, 7, 8], 0),  # and 8
    ]:
        keeper = least.Keeper(least.PageIndex(PAGE), overlapped)
        keeper.send(prompt)
        keeper.answered(prompt, answer)
        assert keeper.send([*prompt, 4, 5] if len(answer) < 5 else [*prompt, *answer]) == then


# ---- statistics ----


def test_percentiles_are_those_of_numpy():
    rnd = random.Random(1)
    values = [rnd.expovariate(1) for _ in range(37)]
    for percent in (0, 1, 50, 90, 99, 100):
        assert stats.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert math.isnan(stats.percentile([], 50))


def test_ratios_are_of_neighbours():
    assert stats.paired_ratio([2, 9, 4], [1, 3, 1]) == stats.Spread(3, 2, 4, 3)
    assert stats.paired_ratio([1, math.nan], [0, 1]).runs == 0
    assert stats.Spread.of([3, math.nan, 1]) == stats.Spread(2, 1, 3, 2)


# ---- figures ----


def asked(prompt, start, ttft, gaps):
    return measure.Asked(prompt, len(gaps) + 1, "x", start, ttft, ttft + sum(gaps), list(gaps))


def test_figures_of_a_run_by_hand():
    index = least.PageIndex(PAGE)
    requests = [asked([1, 2, 3, 4, 5], 0.0, 1.0, [1.0, 1.0]), asked([1, 2, 3, 4, 6], 0.0, 3.0, [2.0])]
    rounds = [
        {
            "duration_s": 5.0,
            "sent_bytes": 300,
            "prompt_pages": 4,
            "least_pages": 3,
            "prompt_tokens": 10,
            "reused_tokens": 4,
            "blocked": 1,
            "prefill_cpu_s": 3.0,
            "decode_cpu_s": 1.0,
            "cpu_s": 4.0,
        }
    ]
    figures = measure.figures_of(requests, rounds, 1, index, 14.0)
    assert figures["requests_per_s"] == 2 / 5
    assert figures["output_tokens_per_s"] == 5 / 5
    assert figures["ttft_p50_s"] == 2.0
    assert figures["itl_mean_s"] == pytest.approx(4 / 3)
    assert figures["tpot_p50_s"] == 1.5
    assert figures["answering_mean"] == (2 + 2) / 5
    assert figures["least_peak"] == 4 + (1 + 2) + 1  # just before the first ends; the second has no token yet
    assert figures["peak_over_least"] == 14 / 8
    assert figures["running_max"] == 1
    assert (figures["prefill_cpu_s"], figures["decode_cpu_s"], figures["cpu_s"]) == (1.5, 0.5, 2.0)


def test_bytes_of_a_page_come_from_the_runs_without_cache():
    (entry,) = a_document()["workloads"]
    assert entry["page_bytes"] == 100
    assert [run["figures"]["sent_over_least"] for run in entry["runs"]] == [2.5, 1.0, 2.5, 1.1]
    assert entry["ratios"]["on"]["requests_per_s"] == {"median": 1.75, "low": 1.5, "high": 2.0, "runs": 2, "worst": 1.5}
    assert entry["summary"]["off"]["requests_per_s"] == {"median": 3, "low": 2, "high": 4, "runs": 2}


def test_the_worst_run_is_the_least_favourable_one():
    figures = {figure.key: figure for figure in report.FIGURES}
    spread = stats.Spread(1.0, 0.5, 3.0, 2)
    assert report.with_worst(figures["requests_per_s"], spread)["worst"] == 0.5
    assert report.with_worst(figures["ttft_p99_s"], spread)["worst"] == 3.0
    assert math.isnan(report.with_worst(figures["running_max"], spread)["worst"])
    heading, rows = report.table(a_document()["workloads"][0])
    assert heading == ["", "off", "on", "on / off", "worst"]
    assert next(row for row in rows if row[0] == "requests/s")[3:] == ["1.750 (1.500–2.000)", "1.500"]


def test_the_table_over_all_says_what_is_required():
    heading, (row,) = report.headline(a_document())
    cells = dict(zip(heading, row, strict=True))
    assert cells["requests/s, on / off"] == "1.75 (1.5)"
    assert cells["TTFT p99, on / off"] == "1 (1)"
    assert cells["KV sent / lower bound, on"] == "1.050 (1.100)"
    assert cells["held at most / lower bound, on"] == "1.000"


def test_further_sides_are_compared_with_off_and_on_with_them():
    runs = [run_entry("off", 1, 2, 1000), run_entry("on", 1, 6, 400), run_entry("today", 1, 3, 800)]
    document = a_document(runs=runs, variants=["off", "on", "today"])
    (entry,) = document["workloads"]
    assert {label: r["requests_per_s"]["median"] for label, r in entry["ratios"].items()} == {
        "on": 3,
        "today": 1.5,
        "on / today": 2,
    }
    heading, rows = report.table(entry)
    assert heading[1:] == ["off", "on", "on / off", "worst", "today", "today / off", "worst", "on / today", "worst"]
    assert all(len(row) == len(heading) for row in rows)
    assert [row[0] for row in report.headline(document)[1]] == [
        "(a) x < y & z",
        "(a) x < y & z: today / off",
        "(a) x < y & z: on / today",
    ]


def test_answers_that_differ_are_counted():
    assert report.compare_answers([["a", "b"], ["a", "b"], ["a", "c"]]) == [0, 0, 1]


def test_no_reader_finds_half_a_report(tmp_path):
    """The file of an earlier run is replaced, not written into."""
    before = tmp_path / "before"
    before.write_text("all of it")
    (tmp_path / "report.json").hardlink_to(before)
    report.write(a_document(), "text", tmp_path, "report")
    assert before.read_text() == "all of it" and json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("chat", [False, True])
def test_the_report_is_complete(chat):
    document = a_document(chat)
    text = report.markdown(document)
    assert "| requests/s | 3.00 (2.00–4.00) | 5.50 (3.00–8.00) | 1.750 (1.500–2.000) | 1.500 |" in text
    widths = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(widths) == ({6, 10, 9} if chat else {6, 10, 7})
    assert ("| lower bound | TTFT p50, ms, off | TTFT p50, ms, on |" in text) == chat


def test_a_chart_has_its_texts_in_lines_that_fit():
    lines = [chart.Line("on", "#2563eb", [(0, 1), (1, 2), (10, 3)], band=[(1, 1, 3), (10, 2, 4)])]
    drawn = chart.Chart(
        "a title",
        "seconds",
        "MiB",
        lines,
        note=" ".join(f"n={i}" for i in range(50)),
    )
    picture = drawn.picture()
    root = ElementTree.fromstring(picture)
    texts = {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a title", "seconds", "MiB", "on"} <= texts
    assert all(len(text) < 90 for text in texts) and sum(text.count("n=") for text in texts) == 50
    assert picture == drawn.picture(), "the same data gives the same file"
    assert chart.Chart("", "", "", [chart.Line("on", "red", [])]).empty and not drawn.empty


# ---- command ----


def test_the_command_says_what_it_can_measure(capsys):
    assert cli.main(["bench", "--sizes"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == list(workload.KINDS)
    assert cli.main(["bench", "--quick", "--sizes", "--only", "a", "--set", "a.requests=7"]) == 0
    assert "requests=7 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, said",
    [
        (["--only", "a,z"], "z is not one of a, aw, b, c, d, e, f, g, h"),
        (["--only", "a,"], "an empty name is not one of"),
        (["--runs", "0"], "--runs 0: must be at least 1"),
        (["--only", "a", "--trace", "x"], "--trace is for the workloads f and k"),
        (["--model", "/none"], "no model at /none"),
        (["--only", "f", "--trace", "/none"], "cannot read the trace /none"),
        (["--compare", "today"], "--compare today: write NAME:OPTIONS"),
        (["--compare", "on:--x"], "on is the name of something else"),
        (["--compare", "aggregated:--x"], "aggregated is the name of something else"),
        (["--compare", "b:--x", "--compare", "b:--y"], "b is the name of something else"),
        (["--compare", "b:x"], "b: x is neither an engine option nor VARIABLE=value"),
        (["--on", "A=1 b"], "on: b is neither an engine option nor VARIABLE=value"),
        (["--on", "'"], "on: ': No closing quotation"),
        (["--compare", "b:--disaggregation-decode-enable-radix-cache"], "is there already"),
        (["--", "--disaggregation-decode-enable-radix-cache"], "is what the benchmark switches"),
    ],
)
def test_bad_options_get_one_clear_line(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    assert cli.main(["bench", "--work-dir", str(tmp_path), *options]) == 1
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["report.json", "goodput.json"])
def test_a_report_is_not_written_over(tmp_path, monkeypatch, capsys, name):
    """A second run left nothing of the first."""
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.chdir(tmp_path)
    kept = Path("kept")
    kept.mkdir()
    # Logs alone, as of a run that failed, are no report.
    assert not command._has_report(kept)
    (kept / name).write_text("{}")
    assert cli.main(["bench", "--work-dir", "kept"]) == 1
    assert "--work-dir kept: there is a report; give another directory" in capsys.readouterr().err
    for directory in ("bench-report", "bench-report-2", "bench-report-3"):
        assert command._new_directory() == Path(directory) and Path(directory).is_dir()


def test_a_report_names_no_place_on_this_machine():
    shown = list(command.hidden(["bench", "--trace", "/data/x/t.jsonl", "--work-dir=/tmp/r", "--set", "a.pool=9"]))
    assert shown == ["bench", "--trace", "t.jsonl", "--work-dir=r", "--set", "a.pool=9"]


@pytest.mark.parametrize(
    "words",
    [
        ["--on=--admin-api-key hunter2 --lora-paths a=/home/me/a"],
        ["--on", "HF_TOKEN=hunter2 --api-key=hunter2"],
        ["--compare", "b:--admin-api-key hunter2"],
        ["--compare=b:MY_SECRET_KEY=hunter2 PGPASSWORD=hunter2 --page-size 8"],
    ],
)
def test_a_report_shows_no_secret_of_a_side(words):
    shown = " ".join(command.hidden(["bench", *words]))
    assert "hunter2" not in shown and "/home" not in shown and "..." in shown


def test_a_report_shows_of_a_side_what_is_no_secret():
    line = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION=64 --page-size 8"
    assert command.hidden(["--compare", f"b:{line}"]) == ["--compare", f"b:{line}"]
    side = deploy.Side.parse("on", "HF_TOKEN=hunter2 A=1 --admin-api-key hunter2")
    assert command._shown(side) == {"options": ["--admin-api-key", "..."], "env": {"HF_TOKEN": "...", "A": "1"}}


def test_both_sides_share_the_prefill_worker_and_only_one_has_the_flag(tmp_path):
    options = deploy.engine_options(["--page-size", "8"], 8, made_model=True)
    assert "--enable-metrics" in options and options.count("--page-size") == 1
    made = deploy.Deployment("m", deploy.Shape(500, 20), options, "nixl", tmp_path)
    planned = {process.name: process for process in made.cluster.plan()}
    assert sorted(planned) == ["decode-0", "decode-1", "prefill-0", "router-off", "router-on"]
    flagged = {name for name, p in planned.items() if "--disaggregation-decode-enable-radix-cache" in p.command}
    assert flagged == {"decode-1"}
    for name, worker in (("router-off", "decode-0"), ("router-on", "decode-1")):
        command = planned[name].command
        assert [w for w in planned if w.startswith("decode") and planned[w].url in command] == [worker]
        assert planned["prefill-0"].url in command and "--disable-health-check" in command
    decode = planned["decode-1"].command
    assert decode[decode.index("--max-total-tokens") + 1] == "500"
    assert decode[decode.index("--num-reserved-decode-tokens") + 1] == "20"


def test_a_side_has_options_and_environment_of_its_own(tmp_path):
    args = cli.build_parser("bench").parse_args(
        ["bench", "--on", "--x 'a b'", "--compare", "today:A=1 B=2=3 --y --z=C=4", "--compare", "plain:"]
    )
    sides = command.chosen_sides(args)
    assert [s.name for s in sides] == ["off", "on", "today", "plain"]
    assert sides[1].options == ("--x", "a b")
    assert sides[2].options == ("--y", "--z=C=4") and dict(sides[2].env) == {"A": "1", "B": "2=3"}
    made = deploy.Deployment("m", deploy.Shape(500, 20), [], "nixl", tmp_path, sides=sides)
    planned = {process.name: process for process in made.cluster.plan()}
    flag = "--disaggregation-decode-enable-radix-cache"
    assert [flag in planned[f"decode-{i}"].command for i in range(4)] == [False, True, True, True]
    assert ["--y" in planned[f"decode-{i}"].command for i in range(4)] == [False, False, True, False]
    assert [planned[f"decode-{i}"].env.get("B") for i in range(4)] == [None, None, "2=3", None]
    assert planned["decode-2"].url in planned["router-today"].command


def test_the_requests_that_run_on_decode_are_watched(tmp_path, monkeypatch):
    loads = [[{"num_reqs": 3, "num_waiting_reqs": 1}], [{"num_reqs": 3, "num_waiting_reqs": 2}], []]
    monkeypatch.setattr(measure, "http", lambda url, **more: (200, json.dumps(loads.pop(0)).encode()))
    made = deploy.Deployment("m", deploy.Shape(500, 20), [], "nixl", tmp_path)
    monkeypatch.setattr(deploy.Deployment, "decode_urls", lambda made, variant: ["http://off"])
    watch = measure.Watch(made, made.variants[0])
    while loads:
        watch.look()
        assert watch.running == 2
    # Of a model with windows nobody knows what requests hold.
    monkeypatch.setattr(deploy, "idle_pools", {"http://off": [{"idle": True}]}.__getitem__)
    assert math.isnan(made.used_peak(made.variants[0]))


def test_what_is_not_known_is_null_in_the_report(tmp_path):
    """JSON has no NaN: `jq`, browsers and Go refuse it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document = a_document()
    (entry,) = document["workloads"]
    for one in entry["runs"]:
        one["figures"]["peak_over_least"] = math.nan
    report.finish(entry)
    report.write(document, "text", tmp_path, "report")
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    (told,) = read["workloads"]
    assert told["ratios"]["on"]["running_max"]["worst"] is None
    assert told["summary"]["on"]["peak_over_least"] == {"median": None, "low": None, "high": None, "runs": 0}
