"""`pd-radix up` and `Cluster` with stand-ins for the servers: real processes, real signals, no engine."""

import argparse
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import host_server
import psutil
import pytest
from sglang.srt import server_args
from waiting import until

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cluster as cluster_module
from sglang_pd_radix.tools import keeper, locked_directory, process_group, up, verify
from sglang_pd_radix.tools.arguments import join_values
from sglang_pd_radix.tools.cluster import (
    GATEWAYS,
    SGLANG_ROUTER,
    SMG,
    Cluster,
    compared_on,
    cpu_options,
    describe_exit,
    failure_reason,
    free_ports,
    gpu_placement,
    has_option,
    http,
    log_tail,
    option_value,
    per_worker,
)
from sglang_pd_radix.tools.cluster.options import connectable
from sglang_pd_radix.tools.cluster.startup import Startup

PACKAGE_ROOT = str(Path(up.__file__).resolve().parents[2])

# Answers like a server of any role, and has a child of its own, as the engine has. FAKE_<ROLE> says how it misbehaves.
FAKE_SERVER = """
import http.server, json, os, signal, subprocess, sys, time
role, args = sys.argv[1], sys.argv[2:]
fault = os.environ.get("FAKE_" + role.upper(), "")
if fault == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", os.environ["FAKE_MARK"]])
if fault == "dies":
    print("Traceback (most recent call last):")
    print("ValueError: the page size must be a power of two")
    sys.stdout.flush()
    time.sleep(0.3)
    os._exit(3)
served_from = time.monotonic() + (1e9 if fault == "never" else 0.2)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.answer(200 if time.monotonic() > served_from else 503, {"workers": []} if fault == "lets-go" else {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache":
            print("flushed", flush=True)
        if self.path == "/freeze_gc" and fault == "hangs":
            print("asked to freeze", flush=True)
            time.sleep(60)
        if fault == "refuses":
            return self.answer(400, {"error": "no such model"})
        self.answer(200, {"role": role, "body": body, "args": args, "omp": os.environ.get("OMP_NUM_THREADS"),
                          "extra": os.environ.get("EXTRA")})
        if self.path == "/leave":
            os._exit(0)
        if fault == "dies-later" and self.path == "/die":
            print("MemoryError: no more", flush=True)
            os._exit(1)
    def answer(self, status, document):
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

port = int(args[args.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# Runs `pd-radix up` on the stand-ins in a process of its own, so that it can be signalled.
DRIVER = """
import argparse, functools, json, sys
from sglang_pd_radix.tools import up
from sglang_pd_radix.tools.arguments import join_values
from sglang_pd_radix.errors import PdRadixError
commands, arguments = json.loads(sys.argv[1]), sys.argv[2:]
up.Cluster = functools.partial(up.Cluster, commands=commands)
parser = argparse.ArgumentParser()
up.add_arguments(parser)
try:
    sys.exit(up.run(parser.parse_args(join_values(arguments))))
