"""What `pd-radix up` refuses before anything starts: one line, at once, without the engine."""

from __future__ import annotations

import argparse
import http.server
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import engine_options, up
from sglang_pd_radix.tools.arguments import join_values

ROOT = Path(__file__).parents[4]
# Of the processor, so that a busy machine changes nothing: the engine alone takes 8 to import.
LIMIT_S = 2.0


def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def environment() -> dict[str, str]:
    """For a command, without what says where models are."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS", "SGLANG"))}
    return ours | {"PYTHONPATH": str(ROOT / "python")}


def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


def test_the_options_that_are_read_are_those_that_the_engine_takes():
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    real = actions(parser)
    read = {name: declared for names, declared in engine_options._declared() for name in names}
    assert read.keys() == real.keys()
    for name, declared in read.items():
        assert declared.get("nargs") == real[name].nargs, name
        assert not declared.get("choices") or [*declared["choices"]] == [*real[name].choices], name
        assert declared.get("type") in (None, str, real[name].type), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wibble", "3"], "x: --wibble is no option of the engine: see python -m sglang.launch_server --help"),
        (["--page-sise=16"], "x: --page-sise is no option of the engine: did you mean --page-size"),
        (["16"], "x: 16 is no option of the engine"),
        (["--page-size"], "x: argument --page-size: expected one argument"),
        (["--page-size", "many"], "x: argument --page-size: invalid int value: 'many'"),
        (["--schedule-policy", "luck"], "x: argument --schedule-policy: invalid choice: 'luck'"),
        (["--enable-metrics", "yes"], "x: yes is no option of the engine"),
        (["--disaggregation-decode-admission", "luck"], "invalid choice: 'luck' .choose from 'prefix', 'fcfs'"),
    ],
)
def test_what_a_worker_would_refuse_is_refused(options, message):
    with pytest.raises(PdRadixError, match=message):
        engine_options.check(options, "x")


@pytest.mark.parametrize(
    "options",
    [
        ["--cuda-graph-bs", "1", "2", "4", "--tp=2"],
        ["--json-model-override-args", '{"a": 1}', "--load-balance-method", "longest_prefix"],
        ["--disaggregation-decode-enable-radix-cache", "--disaggregation-prefill-read-decode", "64"],
        ["--max-running", "8"],  # what an option begins with stands for it
    ],
)
def test_what_a_worker_takes_is_let_through(options):
    engine_options.check(options, "x")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pd-radix up")
    up.add_arguments(parser)
    return parser.parse_args(join_values(arguments))


def test_options_of_the_engine_need_no_dashes_before_them(model):
    given = ["--page-size", "16", "--cuda-graph-bs", "1", "2", "--model-path", model, "--enable-mixed-chunk"]
    args = parse(*given, "--tp=1", "--decode", "2", "--", "--log-level", "info", "--port", "1")
    # A name that was cut off is whole again.
    rest = ["--enable-mixed-chunk", "--tp-size", "1"]
    assert args.engine_given == ["--page-size", "16", "--cuda-graph-bs", "1", "2", *rest]
    assert args.engine_options == ["--log-level", "info", "--port", "1"] and args.port is None and args.decode == 2


def test_they_reach_the_workers(model, tmp_path, monkeypatch):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    args = parse("--model-path", model, "--page-size", "16", "--log-dir", str(tmp_path))
    workers = [process for process in up.cluster_from(args).plan() if process.is_worker]
    assert len(workers) == 2
    for worker in workers:
        at = worker.command.index("--page-size")
        assert worker.command[at + 1] == "16"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return str(tmp_path / "m")


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("up --model-path m --backend mori", "take nixl or mooncake, or add --no-radix"),
        ("up --model-path m --backend mori --no-radix", "pip install mori"),
        ("up --model-path m -- --wibble 3", "--wibble is no option of the engine"),
        ("up --model-path m --decode-args=--page-sise=3", "did you mean --page-size"),
        ("up --model-path m --page-size many", "--page-size many: must be a whole number of at least 1"),
        ("up --bogus", "--bogus is no option of pd-radix up or of the engine"),
        ("up", "--model is missing"),
        ("up --model-path m --bogus", "--bogus is no option of pd-radix up or of the engine: see pd-radix up --help"),
        ("up --model-path m --prefil 2", "ambiguous option: --prefil could match --prefill"),
        ("up --model-path m --page-sise 2", "did you mean --page-size"),
        ("up --model-path m --router-args=--decode-polici=random", "did you mean --decode-policy"),
        ("up --model-path Qwen/Qwen3-0.6B", "download it (hf download Qwen/Qwen3-0.6B), name a directory, or make a"),
        ("up --model-path m -- --port 3", "--port is set by the cluster itself"),
        ("demo -- --wibble 3", "--wibble is no option of the engine"),
    ],
)
def test_a_wrong_invocation_ends_at_once_with_one_line_that_names_the_remedy(command, remedy, model, tmp_path):
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}", "HF_HOME": str(tmp_path / "empty")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_pd_radix.tools.cli", *command.split()],
        cwd=tmp_path,
        env=environment() | hub,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (1, 2) and done.stdout == ""
    *usage, line = done.stderr.splitlines()
    # argparse's own errors have the command's usage before them.
    assert remedy in line and (not usage or usage[0].startswith("usage: pd-radix up")), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT_S


# -- a model that is a name


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the host of models does."""

    answer: tuple[int, str] = (200, "")
    asked: list[str]

    def do_HEAD(self) -> None:
        """One question, for a file."""
        self.asked.append(self.path)
        status, code = self.answer
        if not status:
            time.sleep(30)
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"0"')
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("answer", "more", "message"),
    [
        ((200, ""), {}, ""),
        ((404, "EntryNotFound"), {}, ""),
        ((404, "RepoNotFound"), {}, "it has none of that name, or not for everybody: hf auth login"),
        ((403, "GatedRepo"), {}, "it is gated: accept its terms there, then hf auth login"),
        ((0, ""), {}, "does not give it ("),
        ((200, ""), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ((404, "RepoNotFound"), {"SGLANG_USE_MODELSCOPE": "true"}, ""),
        ((404, "RepoNotFound"), {"HF_HUB_CACHE": "cached"}, ""),
    ],
)
def test_the_host_of_models_is_asked_once_whether_it_has_one(answer, more, message, tmp_path):
    snapshot = tmp_path / "cached" / "models--org--name" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    handler = type("One", (Hub,), {"answer": answer, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.block_on_close = False
        endpoint = f"http://127.0.0.1:{server.server_port}"
        code = "from sglang_pd_radix.tools import hosted_model as model\nimport sys, time\nmodel._ask\n"
        code += "began = time.monotonic()\ntry:\n    model.check('org/name')\nexcept Exception as error:\n"
        code += "    print(error)\nsys.exit(time.monotonic() - began > model.WAIT_S + 5)"
        env = environment() | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "empty")} | more
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        server.shutdown()
    assert run.returncode == 0, run.stderr
    assert message in run.stdout and bool(message) == bool(run.stdout)
    assert len(handler.asked) == (0 if more else 1)
    if message:
        assert run.stdout.startswith(f"org/name is not on this machine, and {endpoint} does not give it (")
