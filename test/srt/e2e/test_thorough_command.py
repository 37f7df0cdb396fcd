"""`pd-radix verify --thorough` in small, with real servers: its report, and that what is finished is not done again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]

COMMAND = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "verify", "--thorough"]


def workers(directory) -> set[int]:
    """Those that were started with a model, or a log, in this directory."""
    running = ((p.pid, " ".join(p.info["cmdline"] or ())) for p in psutil.process_iter(["cmdline"]))
    return {pid for pid, command in running if "sglang.launch_server" in command and str(directory) in command}


def test_parts_in_small_and_their_report(clusters, tmp_path):
    # The deployment of the tests before it has the memory and the cores.
    clusters.stop()
    file, out = tmp_path / "report.html", tmp_path / "report.json"
    files = ["--report", str(file), "--json", str(out)]
    command = [*COMMAND, *files, "--minutes", "12", "--only", "kernels,faults,placement"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "PASSED: 2 of the 2 parts that this host can show passed, 1 skipped" in done.stdout
    told = json.loads(out.read_text())
    outcomes = told["outcomes"]
    assert told["passed"] and {name: o["verdict"] for name, o in outcomes.items()} == {
        "kernels": "PASSED",
        "faults": "PASSED",
        "placement": "SKIPPED",
    }
    # Each fault has been, and after each everything was asked again.
    rounds = {row[0]: row for row in outcomes["faults"]["tables"][0]["rows"]}
    faults = {f"{what} {worker}" for what in ("flush", "stop", "kill") for worker in ("prefill", "decode")}
    assert rounds.keys() == {"calm", "again", *faults, *(f"after: {fault}" for fault in faults)}
    assert int(rounds["kill decode"][4]) and int(rounds["kill prefill"][4]), "somebody was hit"
    page = file.read_text()
    assert "tools.thorough.storm" in page and not re.search(r"<script|(src|href)=(?!['\"]?data:)", page)
    assert not workers(tmp_path)

    # Again, and there is nothing to do.
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "faults: PASSED, from an earlier run" in again.stderr


def test_one_that_is_ended_ends_its_servers_and_tells_what_it_has(clusters, tmp_path):
    clusters.stop()
    file = tmp_path / "report.md"
    command = [*COMMAND, "--report", str(file), "--minutes", "5", "--only", "exactness,mla"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 300
        while len(workers(tmp_path)) < 2:
            assert run.poll() is None and time.monotonic() < deadline, run.stderr.read()
            time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=120) == 128 + signal.SIGTERM, run.stderr.read()
    assert not workers(tmp_path)
    report = file.read_text()
    assert "chat was interrupted" in report and "interrupted before it began" in report
