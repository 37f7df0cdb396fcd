"""`python benchmark/gpu_minutes.py`: the plan, the command lines of the second environment, the page. No server."""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace

import gpu_minutes
import pytest
from test_bench_turns import a_run

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import deploy
from sglang_pd_radix.tools.cluster import RADIX_FLAG

PYTHON = "/other/bin/python"


def names(sets):
    return [[side.name for side in sides] for sides, _ in sets]


# ---- the plan ----


def test_each_part_has_its_share_and_leaves_what_it_does_not_need():
    assert gpu_minutes.part_until(100, 400, [1, 2, 3]) == 150
    assert gpu_minutes.part_until(110, 400, [2, 3]) == pytest.approx(226), "the first needed 10 of its 50 s"
    assert gpu_minutes.part_until(500, 400, [1, 1]) == 500, "too late: no time at all"


def test_a_step_has_the_time_of_those_that_do_not_fit_any_more():
    assert gpu_minutes.step_until(0, 600, [100, 200, 300], 50) == 100
    assert gpu_minutes.step_until(0, 599, [100, 200, 300], 50) == pytest.approx(599 / 3), "without the last"
    assert gpu_minutes.step_until(0, 60, [100, 200, 300], 50) == 60, "all of it, for the sides that are first"
    assert gpu_minutes.step_until(7, 50, [100, 200, 300], 50) == 7, "not even these"


@pytest.mark.parametrize(
    "shared, room, sets",
    [
        (True, math.inf, [["off", "on", "local", "aggregated"]]),
        (True, 5.9, [["off", "on", "local"]]),
        (True, 2.4, [["off"], ["on"], ["local"]]),
        (False, math.inf, [["off", "on", "sent", "aggregated"]]),
        (False, 2.4, [["off", "on"], ["sent", "aggregated"]]),
        (False, 0.5, [["off"], ["on"], ["sent"]]),
    ],
)
def test_as_many_sides_at_a_time_as_there_is_memory_for(shared, room, sets):
    found, left_out = gpu_minutes.at_once(gpu_minutes.own(shared), "", shared, room)
    assert names(found) == sets
    assert bool(left_out) == ("aggregated" not in sum(sets, []))


@pytest.mark.parametrize("options, gpus, shared", [([], 1, True), ([], 2, False), (["--tp", "2"], 2, True)])
def test_the_further_side_has_local_prefill_the_other_way_than_by_default(options, gpus, shared):
    assert gpu_minutes.shares_gpu(options, gpus) == shared
    assert gpu_minutes.own(shared)[2].options[1] == ("128" if shared else "off")
    assert not gpu_minutes.shares_gpu([], 0)


def test_memory_of_a_worker_and_of_the_smallest_gpu(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20))
    kv = 2 * 2 * 2 * 4 * 64  # K and V of two layers in two bytes
    assert gpu_minutes.worker_mib(tmp_path, 1024) == gpu_minutes.WORKER_MIB + 3 + kv * 1024 / 2**20
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert gpu_minutes.worker_mib(tmp_path, 1024) == gpu_minutes.WORKER_MIB + 1.5 + kv * 1024 / 2**20
    assert gpu_minutes.memory_mib(["H200, 580.1, 143771 MiB", "H100, 580.1, 81559 MiB"]) == 81559
    assert gpu_minutes.memory_mib(["GB10, 580.1, [N/A]"]) == math.inf == gpu_minutes.memory_mib([])


@pytest.mark.parametrize("small", [True, False])
def test_all_workloads_fit_into_the_pools_of_one_start(small):
    shape, wanted = gpu_minutes.steps(small)
    assert [step.key for step in wanted[:3]] == ["c", "a", "k"] and len({s.level for s in wanted if s.level}) >= 4
    for step in wanted:
        step.sizes.check(step.key)
        asked = step.sizes.make(step.key, gpu_minutes.workload.Tokens(range(400, 1900), 0))
        assert asked.longest < shape.pool and (step.sizes.pool, step.sizes.prefill) == (shape.pool, shape.prefill)
        assert step.level in (0, asked.concurrency)


# ---- the second environment ----


