"""A real decode worker that drafts, with the tree and without: the same tokens, and as many drafts accepted (trap 35).

Without servers, and all of it with the models of `pd-radix make-model`: two with a draft beside them, and two that have
states of linear attention and their draft in themselves. Over the wire it is ``e2e/test_speculative_pairs.py`` and
``e2e/test_hybrid_speculation.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pd_radix.tools.make_model import DRAFT, ModelShape, make_model

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

FLAG = "--disaggregation-decode-enable-radix-cache"
VERSIONS = ["0", "1"]


@pytest.fixture(scope="module", params=["eagle", "eagle3", "qwen3-next-mtp", "qwen3.5-moe-mtp"])
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def run(tmp_path_factory, arch):
    """Runs a worker with these options and returns what it printed; each combination once."""
    model = make_model(tmp_path_factory.mktemp("model") / arch, ModelShape(arch))
    plain = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096"]
    plain += ["--max-running-requests", "8"]
    plain += ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]
    drafts = ["--speculative-algorithm", "EAGLE3" if arch == "eagle3" else "EAGLE"]
    drafts += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    with_tree, without = [FLAG], []
    if arch.startswith("eagle"):
        drafts += ["--speculative-draft-model-path", str(model / DRAFT)]
    else:
        with_tree, without = [FLAG, "--mamba-scheduler-strategy", "extra_buffer"], ["--disable-radix-cache"]
    done: dict[tuple, dict] = {}

    def start(version: str | None, page: int, flag: bool, retract: bool = False, spoil: bool = False) -> dict:
        key = version, page, flag, retract, spoil
        if key not in done:
            env = {**os.environ, "SGLANG_ENABLE_SPEC_V2": version or "0", "SGLANG_TEST_RETRACT": str(int(retract))}
            env["SGLANG_TEST_SPOIL"] = str(int(spoil))
            options = [
                *plain,
                "--page-size",
                str(page),
                *(drafts if version else []),
                *(with_tree if flag else without),
            ]
            command = [sys.executable, str(Path(__file__).with_name("speculating_worker.py")), *options]
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
            lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT")]
            assert lines, ended.stderr[-3000:]
            done[key] = json.loads(lines[0].removeprefix("RESULT"))
        return done[key]

    return start


def each(result: dict, what: str) -> list:
    return [request[what] for request in (*result["turns"], *result["together"])]


def drafts_a_step(result: dict) -> float:
    accepted = [n for histogram in each(result, "accepted") for n, count in enumerate(histogram) for _ in range(count)]
    return sum(accepted) / len(accepted)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("version", VERSIONS, ids=["v1", "v2"])
def test_as_many_drafts_are_accepted_with_the_tree(run, version, page):
    on, off = run(version, page, True), run(version, 1, False)
    assert each(on, "ids") == each(off, "ids") == each(run(None, 1, False), "ids")
    assert each(on, "accepted") == each(off, "accepted")
    assert all(request["held"] for request in on["turns"][1:]), "trap 34"
    assert on["sent"] < off["sent"] / 2
    assert drafts_a_step(on) > 0.3, "the draft must be good enough to show when it gets worse"


def test_a_draft_is_worse_for_kv_of_other_tokens(run):
    """Of the models made for it, and all that makes the other tests here worth anything."""
    right, spoilt = run("1", 1, False), run("1", 1, False, spoil=True)
    assert each(spoilt, "ids") == each(right, "ids")
    assert drafts_a_step(spoilt) < drafts_a_step(right) * 0.7


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
@pytest.mark.parametrize("version", VERSIONS, ids=["v1", "v2"])
def test_a_retracted_request_has_as_many_accepted_as_if_it_had_stayed(run, version, flag):
    """Every third step retracts all but one of those that run together."""
    retracted, stayed = run(version, 16 if flag else 1, flag, retract=True), run(version, 1, False)
    assert sum(each(retracted, "retracted")) > 5
    assert each(retracted, "ids") == each(stayed, "ids")
    assert each(retracted, "accepted") == each(stayed, "accepted")
