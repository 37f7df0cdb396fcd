"""README's commands with the real engine, where no other test runs them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

README = (Path(__file__).parents[4] / "README.md").read_text()


@pytest.fixture(autouse=True)
def alone(clusters):
    """These tests start servers of their own."""
    clusters.stop()


def pd_radix(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "sglang_pd_radix.tools.cli", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_demo_shows_what_a_user_feels(backend, tmp_path):
    """`make demo`, with a chat that is shorter."""
    figures = tmp_path / "figures.json"
    sizes = "--clients 2 --turns 3 --document 200"
    shown = pd_radix("demo", "--backend", backend, "--json", str(figures), "--work-dir", str(tmp_path), *sizes.split())
    runs = json.loads(figures.read_text())["runs"]
    first = {name: run["beside_long_prompts_ttft_median_s"] for name, run in runs.items()}
    # A long prompt of others takes seconds here, and a short turn none: far more than the noise of a busy machine.
    assert first["local"] < 0.5 * first["off"]
    assert re.search(r"beside 2 clients .* s off, .* s on, .* s local", shown)


@pytest.mark.thorough
def test_the_headline_can_be_reproduced(tmp_path):
    (command,) = re.findall(r"^    pd-radix (bench .*)$", README, re.MULTILINE)
    pd_radix(*shlex.split(command), "--runs", "1", "--work-dir", str(tmp_path / "report"))
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    (entry,) = report["workloads"]
    first = {run["variant"]: run["figures"]["later_ttft_p50_s"] for run in entry["runs"]}
    assert first["on"] < 0.5 * first["off"] and "aggregated" in first