def test_its_workers_have_its_interpreter_and_flag_and_no_patch_set(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/checkout/python")
    sides = gpu_minutes.others(RADIX_FLAG)
    ((together, executable),), _ = gpu_minutes.at_once(sides, PYTHON, True, math.inf)
    shape = deploy.Shape(3000, 20)
    env = gpu_minutes.UNPATCHED
    made = deploy.Deployment("m", shape, [], "nixl", tmp_path, None, together, env, executable=executable)
    planned = {p.name: p for p in made.cluster.plan()}
    assert sorted(planned) == ["decode-0", "decode-1", "prefill-0", "router-other", "router-other-off"]
    for name, process in planned.items():
        assert (process.command[0] == PYTHON) != name.startswith("router"), "one router for all releases"
        assert (RADIX_FLAG in process.command) == (name == "decode-0")
        if process.is_worker:
            assert process.command[1:3] == ["-m", "sglang.launch_server"]
            assert (process.env["PYTHONPATH"], process.env["SGLANG_PD_RADIX"]) == ("", "0")
    assert "--prefill" in planned["router-other"].command


def test_one_without_a_flag_has_one_side_and_two_fit_one_at_a_time():
    assert [side.name for side in gpu_minutes.others("")] == ["other-off"]
    assert names(gpu_minutes.at_once(gpu_minutes.others("--x"), PYTHON, True, 2.2)[0]) == [["other"], ["other-off"]]


def test_it_has_no_counters_of_the_patch_set(tmp_path):
    sides = gpu_minutes.others("")
    made = deploy.Deployment("m", deploy.Shape(3000, 20), [], "nixl", tmp_path, sides=sides, executable=PYTHON)
    made.cluster.processes = made.cluster.plan()
    counters = made.counters(made.variants[0])
    assert math.isnan(counters["sent_bytes"]) and math.isnan(counters["reused_tokens"]) and "cpu_s" in counters


def test_one_that_has_no_engine_is_refused_at_once(tmp_path, capsys):
    assert gpu_minutes.main(["--other-env", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "does not run" in capsys.readouterr().err and not (tmp_path / "out").exists()
    monkey = tmp_path / "python"
    monkey.write_text("#!/bin/sh\necho Python 3.12\n")
    monkey.chmod(0o755)
    with pytest.raises(PdRadixError, match="no sglang"):
        gpu_minutes.versions(str(monkey))
    assert ", sglang 0.5." in gpu_minutes.versions()


# ---- measured, as far as there is time ----

STEPS = ["c)", "a) at 128", "k)", "a) at 32", "a) at 8", "a) at 64", "a) at 16"]


class Servers:
    """Deployments and runs that take ``seconds`` each of a clock of their own, each run ``growing`` times as long as
    the one before. broken: sides with which none starts."""

    def __init__(self, monkeypatch, tmp_path, seconds=10.0, growing=1.0, broken=()):
        self.growing = growing
        self.now, self.seconds, self.broken, self.asked, self.started = 0.0, seconds, broken, [], []
        load = SimpleNamespace(close=lambda: None, wait_ready=lambda: None, words=range(400, 1900))
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(gpu_minutes, "time", clock)
        monkeypatch.setattr(gpu_minutes, "LoadGenerator", lambda *a: load)
        monkeypatch.setattr(gpu_minutes, "Deployment", self.deployment)
        monkeypatch.setattr(gpu_minutes, "run_once", self.run_once)
        self.out = tmp_path

    @contextlib.contextmanager
    def deployment(self, model, shape, options, backend, logs, progress, sides, on_wait=None, **more):
        self.check = on_wait
        self.started.append([side.name for side in sides])
        if set(self.started[-1]) & set(self.broken):
            raise PdRadixError("decode-0 died\n  | its log")
        self.now += self.seconds
        process = SimpleNamespace(name="decode-0", command=["/venv/bin/python", "--api-key", "secret"])
        yield SimpleNamespace(
            variants=deploy.variants(sides),
            cluster=SimpleNamespace(processes=[process]),
            info=lambda variant: {"device": "cuda", "dtype": "bfloat16", "page_size": 16},
            check=lambda: None,
        )

    def run_once(self, deployment, load, asked, variant, number, page_size):
        if number:
            self.now += self.seconds
            self.seconds *= self.growing
            self.check()
            self.asked.append((asked.key, asked.concurrency, variant.name))
        faster = {"off": 1.0, "on": 2.0, "sent": 0.5}.get(variant.name, 1.5)
        run = a_run(variant.name, number, ["x", variant.name])
        run.figures |= {
            "requests_per_s": 10.0 * faster,
            "least_pages": 1,
            "prompt_pages": 4,
            "sent_bytes": 400 / faster,
        }
        return run

    def measure(self, seconds, sides=None):
        show = SimpleNamespace(now=lambda text: None, done=lambda text: None)
        setting = {"command": "python benchmark/gpu_minutes.py", "GPUs": "H200, 580.1, 143771 MiB"}
        args = SimpleNamespace(out=self.out, backend="nixl")
        made = gpu_minutes.Minutes(args, "m", [], setting, seconds, show)
        sets = [(sides or gpu_minutes.own(False), ""), (gpu_minutes.others("--x"), PYTHON)]
        made.measure(sets, *gpu_minutes.steps(False))
        return made


def test_with_time_all_is_measured_and_the_page_has_it(monkeypatch, tmp_path):
    served = Servers(monkeypatch, tmp_path)
    made = served.measure(10_000)
    assert not made.left_out and not made.failures and len(made.rows) == 6 * 7
    assert [name for key, _, name in served.asked if key == "c"][:4] == ["off", "on", "sent", "aggregated"]
    assert [name for key, level, name in served.asked if level == 128][:2] == ["on", "off"], "the sides take turns"
    text = (tmp_path / "page.md").read_text()
    assert "H200, 580.1, 143771 MiB" in text and "bfloat16" in text and "secret" not in text
    assert "* requests/s: 0.50 times off's, sent in (c)" in text
    on = next(row for row in made.rows if row["variant"] == "on")
    assert on["figures"]["sent_over_least"] == pytest.approx(200 / 100)
    assert "| on, 8 | 20.00 |" in text and "| other, 128 | 15.00 |" in text
    assert "Of 160 answers, not those of off: on 1, sent 1" in text and "those of on: off 1, sent 1" in text
    assert text.count("\n## (a) at 128: shared prefixes") == 1 == text.count("\n## (a)")
    assert text.count("Nothing.") == 2
    assert "on" in (tmp_path / "itl.svg").read_text() and json.loads((tmp_path / "runs.json").read_text())["rows"]


def test_without_it_the_most_wanted_is_and_the_second_environment_has_its_part(monkeypatch, tmp_path):
    made = Servers(monkeypatch, tmp_path).measure(200)
    measured = {(row["variant"], row["step"]) for row in made.rows}
    assert {("off", "(c)"), ("on", "(c)"), ("other", "(c)")} <= measured
    assert made.left_out and "no time" in (tmp_path / "page.md").read_text()
    assert made.began + 200 + 10 >= gpu_minutes.time.monotonic(), "over by no more than a run that is under way"


def test_runs_that_take_longer_than_thought_leave_the_last_steps_out_and_not_the_first(monkeypatch, tmp_path):
    made = Servers(monkeypatch, tmp_path, seconds=30).measure(840)
    sides = {
        step: [row["variant"] for row in made.rows if row["step"] == step] for step in ("(c)", "(a) at 128", "(k)")
    }
    assert set(map(len, sides.values())) == {6} and sides["(c)"][:2] == ["off", "on"]
    assert "(a) at 16: no time for off, on, sent, aggregated" in made.left_out
    slow = Servers(monkeypatch, tmp_path, seconds=60).measure(840)
    assert [row["variant"] for row in slow.rows if row["step"] == "(a) at 128"][:2] == ["on", "off"]


def test_a_run_that_does_not_end_costs_what_comes_after_it_and_nothing_before(monkeypatch, tmp_path):
    served = Servers(monkeypatch, tmp_path, seconds=20, growing=2)
    made = served.measure(200)
    assert any("time was over; lost and what comes after it: (" in text for text in made.left_out)
    assert {row["variant"] for row in made.rows} >= {"off"} and len(served.started) == 2
    assert len(json.loads((tmp_path / "runs.json").read_text())["rows"]) == len(made.rows)


def test_what_does_not_start_is_tried_in_two_halves_and_the_log_stays_out_of_the_page(monkeypatch, tmp_path):
    served = Servers(monkeypatch, tmp_path, broken=("aggregated",))
    made = served.measure(10_000)
    assert served.started == [
        ["off", "on", "sent", "aggregated"],
        ["off", "on"],
        ["sent", "aggregated"],
        ["sent"],
        ["other", "other-off"],
    ]
    assert len(made.failures) == 2 and {row["variant"] for row in made.rows} == {*"off on sent other other-off".split()}
    text = (tmp_path / "page.md").read_text()
    assert "decode-0 died" in text and "its log" not in text


def test_an_answer_that_nobody_expects_fails_its_side_alone(monkeypatch, tmp_path):
    """As another release may give it."""
    served = Servers(monkeypatch, tmp_path)

    def run_once(deployment, load, asked, variant, *rest):
        return (
            {}["internal_states"]
            if variant.name == "other"
            else served.run_once(deployment, load, asked, variant, *rest)
        )

    monkeypatch.setattr(gpu_minutes, "run_once", run_once)
    made = served.measure(10_000)
    assert len(made.rows) == 5 * 7 and made.failures == [
        f"({step}, other: KeyError('internal_states')" for step in STEPS
    ]


def test_a_wait_ends_with_what_the_deployment_was_told_to_ask(tmp_path):
    def over():
        raise gpu_minutes.TimeUp("over")

    made = deploy.Deployment("m", deploy.Shape(3000, 20), [], "nixl", tmp_path, on_wait=over)
    with pytest.raises(gpu_minutes.TimeUp):
        made.check()
    with pytest.raises(gpu_minutes.TimeUp):
        made.cluster._startup([]).are_ready([])


def test_a_second_page_is_not_written_over_the_first(tmp_path, capsys):
    (tmp_path / "page.md").write_text("kept")
    assert gpu_minutes.main(["--out", str(tmp_path)]) == 1
    assert gpu_minutes.main(["--out", str(tmp_path / "b"), "--minutes", "0"]) == 1
    said = capsys.readouterr().err
    assert "there is a page" in said and "must be above 0" in said and (tmp_path / "page.md").read_text() == "kept"
