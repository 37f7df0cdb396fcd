"""README's commands with the real engine, where no other test runs them."""

import json
import re
import shlex
from pathlib import Path

import pytest

from sglang_pd_radix.tools import cli, demo

pytestmark = pytest.mark.timeout(600)

README = (Path(__file__).parents[4] / "README.md").read_text()


@pytest.fixture(autouse=True)
def alone(clusters):
    """These tests start servers of their own."""
    clusters.stop()


def test_the_demo_shows_what_a_user_feels(backend, tmp_path, monkeypatch, capsys):
    """`make demo`, with chats that are shorter, and prompts of others that are."""
    monkeypatch.setattr(demo, "LONG_PROMPT", 1500)
    figures = tmp_path / "figures.json"
    sizes = "--clients 2 --turns 3 --document 200"
    command = ["demo", "--backend", backend, "--json", str(figures), "--work-dir", str(tmp_path), *sizes.split()]
    assert cli.main(command) == 0, capsys.readouterr()
    runs = json.loads(figures.read_text())["runs"]
    first = {name: run["beside_long_prompts_ttft_median_s"] for name, run in runs.items()}
    # A long prompt of others takes seconds here, and a short turn none: far more than the noise of a busy machine.
    assert first["local"] < 0.5 * first["off"]
    assert re.search(r"beside 2 clients .* s off, .* s on, .* s local", capsys.readouterr().out)


@pytest.mark.thorough
def test_the_headline_can_be_reproduced(tmp_path, capsys):
    (command,) = re.findall(r"^    pd-radix (bench .*)$", README, re.MULTILINE)
    more = ["--runs", "1", "--work-dir", str(tmp_path / "report")]
    assert cli.main([*shlex.split(command), *more]) == 0, capsys.readouterr()
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    (entry,) = report["workloads"]
    first = {run["variant"]: run["figures"]["later_ttft_p50_s"] for run in entry["runs"]}
    assert first["on"] < 0.5 * first["off"] and "aggregated" in first
