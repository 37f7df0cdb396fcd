"""`pd-radix bench`'s load generator: whose answers are heard, with bench_serving replaced. No server is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import measure

# `load.py` over an engine whose requests take 20 ms each, one after the other, with a comment in each stream; a prompt
# of 0 fails the benchmark.
CHILD = """
import asyncio, json, sys, types

async def ask(given, pbar=None):
    await asyncio.sleep(0.02)
    # As bench_serving does with each line of an answer: a gateway's comment, and an event.
    assert engine.json.loads(": keep-alive").get("text") is None
    assert engine.json.loads('{"text": "a"}') == {"text": "a"} and engine.json.dumps("a") == '"a"'
    told = dict(generated_text=str(given.prompt[0]), output_len=2, start_time=0.0, ttft=0.1, latency=0.2, itl=[0.1])
    return types.SimpleNamespace(success=True, error="", **told)

async def ask_all(rows):
    for row in rows:
        if row.ids[0] == 0:
            raise ValueError("a prompt of 0")
        await engine.ASYNC_REQUEST_FUNCS["sglang"](types.SimpleNamespace(prompt=row.ids))

def run_benchmark(args):
    asyncio.run(ask_all(datasets.DATASET_MAPPING["pd-radix"].from_args(args).load(None)))
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


def texts(load, given, progress=lambda done: None):
    return [output["text"] for output in load.run(given, progress, lambda: None)["outputs"]]


def give_up(done):
    raise PdRadixError("decode-0 died")


def test_what_a_job_that_was_given_up_still_tells_is_not_of_the_next(load):
    with pytest.raises(PdRadixError, match="died"):
        texts(load, job(*[1] * 10), give_up)
    told = []
    assert texts(load, job(*[2] * 10), told.append) == ["2"] * 10 and told == [*range(1, 11)]


def test_nor_is_its_error(load):
    with pytest.raises(PdRadixError, match="died"):
        texts(load, job(1, 0), give_up)
    assert load.encode(["abc"]) == [[3]] and texts(load, job(7, 8)) == ["7", "8"]
    with pytest.raises(PdRadixError, match="a prompt of 0"):
        texts(load, job(0))
