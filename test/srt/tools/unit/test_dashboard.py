"""The dashboard shows every metric of this package; and what it names is exported."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from code_texts import texts

from sglang_pd_radix.tools import cli, dashboard, reference

ENGINE = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "observability" / "metrics_collector.py"
OURS = {name for name, *_ in reference.metrics()}
DASHBOARD = json.loads(dashboard.DASHBOARD.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]

#: Metrics of this package on no panel, each with the reason.
ON_NO_PANEL: dict[str, str] = {
    "sglang:prefill_read_tokens_total": "of an option that is off by default; docs/deploy.md says what to look for",
    "sglang:prefill_reads_total": "of an option that is off by default; docs/deploy.md says what to look for",
}


def named(expr: str) -> set[str]:
    """The metrics that a query names."""
    return set(re.findall(r"sglang:\w+", expr))


def test_the_command_prints_the_files(capsys):
    for options, file in (
        ((), dashboard.DASHBOARD),
        (("--alarms",), dashboard.RULES),
        (("--prometheus",), dashboard.SCRAPE),
    ):
        assert cli.main(["dashboard", *options]) == 0
        assert capsys.readouterr().out == file.read_text(encoding="utf-8")


def test_each_panel_has_a_title_of_its_own_and_says_what_it_is():
    assert len({panel["title"] for panel in PANELS}) == len(PANELS) and all(panel["description"] for panel in PANELS)


def test_it_fits_one_screen():
    """1080 lines, of which Grafana takes 40 in kiosk mode; a unit of its grid has 30 and a gap of 8."""
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in DASHBOARD["panels"])
    assert bottom * 38 <= 1040
    assert all(panel["gridPos"]["w"] >= 6 for panel in DASHBOARD["panels"])


def test_every_metric_is_on_a_panel_or_has_a_reason():
    shown = {name for _, expr, _ in QUERIES for name in named(expr)}
    assert OURS - shown == {*ON_NO_PANEL}, "on no panel, and without a reason in ON_NO_PANEL"
    assert all(len(reason) > 10 for reason in ON_NO_PANEL.values())


def exported() -> set[str]:
    """What the workers export: by this package and by the engine. A histogram has buckets, a sum and a count."""
    engines = {text for text in texts(ENGINE) if text.startswith("sglang:")}
    return OURS | engines | {f"{name}_bucket" for name in engines}


def test_every_metric_that_a_panel_or_an_alarm_names_is_exported():
    rules = dashboard.RULES.read_text(encoding="utf-8")
    named_there = {name for _, expr, _ in QUERIES for name in named(expr)} | named(rules)
    assert named_there <= exported() and len(named_there) > 25


def test_what_each_tp_rank_counts_is_counted_once():
    """The engine's scheduler counts on every TP rank, under a label of its own: of these the greatest counts."""
    collector = ENGINE.read_text(encoding="utf-8").split("class TokenizerMetricsCollector")[0]
    counters = set(re.findall(r'"(sglang:\w+_total)"', collector))
    rules = [rule["expr"] for group in yaml.safe_load(dashboard.RULES.read_text())["groups"] for rule in group["rules"]]
    once, asked = r"max by \(instance, dp_rank\) \((?:rate|increase)\(", 0
    for expr in [*rules, *(expr for _, expr, _ in QUERIES)]:
        for name in named(expr) & counters:
            asked += 1
            assert len(re.findall(once + name, expr)) == expr.count(name), expr
    assert asked >= 4


def test_lines_of_several_workers_and_ranks_are_told_apart():
    """Every query keeps the worker, and what is exported by rank also the rank; and heeds the variables."""
    for title, expr, legend in QUERIES:
        assert 'instance=~"$worker"' in expr and "{{instance}}" in legend, title
        if named(expr.partition(" unless ")[0]) & OURS and "increase" not in expr:
            assert 'dp_rank=~"$rank"' in expr and "{{dp_rank}}" in legend, title


def exprs(title: str) -> list[str]:
    """The queries of the panel whose title begins so."""
    return [expr for of, expr, _ in QUERIES if of.startswith(title)]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
def test_what_runs_on_prefill_is_not_drawn_as_decodes_batch(tmp_path):
    (expr,) = exprs("Requests running")
    series = {"p0": ("prefill", "running", 1), "d0": ("decode", "running", 8), "d1": ("decode", "transfer", 4)}
    case = {
        "input_series": [
            {"series": f'sglang:pd_requests{{instance="{name}",engine_type="{role}",state="{state}"}}', "values": count}
            for name, (role, state, count) in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": expr.replace("$worker", ".*").replace("$rank", ".*"),
                "eval_time": "0s",
                "exp_samples": [{"labels": '{instance="d0"}', "value": 8}],
            }
        ],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "cases.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
@pytest.mark.parametrize("title", ["Time to first token", "Time between tokens"])
def test_prefill_has_no_line_of_what_clients_of_decode_see(tmp_path, title):
    """The tokenizer's metrics have no label for it. A server of neither mode, which tells no requests, has its line."""
    query = exprs(title)[0]
    (name,) = named(query.partition(" unless ")[0])
    series = {
        f'sglang:pd_requests{{instance="{instance}",engine_type="{role}",state="{state}"}}': "0x30"
        for instance, role in (("p0", "prefill"), ("d0", "decode"))
        for state in ("waiting", "running")
    }
    for instance in ("p0", "d0", "e0"):
        series |= {f'{name}{{instance="{instance}",le="{le}"}}': "0+1x30" for le in ("2", "+Inf")}
    expr = query.replace("$worker", ".*").replace("$__rate_interval", "1m")
    samples = [{"labels": f'{{instance="{instance}"}}', "value": 1} for instance in ("d0", "e0")]
    case = {
        "interval": "10s",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "3m", "exp_samples": samples}],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "cases.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_nobody_need_take_what_is_printed(closed):
    """`>&-`: Python has no such stream then, and the next file that is opened would get its number."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_pd_radix.tools.cli", "dashboard"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert (done.returncode, done.stderr) == (0, "")
