"""`pd-radix bench`'s load generator: whose answers are heard, with bench_serving replaced. No server is started."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.arguments import hidden
from sglang_pd_radix.tools.bench import measure, workload
from sglang_pd_radix.tools.bench.asked import RequestFailed
from sglang_pd_radix.tools.cluster.local_http import API_KEY

# `load.py` over an engine whose requests take 20 ms each, one after the other, with a comment in each stream; a prompt
# of 0 fails the benchmark, one below fails itself, and one above 50 answers with the key that is sent.
CHILD = """
import asyncio, json, os, sys, types

# As bench_serving's, of all requests the same.
BODY = {}

async def ask(given, pbar=None):
    await asyncio.sleep(0.02)
    # As bench_serving does with each line of an answer: a gateway's comment, and an event.
    assert engine.json.loads(": keep-alive").get("text") is None
    assert engine.json.loads('{"text": "a"}') == {"text": "a"} and engine.json.dumps("a") == '"a"'
    told = dict(generated_text=str(given.prompt[0]), output_len=2, start_time=0.0, ttft=0.1, latency=0.2, itl=[0.1])
    if given.prompt[0] == 50:
        told["generated_text"] = json.dumps(given.extra_request_body)
    if given.prompt[0] > 50:
        told["generated_text"] = os.environ.get("OPENAI_API_KEY", "")
    fails = given.prompt[0] < 0
    return types.SimpleNamespace(success=not fails, error="Traceback\\nno decode worker" if fails else "", **told)

async def ask_all(rows):
    for row in rows:
        if row.ids[0] == 0:
            raise ValueError("a prompt of 0")
        await engine.ASYNC_REQUEST_FUNCS["sglang"](types.SimpleNamespace(prompt=row.ids, extra_request_body=BODY))

def run_benchmark(args):
    rows = datasets.DATASET_MAPPING["pd-radix"].from_args(args).load(None)
    asyncio.run(ask_all(rows))
    # As bench_serving, which makes figures of the answers that are whole.
    [row for row in rows if row.ids[0] > 0][0]
    return {"duration": 1.0}

class DatasetRow:
    def __init__(self, ids, *more, **others):
        self.ids = ids

class Tokenizer:
    def __len__(self):
        return 100

    def encode(self, text, add_special_tokens):
        return [len(text)]

engine = types.ModuleType("sglang.bench_serving")
engine.json = json
engine.ASYNC_REQUEST_FUNCS, engine.get_request, engine.run_benchmark = {"sglang": ask}, None, run_benchmark
datasets = types.ModuleType("sglang.benchmark.datasets")
datasets.DATASET_MAPPING, datasets.DatasetRow = {}, DatasetRow
utils = types.ModuleType("sglang.benchmark.utils")
utils.get_tokenizer = lambda model: Tokenizer()
for module in (types.ModuleType("sglang"), types.ModuleType("sglang.benchmark"), engine, datasets, utils):
    sys.modules[module.__name__] = module
sys.modules["sglang"].bench_serving = engine

from sglang_pd_radix.tools.bench import load
sys.exit(load.main("a model"))
"""


@pytest.fixture
def load(monkeypatch, tmp_path):
    popen = subprocess.Popen
    monkeypatch.setattr(
        measure.subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", CHILD], **more)
    )
    made = measure.LoadGenerator("a model", tmp_path / "load.log")
    monkeypatch.undo()
    yield made
    made.close()


def job(*prompts):
    return {"url": "", "requests": [{"ids": [prompt], "answer": 2} for prompt in prompts]}


def texts(load, given):
    return [output["text"] for output in load.run(given, lambda: None)["outputs"]]


@pytest.fixture
def give_up(load, monkeypatch):
    """Has a job run to whose end nobody listens."""

    def died(check):
        raise PdRadixError("decode-0 died")

    def run(given):
        load.wait_ready()
        with monkeypatch.context() as patched, pytest.raises(PdRadixError, match="died"):
            patched.setattr(load, "_next", died)
            texts(load, given)

    return run


def test_what_a_job_that_was_given_up_still_tells_is_not_of_the_next(load, give_up):
    give_up(job(*[1] * 10))
    assert texts(load, job(*[2] * 10)) == ["2"] * 10


def test_nor_is_its_error(load, give_up):
    give_up(job(1, 0))
    assert load.encode(["abc"]) == [[3]] and texts(load, job(7, 8)) == ["7", "8"]
    with pytest.raises(PdRadixError, match="a prompt of 0"):
        texts(load, job(0))


def test_each_job_hears_that_the_process_has_ended(load):
    """The second ended the command with status 141, as if its reader had gone, or waited for ever."""
    assert texts(load, job(7)) == ["7"]
    load._process.kill()
    for _ in range(3):
        with pytest.raises(PdRadixError, match="the load generator ended"):
            texts(load, job(8))


@pytest.mark.parametrize("prompts", [(-1, 3), (3, -1), (-1, -2)])
def test_requests_that_fail_say_why_though_none_is_whole(load, prompts):
    """The engine's benchmark fails with an IndexError of its own where no answer is whole."""
    checked = []
    asked = [workload.Request((prompt,), 2) for prompt in prompts]
    with pytest.raises(PdRadixError, match=r"request \d of 2 failed: no decode worker"):
        measure._ask(load, "", asked, [r.ids for r in asked], 1, False, False, lambda: checked.append(True))
    assert checked, "a worker that died says more"


def test_only_a_side_that_refuses_may_answer_503():
    outputs = [{"error": None, "tokens": 2}, {"error": "Service Unavailable: data: {}", "tokens": 0}]
    alone = SimpleNamespace(run=lambda job, check: {"outputs": outputs})
    asked = [workload.Request((3,), 2)] * 2

    def ask(refuses):
        return measure._ask(alone, "", asked, [r.ids for r in asked], 1, False, refuses, lambda: None)

    assert ask(True) == outputs
    with pytest.raises(RequestFailed, match="request 2 of 2 failed: Service Unavailable"):
        ask(False)
    outputs.reverse()  # Nothing is measured then.
    with pytest.raises(RequestFailed, match="request 1 of 2"):
        ask(True)


def test_the_servers_key_is_sent_and_shown_to_nobody(load, monkeypatch, tmp_path):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert texts(load, job(99)) == [""]
    monkeypatch.setenv(API_KEY, "a secret")  # as `Cluster.start` does, after the load generator was started
    assert texts(load, job(99)) == ["a secret"] and "a secret" not in (tmp_path / "load.log").read_text()
    given = ["bench", "--work-dir=/x/y", "--", "--api-key", "a secret", "--admin-api-key=another secret", "--tp", "1"]
    assert hidden(given) == [*("bench", "--work-dir=y", "--", "--api-key", "...", "--admin-api-key=...", "--tp", "1")]


@pytest.mark.parametrize("rids", [False, True])
def test_each_request_has_a_rid_if_they_are_asked_for(load, rids):
    load._rids = {"rids": True} if rids else {}
    for number in (1, 2):
        outputs = load.run(job(50, 50), lambda: None)["outputs"]
        named = [{"rid": f"pd-radix-bench-{number}-{place}"} if rids else {} for place in range(2)]
        assert [json.loads(output["text"]) for output in outputs] == named
        assert [{"rid": output["rid"]} if rids else {} for output in outputs] == named
        assert all(("unix_s" in output) == ("rid" in output) == rids for output in outputs)
