"""`pd-radix verify --self-test` with real servers: every fault in decode's KV is found, and without one it passes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]


@pytest.mark.parametrize("options", [["--tp-size", "2"], ["--dtype", "bfloat16"]], ids=["float32, TP 2", "bfloat16"])
def test_every_fault_is_found_and_nothing_else(tmp_path, options):
    out = tmp_path / "verdict.json"
    command = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "verify", "--self-test", "--json", str(out)]
    done = subprocess.run([*command, "--log-dir", str(tmp_path), "--", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    verdict = json.loads(out.read_text())
    outcomes = verdict["figures"]["self-test"]
    assert verdict["passed"] and len(outcomes) == 9
    not_made = {outcome["fault"] for outcome in outcomes if not outcome["found_by"]}
    assert not_made == (set() if "--tp-size" in options else {"one rank"})
