"""`pd-radix up`: what it takes and refuses, and with stand-ins for the servers what ends and restarts it."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from fake_servers import fakes, parse, start_up, started_up
from sglang.srt import server_args
from waiting import until

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cluster as cluster_module
from sglang_pd_radix.tools import keeper, process_group, up
from sglang_pd_radix.tools.cluster import http, option_value

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


def test_options_of_the_engine_need_no_dashes_before_them():
    given = ["--page-size", "16", "--cuda-graph-bs", "1", "2", "--model-path", "m/x", "--tp=1", "--decode", "2"]
    args = parse(*given, "--", "--log-level", "info", "--port", "1")
    rest = ["--tp=1", "--log-level", "info", "--port", "1"]
    assert args.engine_options == ["--page-size", "16", "--cuda-graph-bs", "1", "2", *rest]
    assert (args.port, args.decode, args.model_path) == (None, 2, "m/x")


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
        (["--model-path", "/proc"], r"no config\.json"),
        (["--model-path", "m/x", "--decode-args", "--a 'b"], "--decode-args.*quotes"),
        (["--model-path", "m/x", "--prefill", "0"], "at least one"),
        (["--model-path", "m/x", "--", "--page-size", "x"], "--page-size x: must be a whole number"),
        (["--model-path", "m/x", "--decode-args=--page-size 0"], "--page-size 0: must be"),
        (["--model-path", "m/x", "--json", "/no/such/dir/f.json"], "no directory"),
        (["--model-path", "m/x", "--json", "/"], "that is no regular file"),
        (["--model-path", "m/x", "--log-dir", "/dev/null/x"], "--log-dir /dev/null/x: it cannot be made"),
        ([], "--model is missing"),
        (["--model-path", "m/x", "--backend", "mori"], "take nixl or mooncake, or add --no-radix"),
        (["--model-path", "m/x", "--backend", "mori", "--no-radix"], "pip install mori"),
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


@pytest.mark.parametrize(
    ("host", "given"), [("::", "[::]"), ("[::]", "[::]"), ("0.0.0.0", "0.0.0.0"), ("[127.0.0.1]", "127.0.0.1")]
)
def test_the_router_is_given_an_ipv6_address_in_brackets(tmp_path, host, given):
    """sglang-router ends at one without, and both take them."""
    options = ["--model-path", "m/x", "--log-dir", str(tmp_path), "--host", host]
    router = next(one for one in up.cluster_from(parse(*options)).plan() if one.role == "router")
    assert option_value(router.command, "--host") == given


@pytest.mark.parametrize("version, message", [(None, "not installed"), ("0.24.6", "0.24.6 is installed, not 0.25.1")])
def test_a_pegaflow_server_that_cannot_be_started_is_refused(monkeypatch, version, message):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.setattr(up.pegaflow_host, "installed_version", lambda: version)
    with pytest.raises(PdRadixError, match=f"--pegaflow: .*{message}"):
        up.cluster_from(parse("--model-path", "m/x", "--pegaflow"))


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


@pytest.mark.parametrize(("given", "says"), [("--polcy x", "smg has no option --polcy"), ("--policy x", "--policy")])
def test_an_option_that_the_gateway_does_not_take_is_refused(monkeypatch, given, says):
    """It starts last, after the workers."""
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    with pytest.raises(PdRadixError, match=f"--router-args: .*{says}"):
        up.cluster_from(parse("--model-path", "m/x", "--router-args", given))


def test_a_gateway_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PdRadixError, match="--router smg: it is not installed; pip install smg"):
        up.cluster_from(parse("--model-path", "m/x", "--router", "smg"))
    with pytest.raises(PdRadixError, match="no gateway is installed: pip install smg"):
        up.cluster_from(parse("--model-path", "m/x"))


def test_a_symbolic_link_for_the_json_file_stays_one(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "others" / "up.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for document in ({"model": "a"}, {"model": "b"}):
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


# -- the command


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_everything(fake, tmp_path, signum):
    process = start_up(fake, tmp_path, "--prefill", "2", "--decode-args", "--enable-lora")
    until((tmp_path / "up.json").exists, "no JSON file")
    document = json.loads((tmp_path / "up.json").read_text())
    assert http(document["router_url"] + "/readiness")[0] == 200
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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("role", "fault"), [("prefill", "never"), ("decode", "hangs")])
def test_a_signal_during_the_start_ends_everything(fake, tmp_path, monkeypatch, role, fault, signum):
    """Also while one hangs when a request has gone through: `up` ended half a minute later, as if it had served."""
    monkeypatch.setenv(f"FAKE_{role.upper()}", fault)
    process = start_up(fake, tmp_path)
    log = tmp_path / "logs" / "decode-0.log"
    if fault == "hangs":
        until(lambda: log.is_file() and "flushed" in log.read_text(), "not that far")
    else:
        until(lambda: len(fakes(os.environ["FAKE_MARK"])) >= 5, "not started")
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signum and "ended while starting" in err and "ready:" not in out


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
