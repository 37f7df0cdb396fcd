"""Workload (k) of `pd-radix bench`, agents: what is asked, and what is told of it."""

from __future__ import annotations

import json
import math

import pytest
from bench_documents import a_document, run_entry

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.bench import asked, command, measure, report, workload

TOKENS = workload.Tokens(range(400, 1900), 0)


def parsed(*options):
    return cli.build_parser("bench").parse_args(["bench", "--only", "k", *options])


# ---- what is asked ----


def test_forty_turns_of_tool_results_after_a_long_first_prompt_over_a_while():
    sizes = workload.Agents()
    made = sizes.make("k", TOKENS)
    assert made.chat and len(made.rounds) == 40 and {len(asked) for asked in made.rounds} == {12}
    first, later = made.rounds[0], [request for asked in made.rounds[1:] for request in asked]
    assert {len(request.ids) for request in first} == {2000}
    lengths, answers = ([f(request) for request in later] for f in (lambda r: len(r.ids), lambda r: r.answer))
    assert (min(lengths), max(lengths)) == (10, 100) and (min(answers), max(answers)) == (3, 25)
    assert all(0 <= request.arrival_s <= 1 for request in later) and len({r.arrival_s for r in later}) > 400
    assert {request.group for request in later} == set(range(12))
    all_tokens = sum(len(r.ids) + r.answer for asked in made.rounds for r in asked)
    assert made.longest < sizes.pool < all_tokens, "the pool holds one conversation, and not all"
    assert made.steady is None and "beside" not in made.title
    at_once = workload.Agents(pause=0.0).make("k", TOKENS).rounds[3]
    assert all(request.arrival_s is None for request in at_once)


def test_first_prompts_of_other_agents_come_all_the_time_if_asked_for():
    made = workload.Agents(others=2, turns=3).make("k", TOKENS)
    assert (made.steady.clients, made.steady.length) == (2, 2000)
    assert "beside 2 clients that send prompts of 2000 tokens" in made.title
    assert not any(request.beside for asked in made.rounds for request in asked)


def line(length, answer, *blocks):
    return {"timestamp": 0, "input_length": length, "output_length": answer, "hash_ids": list(blocks)}


TRACE = [
    line(1500, 100, 1, 2, 3),
    line(1700, 40, 1, 2, 4, 5),  # continues the first: 100 tokens more than its prompt and answer
    line(700, 60, 1, 6),  # the first block is the system prompt's
    line(9000, 80, 1, 7, 8),
    line(2440, 7, 1, 2, 4, 9, 10),  # continues the second
    line(2440, 0, 1, 2, 4, 9, 10),  # no answer
]


def test_lengths_of_later_turns_are_those_of_a_trace(tmp_path):
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    sizes = command.chosen_sizes(parsed("--trace", str(tmp_path / "t.jsonl"), "--set", "k.shrink=10"))["k"]
    assert sizes.lengths == [(10, 4), (70, 2)]
    made = sizes.make("k", TOKENS)
    assert {(len(r.ids), r.answer) for asked in made.rounds[1:] for r in asked} == {(10, 4), (70, 2)}
    assert {len(r.ids) for r in made.rounds[0]} == {2000}
    (tmp_path / "t.jsonl").write_text(json.dumps(TRACE[0]))
    with pytest.raises(PdRadixError, match="no request continues an earlier one"):
        command.chosen_sizes(parsed("--trace", str(tmp_path / "t.jsonl")))


def test_lengths_the_wrong_way_round_are_refused():
    with pytest.raises(PdRadixError, match="longest_question and longest_answer are at least"):
        command.chosen_sizes(parsed("--set", "k.question=200"))


def test_the_prefill_worker_has_options_of_its_own_and_the_pool_of_the_workload(monkeypatch, tmp_path):
    made = []

    class Planned(Exception):
        pass

    def deployment(*args, **more):
        made.append((args, more))
        raise Planned

    monkeypatch.setattr(command, "Deployment", deployment)
    args = parsed("--prefill", "--disaggregation-prefill-read-decode 64")
    args.out = tmp_path
    with pytest.raises(Planned):
        command._all(args, command.chosen_sizes(args), [], 1, "m", [], None, {}, None)
    ((_, shape, *_), more) = made[0]
    assert more["prefill_options"] == ["--disaggregation-prefill-read-decode", "64"]
    assert (shape.pool, shape.prefill_pool) == (32768, 32768)


# ---- what is told ----


def test_early_turns_and_late_ones_are_told_apart_and_who_computed_them():
    def turn(ttft):
        return [asked.Asked([1], 2, "x", 0.0, ttft, ttft + 1, [1.0])] * 5

    turns = [turn(9.0) * 10, *[turn(1.0)] * 9, *[turn(3.0)] * 30]
    rounds = [{"computed_requests": n} for n in (5, *[4] * 39)]
    figures = measure.figures_of_turns(turns, rounds)
    assert (figures["first_ttft_p50_s"], figures["early_ttft_p50_s"], figures["late_ttft_p50_s"]) == (9, 1, 3)
    assert math.isnan(figures["early_ttft_p99_s"]) and figures["late_ttft_p99_s"] == 3
    assert figures["without_prefill"] == pytest.approx(4 / 5), "of turns 2 and later"
    assert "early_ttft_p50_s" not in measure.figures_of_turns(turns[:10], rounds[:10])
    assert math.isnan(measure.figures_of_turns(turns, [{}] * 40)["without_prefill"]), "of servers that do not count it"


def test_the_report_has_a_line_for_each_side():
    runs = [run_entry("off", 1, 2, 1000), run_entry("on", 1, 6, 400)]
    for n, run in enumerate(runs):
        run["figures"] |= {f.key: 0.125 for f in (*report.CHAT_FIGURES, *report.TURNS_FIGURES)}
        run["figures"]["without_prefill"] = 0.9 * n
    text = report.markdown(a_document(True, runs=runs, key="k"))
    assert "| TTFT of turns from 11 on p50 (p99), ms | ITL p50 (p99), ms | ITL mean, ms |" in text
    assert "| 125 (125) | 1000.0 (1000.0) | 1000.0 | 90 | 1.000 |" in text