except PdRadixError as error:
    sys.exit(f"pd-radix: {error}")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Commands for `Cluster` that start stand-ins; checks afterwards that none of their processes is left."""
    script = tmp_path / "fake_server.py"
    script.write_text(textwrap.dedent(FAKE_SERVER))
    mark = f"pd-radix-fake-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("FAKE_MARK", mark)
    monkeypatch.setenv("PYTHONPATH", PACKAGE_ROOT)
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    yield {role: (str(script), role) for role in ("prefill", "decode", "router", "engine")}
    until(lambda: not fakes(mark), "processes left behind")


def fakes(mark):
    """Pids of live processes that belong to the stand-ins marked ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                mine = mark.encode() in (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mine and state not in "ZX":
                found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def no_host_of_models(monkeypatch):
    """Here a name may be that of a model."""
    monkeypatch.setattr(up.hosted_model, "check", lambda name: None)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return parser.parse_args(join_values(arguments))


# -- arguments


def test_option_groups_are_split_as_a_shell_would():
    args = parse(
        "--model-path", "m/x", "--prefill", "2", "--decode-args", "--enable-lora",
        "--prefill-args", "--revision 'b c' --tp=1", "--random-seed", "1", "--log-level", "info",
        "--", "--page-size", "16",
    )  # fmt: skip
    cluster = up.cluster_from(args)
    assert (args.prefill, args.decode) == (2, 1)
    assert cluster.spec.args_of["prefill"] == [["--revision", "b c", "--tp=1"]] * 2
    assert cluster.spec.args_of["decode"] == [[cluster_module.RADIX_FLAG, "--enable-lora"]]
    # Ours come first, so that the user's win.
    ours = ["--served-model-name", "m/x", "--enable-metrics", "--enable-cache-report"]
    assert cluster.spec.common_args == [*ours, "--random-seed", "1", "--log-level", "info", "--page-size", "16"]


def test_a_deployment_shows_what_its_cache_does(tmp_path, monkeypatch):
    """Unless the user has it otherwise."""
    monkeypatch.delenv("SGLANG_DISAGGREGATION_ENDED_REQUESTS", raising=False)

    def planned(*arguments):
        made = up.cluster_from(parse("--model-path", str(directory), "--log-dir", str(tmp_path), *arguments))
        return [process for process in made.plan() if process.is_worker]

    directory = tmp_path / "a:model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for worker in planned():
        assert {"--enable-metrics", "--enable-cache-report"} <= {*worker.command}
        assert worker.env["SGLANG_DISAGGREGATION_ENDED_REQUESTS"] == "1000"
        # The engine keeps colons for adapters.
        assert option_value(worker.command, "--served-model-name") == "a-model"
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ENDED_REQUESTS", "7")
    for worker in planned("--served-model-name", "mine"):
        assert worker.env["SGLANG_DISAGGREGATION_ENDED_REQUESTS"] == "7"
        assert option_value(worker.command, "--served-model-name") == "mine"


def test_the_backends_with_a_prefix_cache_are_those_of_the_patch_set():
    own = [vars(one).get("_check_decode_radix_cache") for one in server_args.ServerArgs.__mro__]
    theirs = [function for function in own if function is not None][-1].__globals__
    assert up.DELTA_BACKENDS == theirs["DELTA_BACKENDS"]


def test_the_router_of_localhost_is_on_the_loopback_address(tmp_path):
    made = up.cluster_from(parse("--model-path", "m/x", "--log-dir", str(tmp_path), "--host", "localhost"))
    assert made.spec.host == "127.0.0.1"


def test_radix_flag_is_added_once_and_only_if_wanted():
    flag = cluster_module.RADIX_FLAG
    assert up.decode_options(["--x"], True, {}) == [flag, "--x"]
    assert up.decode_options([flag], True, {}) == [flag]
    assert up.decode_options([up.RADIX_ALIAS], True, {}) == [up.RADIX_ALIAS]
    assert up.decode_options(["--x"], False, {"SGLANG_PD_RADIX": "0"}) == ["--x"]
    with pytest.raises(PdRadixError, match="contradict"):
        up.decode_options([flag], False, {})
    with pytest.raises(PdRadixError, match="--no-radix"):
        up.decode_options([], True, {"SGLANG_PD_RADIX": "0"})
    with pytest.raises(PdRadixError, match="--no-radix"):
        up.decode_options([], True, {"SGLANG_PD_RADIX": "False "})
    with pytest.raises(PdRadixError, match="'off': give 1"):
        up.decode_options([], True, {"SGLANG_PD_RADIX": "off"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model-path", "./missing"], "make-model"),
        (["--model-path", "m/x", "--decode-args", "--a 'b"], "--decode-args.*quotes"),
        (["--model-path", "m/x", "--prefill", "0"], "at least one"),
        (["--model-path", "m/x", "--", "--page-size", "x"], "--page-size x: must be a whole number"),
        (["--model-path", "m/x", "--decode-args=--page-size 0"], "--page-size 0: must be"),
        (["--model-path", "m/x", "--json", "/no/such/dir/f.json"], "no directory"),
        (["--model-path", "m/x", "--json", "/"], "that is no regular file"),
        (["--model-path", "m/x", "--log-dir", "/dev/null/x"], "--log-dir /dev/null/x: it cannot be made"),
        (["--model-path", "m/x", "--port", "70000"], "give 1 to 65535"),
        (["--model-path", "m/x", "--host", "203.0.113.9"], "^--host 203.0.113.9: "),
        (["--model-path", "m/x", "--host", "no such host"], "^--host no such host: "),
        (["--model-path", "m/x", "--", cluster_module.RADIX_FLAG], "is for decode workers alone"),
        (["--model-path", "m/x", "--router-args", "--port 29999"], "--port is set by .* options of the router"),
        (["--model-path", "m/x", "--router-args=--decode=http://x:1"], "--decode is set by"),
        (["--model-path", "~nobody-at-all/x"], "no model at ~nobody-at-all/x"),
        (["--model-path", "m/x", "--timeout", "0"], "above 0"),
        (["--model-path", "m/x", "--timeout", "nan"], "above 0"),
        (["--model-path", "m/x", "--", "--port", "1"], "--port is set by"),
        (["--model-path", "m/x", "--pegaflow-args", "--pool-size 1gb"], "add --pegaflow"),
        (["--model-path", "m/x", "--prefill-args", "--disaggregation-mode=decode"], "--disaggregation-mode is set by"),
    ],
)
def test_bad_input_is_refused_with_one_clear_error(arguments, message, monkeypatch):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    with pytest.raises(PdRadixError, match=message):
        up.cluster_from(parse(*arguments))


@pytest.mark.parametrize(("host", "reached"), [("[::1]", "[::1]"), ("::1", "[::1]"), ("[::]", "[::1]"), ("h", "h")])
def test_an_address_may_stand_in_brackets(host, reached):
    assert connectable(host) == reached


@pytest.mark.parametrize(
    ("host", "given"), [("::", "[::]"), ("[::]", "[::]"), ("0.0.0.0", "0.0.0.0"), ("[127.0.0.1]", "127.0.0.1")]
)
def test_the_router_is_given_an_ipv6_address_in_brackets(tmp_path, host, given):
    """sglang-router ends at one without, and both take them."""
    options = ["--model-path", "m/x", "--log-dir", str(tmp_path), "--host", host]
    router = next(one for one in up.cluster_from(parse(*options)).plan() if one.role == "router")
    assert option_value(router.command, "--host") == given


@pytest.mark.parametrize("pid", ["-1", "Infinity", "1e400", "[" * 5000, "[1]"])
def test_a_file_with_an_odd_owner_is_no_deployment(tmp_path, pid):
    file = tmp_path / "up.json"
    file.write_text(f'{{"owner_pid": {pid}}}')
    up.check_unowned(file)


def test_directory_without_config_is_not_a_model(tmp_path):
    with pytest.raises(PdRadixError, match=r"no config\.json"):
        up.check_model(str(tmp_path))


def test_option_lookup():
    args = ["--tp", "2", "--dtype=float16", "--tp", "4"]
    assert has_option(args, "--dtype") and has_option(args, "--x", "--tp") and not has_option(args, "--d")
    assert option_value(args, "--tp", "--tp-size") == "4"
    assert option_value(args, "--dtype") == "float16"
    assert option_value(args, "--x") is None and option_value(["--x"], "--x") is None


def test_worker_arguments_for_all_or_for_each():
    assert per_worker([], 2, "x") == [[], []]
    assert per_worker(["--a", "1"], 2, "x") == [["--a", "1"]] * 2
    assert per_worker([["--a"], []], 2, "x") == [["--a"], []]
    for wrong in ([["--a"]], [["--a"], "--b"]):
        with pytest.raises(PdRadixError, match="2 lists"):
            per_worker(wrong, 2, "x")


def test_cpu_options_yield_to_the_users():
    assert {"--device", "--attention-backend", "--dtype"} <= set(cpu_options([]))
    # CPU hosts run overlapped too.
    assert "--disable-overlap-schedule" not in cpu_options([])
    given = ["--device=cpu", "--dtype", "bfloat16", "--mem-fraction-static", "0.1"]
    added = cpu_options(given)
    assert not {"--device", "--dtype", "--max-total-tokens"} & set(added)


def test_gpus_are_given_out_in_turn_and_shared_when_scarce():
    def gpus(placement):
        return [(option_value(extra, "--base-gpu-id"), wave) for extra, wave in placement]

    assert gpus(gpu_placement([[], ["--tp", "2"], []], 4)) == [("0", 0), ("1", 0), ("3", 0)]
    assert gpu_placement([[], []], 0) == [([], 0), ([], 0)]
    shared = gpu_placement([[], []], 1)
    assert gpus(shared) == [("0", 0), ("0", 1)]
    first, second = (float(option_value(extra, "--mem-fraction-static")) for extra, _ in shared)
    # The second part is of what the first one left.
    assert first == pytest.approx((1 - first) * second, rel=0.01) and first + (1 - first) * second < 0.9
    # Pools of a size that is told, and nearly all for each: no need to wait for each other. Else what one takes while
    # another starts would be taken from its part.
    sized = ["--mem-fraction-static", "0.8", "--max-total-tokens=4096"]
    assert gpu_placement([sized, sized, sized], 1) == [(["--base-gpu-id", "0"], 0)] * 3
    assert gpus(gpu_placement([sized, sized[:2]], 1)) == [("0", 0), ("0", 1)]
    parts = ["--mem-fraction-static", "0.25", "--max-total-tokens=4096"]
    assert gpus(gpu_placement([parts, parts], 1)) == [("0", 0), ("0", 1)]


def test_what_is_compared_is_on_the_same_gpus():
    """Else one side of two GPUs would have one for itself, and the other would share prefill's."""
    assert compared_on([], sides=[[], []], gpus=1) == [[], []]
    assert compared_on([], sides=[[], []], gpus=2) == [["--base-gpu-id", "1"]] * 2
    assert compared_on(["--tp", "2"], sides=[[], []], gpus=6) == [["--base-gpu-id", "2"]] * 2
    assert compared_on(["--tp", "2"], sides=[[], [], []], gpus=3) == [[]] * 3
    assert compared_on(["--base-gpu-id", "0"], sides=[[], []], gpus=8) == [[], []]
    # A side that takes more GPUs than prefill and the others: room for it, or all on the first ones.
    larger = [[], [], ["--tp", "2"]]
    assert compared_on([], larger, 4) == [["--base-gpu-id", "2"]] * 3
    assert compared_on([], larger, 2) == [["--base-gpu-id", "0"]] * 3
    placed = gpu_placement(
        [[], *([*side, *at] for side, at in zip(larger, compared_on([], larger, 2), strict=True))], 2
    )
    assert [wave for _, wave in placed] == [0, 1, 2, 3]
    assert compared_on([], [[], ["--base-gpu-id", "3"]], 4) == [["--base-gpu-id", "1"], []]
    # Prefill alone on the first GPU, and on the second one after the other, each with its part.
    (prefill, first), *decode = gpu_placement([[], *compared_on([], [[], []], 2)], 2)
    assert prefill[:2] == ["--base-gpu-id", "0"] and (first, [wave for _, wave in decode]) == (0, [0, 1])
    assert all("--base-gpu-id" not in extra and "--mem-fraction-static" in extra for extra, _ in decode)
    with pytest.raises(PdRadixError, match="--base-gpu-id takes a number"):
        gpu_placement([["--base-gpu-id", "x"]], 2)
    with pytest.raises(PdRadixError, match="--mem-fraction-static takes a number"):
        gpu_placement([["--mem-fraction-static", "most"], []], 1)
    assert gpu_placement([["--base-gpu-id", "3"], []], 4)[0] == ([], 0)
    with pytest.raises(PdRadixError, match="needs 2 GPUs from --base-gpu-id 3 on, and this machine has 4"):
        gpu_placement([["--base-gpu-id", "3", "--tp", "2"], []], 4)
    with pytest.raises(PdRadixError, match="needs 2 GPUs"):
        gpu_placement([["--tp=2"]], 1)


def test_dp_ranks_have_gpus_of_their_own_unless_they_share_attention():
    ranks = ["--dp-size", "2"]
    assert [option_value(extra, "--base-gpu-id") for extra, _ in gpu_placement([ranks, ranks], 4)] == ["0", "2"]
    assert [wave for _, wave in gpu_placement([ranks, ranks], 2)] == [0, 1]
    with pytest.raises(PdRadixError, match="needs 2 GPUs and this machine has 1: lower --tp or --dp-size"):
        gpu_placement([ranks, ranks], 1)
    shared = ["--tp", "2", "--data-parallel-size=2", "--enable-dp-attention"]
    assert [option_value(extra, "--base-gpu-id") for extra, _ in gpu_placement([shared, shared], 4)] == ["0", "2"]
    assert compared_on(ranks, [[], []], 6) == [["--base-gpu-id", "2"]] * 2
    with pytest.raises(PdRadixError, match="--tp, --pp-size and --dp-size take a number"):
        gpu_placement([["--dp-size", "x"]], 1)


@pytest.mark.parametrize(
    "option",
    ["--tp", "--tp-size", "--tensor-parallel", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel"]
    + ["--pipeline-parallel-size", "--dp", "--dp-size", "--data-parallel", "--data-parallel-size"],
)
def test_ranks_are_counted_as_the_engine_reads_them(option, tmp_path, monkeypatch):
    """It takes what an option begins with, too."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args(["--model-path", "m", option, "2"])
    assert read.tensor_parallel_size * read.pipeline_parallel_size * read.data_parallel_size == 2
    assert [option_value(extra, "--base-gpu-id") for extra, _ in gpu_placement([[option, "2"]] * 2, 4)] == ["0", "2"]
    # The ranks of --dp-size would all be given the port that is named.
    monkeypatch.setattr(cluster_module.plan.cpu_host, "active", lambda: True)
    for worker in Cluster("m", log_dir=tmp_path, common_args=[option, "2"]).plan():
        if worker.is_worker:
            assert has_option(worker.command, "--nccl-port") is (read.data_parallel_size == 1)


def test_threads_of_all_ranks_are_as_many_as_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cluster_module.plan.cpu_host, "active", lambda: True)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(*args):
        plan = Cluster("m", log_dir=tmp_path, common_args=args, decode=3).plan()
        return {process.env["OMP_NUM_THREADS"] for process in plan if process.is_worker}

    assert (threads(), threads("--tp", "2"), threads("--dp-size", "2", "--tp", "2")) == ({"4"}, {"2"}, {"1"})


# -- ports, logs, reasons


def test_ports_are_free_different_and_outside_the_ephemeral_range():
    ports = free_ports(20)
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20 and (first_ephemeral <= 11000 or max(ports) < first_ephemeral)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_no_port_is_one_that_mooncake_takes_by_lot():
    """A server that has yet to bind its own would find it taken: its clients spoke to a transfer engine."""
    for offsets in ((0,), cluster_module.DP_ATTENTION_OFFSETS):
        for port in free_ports(300, offsets=offsets):
            assert not any(15000 <= port + offset <= 17000 for offset in offsets)


def ports_of(cluster: Cluster) -> list[int]:
    """All on which its servers will listen, with what an engine with DP attention counts from its own."""
    ports: list[int] = []
    for process in cluster.plan():
        offsets = cluster_module.DP_ATTENTION_OFFSETS if "--enable-dp-attention" in process.command else (0,)
        ports += [int(option_value(process.command, "--port")) + offset for offset in offsets]
        for option in ("--nccl-port", "--disaggregation-bootstrap-port", "--prometheus-port"):
            value = option_value(process.command, option)
            ports += [int(value)] if value else []
    return ports


class OneByOne(random.Random):
    """Takes what comes first, where a choice by chance would seldom show that two take the same."""

    def sample(self, population, k):
        return population[:k]


@pytest.mark.parametrize("dp_attention", [False, True])
def test_no_two_servers_get_the_same_port(monkeypatch, dp_attention):
    """Also none that is the user's own choice, or that an engine with DP attention takes beside the one it is given."""
    monkeypatch.setattr(cluster_module.ports.random, "Random", OneByOne)
    first = 10000
    options = ["--enable-dp-attention", "--dp-size", "2"] if dp_attention else []
    router = ["--prometheus-port", str(first + 3)]
    pair = Cluster("m", prefill=2, decode=2, common_args=options, port=first + 1, router_args=router)
    single = Cluster("m", aggregated=True, aggregated_args=[*options, f"--nccl-port={first + 2}"], port=first + 5)
    for cluster in (pair, single):
        ports = ports_of(cluster)
        assert cluster.spec.port in ports and len(set(ports)) == len(ports)


def test_what_is_counted_from_a_port_is_free_too():
    with socket.socket() as listening:
        (port,) = free_ports(1, offsets=(0, 1))
        listening.bind(("127.0.0.1", port + 1))
        many = free_ports(50, taken=range(port - 20, port), offsets=(0, 1))
    assert port not in many and port + 1 not in many and not {*many} & {*range(port - 21, port)}


def test_log_tail_is_plain_and_short(tmp_path):
    log = tmp_path / "x.log"
    assert log_tail(log) == []
    log.write_bytes(b"".join(b"\x1b[31mline %d\x1b[0m\n\n" % i for i in range(50000)) + b"\xff end")
    assert log_tail(log, 2) == ["line 49999", "\ufffd end"]


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["a", "ValueError: bad", "EOFError"], "ValueError: bad"),
        (["ValueError: first", "torch.OutOfMemoryError: second", "x"], "torch.OutOfMemoryError: second"),
        (
            ["sglang serve: error: unrecognized arguments: --x"],
            "sglang serve: error: unrecognized arguments: --x",
        ),
        (["[2026-01-01 00:00:00] RuntimeError: deep"], "[2026-01-01 00:00:00] RuntimeError: deep"),
        (
            ["12:00 Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering", "EOFError"],
            "Subprocess scheduler_0 (pid=7) crashed with exit code -9",
        ),
        (["EOFError"], "EOFError"),
        (["an Error happened in the middle of a line", "all fine"], None),
    ],
)
def test_reason_is_the_error_that_came_first_in_cause(lines, reason):
    assert failure_reason(lines) == reason


