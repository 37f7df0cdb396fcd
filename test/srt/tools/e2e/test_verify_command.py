"""`pd-radix verify` with real servers: it passes, and a token with another's KV in one layer is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]

FAULTY = Path(__file__).parents[2] / "core" / "e2e" / "faulty_decode"


@pytest.mark.parametrize("options", [["--tp-size", "2"], ["--dtype", "bfloat16"]], ids=["float32, TP 2", "bfloat16"])
@pytest.mark.parametrize("fault", ["", "wrong KV"])
def test_wrong_kv_is_found_and_nothing_else(tmp_path, options, fault):
    out = tmp_path / "verdict.json"
    path = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "DECODE_FAULTS": fault, "DECODE_FAULTS_ONE_IN": "2"}
    command = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "verify", "--json", str(out)]
    command += ["--log-dir", str(tmp_path), "--", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == bool(fault), done.stdout + done.stderr[-3000:]
    verdict = json.loads(out.read_text())
    assert verdict["passed"] is not bool(fault) and ("KV" in verdict["found_by"]) is bool(fault), done.stdout
