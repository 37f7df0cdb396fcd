"""Real schedulers, each TP rank alone in a process, with a real PegaFlow server: aggregated, prefill and decode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import host_server
import pytest

from sglang_pd_radix.tools.make_model import ModelShape, make_model

SHAPES = [ModelShape(), ModelShape(arch="mla")]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing())),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return {shape.arch: (str(make_model(folder / shape.arch, shape)), shape) for shape in SHAPES}


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
@pytest.mark.parametrize(("arch", "ranks"), [("qwen3", 1), ("qwen3", 2), ("mla", 2)])
def test_what_it_says_with_a_warm_server(models, tmp_path, arch, ranks, mode):
    model, shape = models[arch]
    server = host_server.HostServer(tmp_path).start()
    try:
        script = Path(host_server.HERE) / "one_scheduler.py"
        env = {**os.environ, **host_server.engine_env(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(script), mode, model, server.endpoint, str(ranks)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr[-3000:]
        result = json.loads(done.stdout.strip().splitlines()[-1])
        assert result["tree"] == ("PegaFlowDecodeRadixCache" if mode == "decode" else "PegaFlowRadixCache")
        answers, cached = result["answers"], result["cached"]
        for number in range(1, 5):
            assert answers[f"r{number}"] and answers[f"r{number}"] == answers[f"r{number + 4}"]
            assert (cached[f"r{number}"], cached[f"r{number + 4}"]) == (0, 288)
        if mode == "decode":
            assert result["prefixes"] == [0] * 4 + [288] * 4, "what is loaded is not sent"
        cold, warm, aborted = (result["seen"][name] for name in ("cold", "warm", "aborted"))
        assert cold["loaded"] == 0 and warm["loaded"] == 4 * 18 and warm["lost"] == 0
        for one in (cold, warm, aborted):
            assert one["idle"] and one["available"] + one["evictable"] == one["size"] and one["protected"] == 0
            assert ("audit" in one) == ("locks_taken" in one) == (mode == "decode")
            assert mode != "decode" or one["audit"] == [] and one["locks_taken"] == one["locks_released"] > 0
            assert (one["saving_tokens"], one["loading_tokens"], one["prefetches"]) == (0, 0, 0)
        # One copy of each page: of both ranks' parts, or of what they have alike. The server rounds up.
        pool = server.metric("pegaflow_pool_used_bytes")
        assert 0 < pool <= 1.05 * aborted["saved"] * 16 * shape.kv_bytes_per_token
        # Its processes are gone.
        end = time.monotonic() + 60
        while server.instances() or server.mappings():
            assert time.monotonic() < end
            time.sleep(0.05)
        server.forget()
        assert server.metric("pegaflow_pool_used_bytes") == 0
    finally:
        server.kill()