def test_exit_codes_in_words():
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert "signal 77" in describe_exit(-77)


# -- processes


def test_cluster_serves_and_leaves_nothing(fake, tmp_path):
    seen = []
    with Cluster(
        "m",
        prefill=2,
        decode=2,
        commands=fake,
        common_args=["--c", "1"],
        prefill_args=[["--p", "a"], ["--p", "b"]],
        decode_args=[["--d"], ["--dp-size", "2"]],
        prefill_env=[{"EXTRA": "one"}, {}],
        env={"OMP_NUM_THREADS": "7"},
        router_args=["--policy", "random"],
        log_dir=tmp_path / "logs",
        on_progress=seen.append,
    ) as cluster:
        assert cluster.alive() and cluster.dead() is None
        assert len(cluster.prefill_urls) == len(cluster.decode_urls) == 2
        answers = [json.loads(http(url + "/generate", {})[1]) for url in (*cluster.prefill_urls, *cluster.decode_urls)]
        assert [answer["role"] for answer in answers] == ["prefill", "prefill", "decode", "decode"]
        assert [answer["extra"] for answer in answers] == ["one", None, None, None]
        # What is set stays; and an idle connection outlasts the router's patience with it.
        assert all(answer["omp"] == "7" for answer in answers)
        assert answers[0]["args"][-4:] == ["--c", "1", "--p", "a"]
        assert answers[1]["args"][-4:] == ["--c", "1", "--p", "b"]
        assert answers[2]["args"][-3:] == ["--c", "1", "--d"]
        # Engines of one worker cannot share it.
        assert ["--nccl-port" in answer["args"] for answer in answers] == [True, True, True, False]
        router = json.loads(http(cluster.router_url + "/generate", {})[1])["args"]
        for process in cluster.processes:
            if process.role == "prefill":
                at = router.index(process.url)
                assert router[at - 1 : at + 2] == ["--prefill", process.url, str(process.bootstrap_port)]
        assert router[-2:] == ["--policy", "random"]
        document = json.loads(json.dumps(cluster.describe()))
        assert document["router_url"] == cluster.router_url
        assert [p["role"] for p in document["processes"]] == ["prefill", "prefill", "decode", "decode", "router"]
        assert all(Path(p["log"]).exists() and os.getpgid(p["pid"]) == p["pid"] for p in document["processes"])
        # What made sure that requests are served is not left in any cache.
        assert all("flushed" in p.log_path.read_text() for p in cluster.processes if p.role != "router")
    assert not cluster.alive()
    phases = [(p.process.name if p.process else None, p.phase) for p in seen]
    assert phases[-1] == (None, "serving") and ("prefill-1", "starting") in phases
    cluster.stop()


