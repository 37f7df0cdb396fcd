"""Five minutes of `make chaos`: its own verdict, on both backends (docs/evidence.md#chaos-and-soak-2026-11-23)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500)]

CHAOS = Path(__file__).parents[4] / "benchmark" / "chaos.py"


def test_nothing_is_lost_under_fire(clusters, model, backend, tmp_path):
    # The deployment of the tests before it has the memory and the cores.
    clusters.stop()
    command = [sys.executable, str(CHAOS), "--backend", backend, "--model", model, "--seconds", "150"]
    command += ["--distinct", "60", "--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert (tmp_path / "report.json").exists(), done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == [] and done.returncode == 0, done.stdout
    # It has been a storm.
    kinds = {event["event"].split()[2] for event in report["events"]}
    assert {"kill", "stop", "pause", "weights"} <= kinds
    assert {line.partition(":")[0] for line in report["judged"]} >= {
        "storm",
        "held by the trees after the storm",
        "pace",
    }
    assert report["storm"]["ended"]["whole"] > 50 and report["storm"]["ended"]["failed"] > 0
