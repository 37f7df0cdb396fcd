"""Decode workers that are wrong on purpose (`faulty_decode`), on real servers: each verdict on them is FAILED."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[4]


def failed(command: list[str], report: Path, faults: str, after: int = 0) -> dict:
    """What a command that has to fail writes to its --json."""
    path = [str(Path(__file__).parent / "faulty_decode"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(path), "DECODE_FAULTS": faults, "DECODE_FAULTS_AFTER": str(after)}
    done = subprocess.run(
        [sys.executable, *command, "--json", str(report)], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr[-3000:]
    return json.loads(report.read_text())


@pytest.mark.parametrize("faults", ["keeps no answers", "keeps nothing"])
def test_the_demo_sees_what_does_not_enter_the_tree(clusters, model, tmp_path, faults):
    """All turns together sent 1.048 times the least without a single answer in the tree, and that passed once."""
    clusters.stop()
    command = ["-m", "sglang_pd_radix.tools.cli", "demo", "--model", model, "--work-dir", str(tmp_path / "work")]
    failures = failed(command, tmp_path / "demo.json", faults)["failures"]
    assert failures[0].startswith("on: ") and "times the lower bound was sent from turn 2 on" in failures[0]


def test_a_storm_sees_each_of_three_faults_by_its_own_part(clusters, model, tmp_path):
    """They begin in the storm: in the calm before it nothing is wrong."""
    clusters.stop()
    command = [str(ROOT / "benchmark" / "chaos.py"), "--seconds", "90", "--distinct", "40", "--shrink", "96"]
    command += ["--without", "kill", "--seed", "3", "--model", model, "--log-dir", str(tmp_path / "logs")]
    report = failed(command, tmp_path / "chaos.json", "wrong token,forgets,leaks descriptors", after=250)
    assert "storm" in report
    found = "\n".join(report["problems"])
    for part in ("differs from token 0 on", "after the storm: the tree of decode-", "descriptors more than before"):
        assert part in found, part