@pytest.mark.skipif(host_server.missing() is not None, reason=str(host_server.missing()))
def test_a_pegaflow_server_comes_before_the_workers_and_goes_with_them(fake, tmp_path, monkeypatch):
    """The real server, on a stand-in for the CUDA driver."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PACKAGE_ROOT, *host_server.package_path()]))
    commands = {**fake, "pegaflow": (host_server.__file__,)}
    options = ["--devices", "0", "--pool-size", "16mb"]
    with Cluster("m", commands=commands, pegaflow=options, log_dir=tmp_path, timeout_s=60) as cluster:
        assert [p.role for p in cluster.processes] == ["pegaflow", "prefill", "decode", "router"]
        server = cluster.processes[0]
        assert server.ready_s < min(p.ready_s for p in cluster.processes[1:])
        endpoint = option_value(server.command, "--addr")
        for url in (*cluster.prefill_urls, *cluster.decode_urls):
            args = json.loads(http(url + "/generate", {})[1])["args"]
            assert "--enable-pegaflow" in args and option_value(args, "--pegaflow-endpoint") == endpoint
        assert json.loads(http(server.url + "/instances")[1]) == {"instances": []}
    assert server.returncode() is not None
    with pytest.raises(PdRadixError, match="--addr is set by"):
        Cluster("m", pegaflow=["--addr", "0.0.0.0:1"]).plan()


@pytest.mark.parametrize("version, message", [(None, "not installed"), ("0.24.6", "0.24.6 is installed, not 0.25.1")])
def test_a_pegaflow_server_that_cannot_be_started_is_refused(monkeypatch, version, message):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.setattr(up.pegaflow_host, "installed_version", lambda: version)
    with pytest.raises(PdRadixError, match=f"--pegaflow: .*{message}"):
        up.cluster_from(parse("--model-path", "m/x", "--pegaflow"))


def test_aggregated_is_one_engine_without_router(fake, tmp_path):
    with Cluster("m", aggregated=True, commands=fake, aggregated_args=["--z"], log_dir=tmp_path) as cluster:
        answer = json.loads(http(cluster.router_url + "/generate", {})[1])
        assert answer["role"] == "engine" and answer["args"][-1] == "--z"
        assert [p.role for p in cluster.processes] == ["engine"]


@pytest.mark.parametrize("gateway", GATEWAYS.values(), ids=str)
def test_several_decode_workers_are_chosen_as_suits_the_gateway(fake, tmp_path, gateway):
    routers = {
        "one": ([0], []),
        "two": ([0, 1], []),
        "chosen": ([0, 1], ["--decode-policy", "random"]),
    }
    with Cluster("m", decode=2, commands=fake, gateway=gateway, log_dir=tmp_path, routers=routers) as cluster:
        args = {name: json.loads(http(url + "/generate", {})[1])["args"] for name, url in cluster.router_urls.items()}
    own = option_value(gateway.several_decode, "--decode-policy")
    assert own == {SMG: "cache_aware", SGLANG_ROUTER: "manual"}[gateway]
    assert {name: option_value(of, "--decode-policy") for name, of in args.items()} == {
        "one": None,
        "two": own,
        "chosen": "random",
    }


def test_the_gateway_that_is_named_routes(tmp_path, monkeypatch):
    def routed_by(*options):
        made = up.cluster_from(parse("--model-path", "m/x", "--log-dir", str(tmp_path), *options))
        return next(process.command[1:] for process in made.plan() if process.role == "router")

    assert routed_by("--router", "sglang-router")[:2] == ["-m", "sglang_router.launch_router"]
    assert routed_by()[:3] == routed_by("--router", "smg")[:3] == ["-m", "smg", "launch"]
    # Where smg is missing, the old one does.
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "smg" else found(name))
    assert routed_by()[:2] == ["-m", "sglang_router.launch_router"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("", True), ("--worker-overload-token-usage 0.9", False), ("--disable-worker-overload-protection", True)],
)
def test_smg_leaves_no_busy_worker_out_unless_it_is_told_when(tmp_path, given, kept):
    options = ["--model-path", "m/x", "--log-dir", str(tmp_path), "--router-args", given]
    router = next(p for p in up.cluster_from(parse(*options)).plan() if p.role == "router")
    assert router.command.count("--disable-worker-overload-protection") == kept


def test_a_gateway_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PdRadixError, match="--router smg: it is not installed; pip install smg"):
        up.cluster_from(parse("--model-path", "m/x", "--router", "smg"))
    with pytest.raises(PdRadixError, match="no gateway is installed: pip install smg"):
        up.cluster_from(parse("--model-path", "m/x"))


def test_each_router_has_its_own_decode_workers(fake, tmp_path):
    routers = {"off": ([0], []), "on": ([1], ["--policy", "random"])}
    with Cluster("m", decode=2, commands=fake, log_dir=tmp_path, routers=routers) as cluster:
        assert list(cluster.router_urls) == ["off", "on"] and cluster.router_url == cluster.router_urls["off"]
        for i, url in enumerate(cluster.router_urls.values()):
            args = json.loads(http(url + "/generate", {})[1])["args"]
            assert cluster.prefill_urls[0] in args
            assert cluster.decode_urls[i] in args and cluster.decode_urls[1 - i] not in args
        assert args[-2:] == ["--policy", "random"]
    with pytest.raises(PdRadixError, match="--host is set by"):
        Cluster("m", routers={"off": ([0], ["--host", "::1"])})
    with pytest.raises(PdRadixError, match=r"routers: off routes to \[2\], and decode workers are 0 to 1"):
        Cluster("m", decode=2, routers={"off": ([2], [])})


def test_paused_servers_do_nothing_until_they_are_resumed_and_end_with_the_rest(fake, tmp_path):
    def states(process):
        group = process_group.members(process.pid)
        return {(Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] for pid in group}

    with Cluster("m", decode=2, commands=fake, log_dir=tmp_path) as cluster:
        idle, busy = (p for p in cluster.processes if p.role == "decode")
        cluster.pause(["decode-0"])
        until(lambda: states(idle) == {"T"}, "not paused")
        assert "T" not in states(busy) and cluster.alive()
        assert http(busy.url + "/health")[0] == 200
        cluster.resume()
        until(lambda: "T" not in states(idle), "not resumed")
        assert http(idle.url + "/health")[0] == 200
        cluster.pause(["decode-0"])
    assert not cluster.alive()


def test_a_killed_server_can_be_started_again(fake, tmp_path):
    with Cluster("m", decode=2, commands=fake, log_dir=tmp_path) as cluster:
        gone, other = (p for p in cluster.processes if p.role == "decode")
        cluster.pause(["decode-0"])
        cluster.kill("decode-0")
        assert cluster.dead() is gone and gone.returncode() == -signal.SIGKILL
        assert not process_group.members(gone.pid) and http(gone.url + "/health")[0] == 0
        assert http(other.url + "/health")[0] == 200
        first = gone.pid
        # Its number may be a stranger's from now on.
        assert first not in cluster._family._groups and other.pid in cluster._family._groups
        cluster.restart("decode-0")
        assert cluster.alive() and gone.pid != first and http(gone.url + "/health")[0] == 200
    assert not process_group.members(gone.pid)


def test_a_restart_ends_while_the_worker_does_not_answer(fake, tmp_path):
    """It hangs when it is ready: whoever waits heard of nothing for 10 s, and then it counted as started."""

    def wait() -> None:
        if "asked to freeze" in (tmp_path / "decode-0.log").read_text():
            raise TimeoutError("given up")

    with Cluster("m", commands=fake, log_dir=tmp_path) as cluster:
        worker = hang_when_ready(cluster)
        cluster._on_wait = wait
        with pytest.raises(TimeoutError, match="given up"):
            cluster.restart("decode-0")
    assert not process_group.members(worker.pid)


def test_a_restart_says_what_takes_longer_than_it_may(fake, tmp_path, monkeypatch):
    with Cluster("m", commands=fake, log_dir=tmp_path) as cluster:
        log = hang_when_ready(cluster).log_path
        # The time is up when it hangs.
        monkeypatch.setattr(Startup, "_left", lambda self: 0.0 if "asked to freeze" in log.read_text() else 60.0)
        with pytest.raises(PdRadixError, match="not ready after 600 s: decode-0 does not answer /freeze_gc"):
            cluster.restart("decode-0")


def hang_when_ready(cluster):
    """Kill the decode worker; started again, it is ready and then does not answer."""
    worker = next(process for process in cluster.processes if process.role == "decode")
    worker.env["FAKE_DECODE"] = "hangs"
    cluster.kill(worker.name)
    return worker


def test_death_at_start_is_noticed_at_once_with_reason_and_log(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DECODE", "dies")
    monkeypatch.setenv("FAKE_PREFILL", "never")
    started = time.monotonic()
    cluster = Cluster("m", commands=fake, log_dir=tmp_path / "logs")
    with pytest.raises(PdRadixError) as caught:
        cluster.start()
    # Not when the time is up that the other one has to become ready.
    assert time.monotonic() - started < 60
    first, *rest = str(caught.value).splitlines()
    assert first == "decode-0 exited with code 3: ValueError: the page size must be a power of two"
    assert str(tmp_path / "logs" / "decode-0.log") in rest[0] and "Traceback" in rest[1]
    assert not cluster.alive()


def test_time_limit_names_who_is_not_ready(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PREFILL", "never")
    with pytest.raises(PdRadixError, match=r"not ready after 4 s: prefill-0 is starting. Logs are in [^;]*$"):
        Cluster("m", commands=fake, log_dir=tmp_path, timeout_s=4).start()
    # That command alone has the option.
    _, err = start_up(fake, tmp_path, "--timeout", "1").communicate(timeout=60)
    assert f"Logs are in {tmp_path / 'logs'}; give more time with --timeout if they show progress\n" in err


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10])
def test_a_start_may_take_for_ever(fake, tmp_path, timeout_s):
    with Cluster("m", commands=fake, log_dir=tmp_path, timeout_s=timeout_s) as cluster:
        assert cluster.alive()


def test_refused_request_is_not_repeated_until_the_time_limit(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_ROUTER", "refuses")
    with pytest.raises(PdRadixError, match="HTTP 400.*no such model"):
        Cluster("m", commands=fake, log_dir=tmp_path, timeout_s=60).start()


def test_process_that_ignores_sigterm_is_killed(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DECODE", "stubborn")
    cluster = Cluster("m", commands=fake, log_dir=tmp_path)
    cluster.start()
    decode = next(p for p in cluster.processes if p.role == "decode")
    cluster.stop(grace_s=0.5)
    assert decode.returncode() == -signal.SIGKILL and not process_group.members(decode.pid)


# -- the command


def start_up(fake, tmp_path, *arguments):
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(fake), "--model-path", str(tmp_path / "model"),
         "--json", str(tmp_path / "up.json"), "--log-dir", str(tmp_path / "logs"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_everything(fake, tmp_path, signum):
    process = start_up(fake, tmp_path, "--prefill", "2", "--decode-args", "--enable-lora")
    until((tmp_path / "up.json").exists, "no JSON file")
    document = json.loads((tmp_path / "up.json").read_text())
    assert document["owner_pid"] == process.pid and http(document["router_url"] + "/readiness")[0] == 200
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[4] == f"ready: {document['router_url']}"
    workers = [entry["url"].partition("//")[2] for entry in document["processes"] if entry["role"] != "router"]
    assert lines[5] == "model: model" and lines[7:] == [f"watch: pd-radix top {' '.join(workers)}", "end:   Ctrl-C"]
    _, curl, url, *_, body = shlex.split(lines[6])
    assert curl == "curl" and url == f"{document['router_url']}/v1/chat/completions"
    assert json.loads(body)["model"] == "model"
    for line, entry in zip(lines, document["processes"], strict=False):
        assert line.startswith(entry["name"]) and entry["url"] in line and f"pid {entry['pid']}" in line
        assert entry["log"] in line
    assert "prefill-1: starting" in err and "stopped; logs are in" in err
    assert not (tmp_path / "up.json").exists()


def test_two_deployments_do_not_write_over_each_others_logs(fake, tmp_path):
    first = start_up(fake, tmp_path)
    until((tmp_path / "up.json").exists, "no JSON file")
    log = (tmp_path / "logs" / "prefill-0.log").read_bytes()
    second = start_up(fake, tmp_path, "--json", str(tmp_path / "second.json"))
    _, err = second.communicate(timeout=60)
    assert second.returncode == 1 and "a deployment that runs has its logs there; give another directory" in err
    assert (tmp_path / "logs" / "prefill-0.log").read_bytes() == log
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    # Free again.
    third = start_up(fake, tmp_path)
    until((tmp_path / "up.json").exists, "no JSON file")
    third.send_signal(signal.SIGTERM)
    assert third.communicate(timeout=60) and third.returncode == 0


def test_a_log_dir_is_kept_from_verify_too(tmp_path, monkeypatch):
    monkeypatch.setattr(verify.doctor, "diagnose", lambda: [])
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    args = parser.parse_args(["--log-dir", str(tmp_path)])
    with up.own_log_dir(tmp_path), pytest.raises(PdRadixError, match="has its logs there"):
        verify.run(args)


def test_a_log_dir_that_cannot_be_read_can_be_used(tmp_path, monkeypatch):
    def refused(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(locked_directory.os, "open", refused)
    with up.own_log_dir(tmp_path):
        pass


def test_a_signal_that_is_ignored_stays_ignored(fake, tmp_path):
    """`nohup pd-radix up` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start_up(fake, tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    until((tmp_path / "up.json").exists, "no JSON file")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_signal_during_start_ends_everything(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PREFILL", "never")
    process = start_up(fake, tmp_path)
    until(lambda: len(fakes(os.environ["FAKE_MARK"])) >= 5, "not started")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "ended while starting" in err


def test_signal_while_a_worker_does_not_answer_ends_the_start(fake, tmp_path, monkeypatch):
    """One that hangs when a request has gone through: `up` ended half a minute later, as if it had served."""
    monkeypatch.setenv("FAKE_DECODE", "hangs")
    process = start_up(fake, tmp_path)
    log = tmp_path / "logs" / "decode-0.log"
    until(lambda: log.is_file() and "flushed" in log.read_text(), "not that far")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "ended while starting" in err and "ready:" not in out


def test_an_interrupt_leaves_no_server_that_nobody_knows(fake, tmp_path, monkeypatch):
    """`demo`, `bench`, `verify` have no handlers of their own: it comes when a process is there and not noted."""
    popen, started = subprocess.Popen, []

    def interrupted(*args, **options):
        started.append(popen(*args, **options))
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    # A shell has what it starts in the background ignore it.
    at_first = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    cluster = Cluster("org/model", commands=fake, log_dir=tmp_path / "logs")
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.start()
        # The watchdog, and two servers.
        assert len(started) == 3 and all(one.poll() is not None for one in started)
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    finally:
        signal.signal(signal.SIGINT, at_first)


def test_one_file_for_two_deployments(fake, tmp_path):
    """The second is refused, and the first leaves a file that is another's by then."""
    file = tmp_path / "up.json"
    first = start_up(fake, tmp_path)
    until(file.exists, "no JSON file")
    second = start_up(fake, tmp_path, "--log-dir", str(tmp_path / "others"))
    _, err = second.communicate(timeout=60)
    assert second.returncode == 1 and f"a deployment that runs, of process {first.pid}" in err and file.exists()
    file.write_text(json.dumps({"owner_pid": os.getpid()}))
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert json.loads(file.read_text()) == {"owner_pid": os.getpid()}


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid(), 2**22 - 1])
def test_a_file_that_a_killed_one_has_left_is_no_deployment(tmp_path, pid):
    """Its number may be that of another process by then, or in a container that of this one."""
    file = tmp_path / "up.json"
    file.write_text(json.dumps({"owner_pid": pid}))
    os.utime(file, (1e9, 1e9))
    up.check_unowned(file)


def test_a_symbolic_link_for_the_json_file_stays_one(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "others" / "up.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for document in ({"owner_pid": 1}, {"owner_pid": 2}):
        up.check_json(link)
        up.write_json(link, document)
        assert link.is_symlink() and not target.is_symlink() and json.loads(target.read_text()) == document
    assert [file.name for file in target.parent.iterdir()] == ["up.json"]


def test_a_file_that_cannot_be_written_is_told_of_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null"), Path("/dev/stdout"), Path("/proc/self/fd/1")):
        with pytest.raises(PdRadixError, match=f"--json {path}: that is no regular file"):
            up.check_json(path)
    monkeypatch.setattr(os, "access", lambda path, *args, **options: False)
    with pytest.raises(PdRadixError, match=f"--json {tmp_path}/up.json: {tmp_path} may not be written to"):
        up.check_json(tmp_path / "up.json")


def test_a_port_that_is_taken_is_refused_before_anything_starts(fake, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start_up(fake, tmp_path, "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Address already in use" in err and "starting" not in err


def test_killed_owner_leaves_no_orphans(fake, tmp_path):
    process = start_up(fake, tmp_path)
    until((tmp_path / "up.json").exists, "no JSON file")
    process.kill()
    process.communicate()
    until(lambda: not fakes(os.environ["FAKE_MARK"]), "orphans")


def test_failure_of_one_process_ends_all(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_DECODE", "dies-later")
    process = start_up(fake, tmp_path)
    until((tmp_path / "up.json").exists, "no JSON file")
    document = json.loads((tmp_path / "up.json").read_text())
    http(document["decode_urls"][0] + "/die", {})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "decode-0 exited with code 1: MemoryError: no more" in err


def started_up(process, tmp_path):
    until((tmp_path / "up.json").exists, "no JSON file")
    return json.loads((tmp_path / "up.json").read_text())


def test_a_worker_that_has_ended_in_peace_leaves_the_others(fake, tmp_path):
    process = start_up(fake, tmp_path, "--decode", "2")
    document = started_up(process, tmp_path)
    http(document["decode_urls"][0] + "/leave", {})
    until(lambda: len(started_up(process, tmp_path)["processes"]) == 3, "still told of")
    assert http(document["decode_urls"][1] + "/generate", {})[0] == 200
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "decode-0 exited with code 0; the others go on" in err


def test_a_worker_that_was_drained_leaves_the_others(fake, tmp_path, monkeypatch):
    """A prefill ends itself by SIGKILL, as the engine does: that it was to, the router knows."""
    monkeypatch.setenv("FAKE_ROUTER", "lets-go")
    process = start_up(fake, tmp_path, "--prefill", "2")
    document = started_up(process, tmp_path)
    os.kill(document["processes"][0]["pid"], signal.SIGKILL)
    until(lambda: len(started_up(process, tmp_path)["processes"]) == 3, "still told of")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "prefill-0 was killed by SIGKILL; the others go on" in err


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_what_crashes_is_started_again_so_often(fake, tmp_path, name):
    def entry():
        document = started_up(process, tmp_path)
        return next(entry for entry in document["processes"] if entry["name"] == name)

    process = start_up(fake, tmp_path, "--restart")
    before = entry()
    for _ in range(keeper.RESTARTS):
        killed = entry()
        os.kill(killed["pid"], signal.SIGKILL)
        until(lambda killed=killed: entry()["pid"] != killed["pid"], "not started again")
    assert {**entry(), "pid": 0} == {**before, "pid": 0}
    until(lambda: http(before["url"] + "/generate", {})[0] == 200, "does not serve")
    os.kill(entry()["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and f"started again 3 times, {name} was killed by SIGKILL" in err
    assert (tmp_path / "logs" / f"{name}.3.log").exists() and f"{name} was killed by SIGKILL" in err


def test_what_cannot_be_started_again_ends_the_deployment_with_its_reason(fake, tmp_path):
    process = start_up(fake, tmp_path, "--restart")
    document = started_up(process, tmp_path)
    Path(fake["decode"][0]).write_text("raise ValueError('no such device')")
    os.kill(document["processes"][1]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "started again 3 times, decode-0 exited with code 1: ValueError: no such" in err


def test_one_that_has_served_for_a_while_is_started_again_as_often(monkeypatch):
    class Crashed:
        returncode = staticmethod(lambda: -9)
        name, url, is_worker, log_path = "router", "http://x", False, Path("/none/router.log")
        obituary = staticmethod(lambda: "it crashed")

    class Deployment:
        crashes = iter([Crashed(), None] * (keeper.RESTARTS + 3) + [Crashed()] * keeper.RESTARTS)
        kill = staticmethod(lambda name: None)
        start_again = staticmethod(lambda name: "startup")
        has_started = staticmethod(lambda name, startup: True)

        def dead(self):
            return next(self.crashes)

    now, said = [1000.0], []
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    kept = keeper.Keeper(Deployment(), True, said.append)
    for _ in range(keeper.RESTARTS + 3):
        assert kept.attend() and not kept.attend()
        now[0] += keeper.STEADY_S
    now[0] -= 1
    # These do not get as far as to serve.
    for _ in range(keeper.RESTARTS - 1):
        assert kept.attend()
    with pytest.raises(PdRadixError, match="started again 3 times, it crashed"):
        kept.attend()
    assert len(said) == 2 * keeper.RESTARTS + 2


def test_a_signal_while_one_is_started_again_ends_everything(fake, tmp_path):
    process = start_up(fake, tmp_path, "--restart")
    document = started_up(process, tmp_path)
    Path(fake["decode"][0]).write_text("import time; print('waits', flush=True); time.sleep(600)")
    os.kill(document["processes"][1]["pid"], signal.SIGKILL)
    log = tmp_path / "logs" / "decode-0.log"
    until(lambda: log.exists() and "waits" in log.read_text(), "not started again")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped; logs are in" in err


def watchdog_of(process):
    """The process that ends the servers of this `pd-radix up` once that is gone."""
    return next(child for child in psutil.Process(process.pid).children() if "process_group.py" in str(child.cmdline()))


def test_a_failure_is_told_without_the_watchdog_too(fake, tmp_path):
    """Its closed pipe took the place of the cause, and `main` took that for `| head`."""
    process = start_up(fake, tmp_path)
    until((tmp_path / "up.json").exists, "no JSON file")
    document = json.loads((tmp_path / "up.json").read_text())
    watchdog = watchdog_of(process)
    watchdog.kill()
    until(lambda: watchdog.status() == psutil.STATUS_ZOMBIE, "the watchdog lives")
    os.kill(next(entry["pid"] for entry in document["processes"] if entry["role"] == "decode"), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "decode-0 was killed" in err and "Traceback" not in err
    assert not (tmp_path / "up.json").exists()


def test_a_signal_for_everybody_leaves_the_watchdog(fake, tmp_path):
    """systemd has it sent to all processes of a unit."""
    process = start_up(fake, tmp_path)
    until((tmp_path / "up.json").exists, "no JSON file")
    watchdog = watchdog_of(process)
    for signum in process_group.ENDS:
        watchdog.send_signal(signum)
    time.sleep(0.3)
    assert watchdog.is_running() and watchdog.status() != psutil.STATUS_ZOMBIE
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped; logs are in" in err and not (tmp_path / "up.json").exists()
    assert not psutil.pid_exists(watchdog.pid)
