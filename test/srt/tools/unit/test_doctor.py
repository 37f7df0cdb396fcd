"""``pd-radix`` itself, and its doctor."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandbox import Sandbox
from test_top import POOL, workers

from sglang_pd_radix.patching import loader, registry
from sglang_pd_radix.tools import cli, doctor

GOOD = {
    "loader": {"active": True, "reason": "", "patch_root": "/somewhere"},
    "nixl": {"plugins": ["POSIX", "UCX"], "backend": "UCX"},
    "mooncake": {"installed": False, "trouble": ("not installed", "pip install mooncake-transfer-engine")},
    "router": {"installed": {"smg": "1.13.0", "sglang-router": "1.0"}, "trouble": {}},
    "cuda": {"driver": "12.8", "devices": ["NVIDIA H200", "NVIDIA H200"]},
    "ucx": {"ports": {"mlx5_0:1": "ACTIVE"}, "verbs": True, "transports": ["rc_mlx5", "tcp"]},
}
RDMA = {"ports": {"m:1": "ACTIVE"}, "verbs": True, "transports": None}


def diagnose(
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[int, int] = {resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY},  # noqa: B006 - nobody changes it
    shared: int = 2**33,
    **answers: dict[str, object],
) -> dict[str, doctor.Check]:
    monkeypatch.setattr(doctor, "ask", lambda probes, timeout: GOOD | answers)
    monkeypatch.setattr(doctor, "_cpu_host_active", lambda: False)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (limits.get(what, 2**20),) * 2)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=shared))
    return {check.name: check for check in doctor.diagnose()}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "check_pins", lambda: [])
    monkeypatch.setattr(registry, "replacements", lambda: [])
    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)


@pytest.mark.usefixtures("clean")
def test_healthy_installation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = diagnose(monkeypatch)
    statuses = {name: check.status for name, check in checks.items()}
    # By what is installed here.
    assert statuses.pop("pegaflow") in ("ok", "n/a")
    assert {name for name, status in statuses.items() if status == "n/a"} == {"mori", "mooncake"}
    assert {*statuses.values()} == {"ok", "n/a"}
    assert checks["device"].detail == "2 x NVIDIA H200, CUDA 12.8 driver"
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [check.status for check in checks.values()]
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "python",
        "status": "ok",
        "detail": ".".join(map(str, sys.version_info[:3])),
        "way_out": "",
    }


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("probe", "answer", "check", "status", "way_out"),
    [
        ("loader", {"error": "ImportError: x"}, "loader", "fail", "repair the engine"),
        ("loader", {"error": "PatchError: patch file x"}, "loader", "fail", "repair sglang-pd-radix"),
        ("loader", {"active": False, "reason": "not imported"}, "loader", "fail", "reinstall sglang-pd-radix"),
        ("nixl", {"error": "ModuleNotFoundError: nixl"}, "nixl", "fail", "pip install nixl"),
        ("nixl", {"plugins": ["POSIX"], "backend": "UCX"}, "nixl", "fail", "NIXL_PLUGIN_DIR"),
        ("router", {"error": "killed by SIGILL"}, "router", "fail", "pip install smg"),
        ("router", {"installed": {}, "trouble": {"smg": "no x", "sglang-router": "no x"}}, "router", "fail", "smg"),
        ("router", {"installed": {"sglang-router": "1"}, "trouble": {"smg": "no x"}}, "router", "warn", "smg"),
        ("router", {"installed": {"smg": "1"}, "trouble": {"sglang-router": "no x"}}, "router", "ok", ""),
        ("mooncake", {"installed": True, "trouble": ("it lacks x", "install x")}, "mooncake", "warn", "install x"),
        ("mooncake", {"error": "its process ended"}, "mooncake", "warn", "nixl"),
        ("cuda", {"driver": "12.8", "devices": []}, "device", "warn", "CUDA_VISIBLE_DEVICES"),
        ("cuda", {"driver": "11.8", "devices": ["A100"]}, "device", "fail", "CUDA 12 driver"),
        ("cuda", {"driver": None, "devices": []}, "device", "warn", "unset SGLANG_USE_CPU_ENGINE"),
        ("ucx", {"error": "TimeoutExpired"}, "ucx", "warn", "ucx_info -d"),
        ("ucx", {**RDMA, "verbs": False}, "ucx", "warn", "--device /dev/infiniband"),
        ("ucx", {**RDMA, "ports": {"m:1": "ACTIVE", "m:2": "DOWN"}}, "ucx", "warn", "UCX_NET_DEVICES"),
        ("ucx", {**RDMA, "transports": ["tcp", "self"]}, "ucx", "warn", "with verbs"),
    ],
)
def test_each_fault_is_named_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, probe: str, answer: dict[str, object], check: str, status: str, way_out: str
) -> None:
    found = diagnose(monkeypatch, **{probe: answer})[check]
    assert found.status == status
    assert way_out in found.way_out
    assert cli.main(["doctor"]) == (1 if status == "fail" else 0)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("probe", [*GOOD])
def test_a_probe_that_takes_too_long_is_no_fault_of_the_installation(monkeypatch, probe: str) -> None:
    found = diagnose(monkeypatch, **{probe: {"late": "no answer within 20 s"}})
    slow = found["device" if probe == "cuda" else probe]
    assert (slow.status, slow.detail) == ("warn", "not checked: no answer within 20 s")
    assert "once more" in slow.way_out and "repair" not in slow.way_out
    assert cli.main(["doctor"]) == 0


@pytest.mark.usefixtures("clean")
def test_cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose(monkeypatch)
    monkeypatch.setattr(doctor, "_cpu_host_active", lambda: True)
    assert doctor._device({"driver": None, "devices": []}).status == "ok"
    assert (
        "pip install mooncake"
        in doctor._mooncake({"installed": False, "trouble": ("x", "pip install mooncake")}).detail
    )
    loads = doctor._mooncake({"installed": True, "trouble": None, "transport": ("TCP", "install a driver")})
    assert loads.status == "ok" and "over TCP" in loads.detail and "install a driver" in loads.detail


@pytest.mark.usefixtures("clean")
def test_extras_are_told_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    sandbox.engine({"srt/a.py": "", "srt/b.py": ""})
    sandbox.patch({"srt/a.py": ""})
    sandbox.patch({"srt/b.py": "", "srt/a.py": "", "srt/c.py": ""}, "two")
    sandbox.patch({"srt/d.py": ""}, "one")
    monkeypatch.setattr(loader, "engine_root", lambda: sandbox.engine_root)
    monkeypatch.setattr(loader, "patch_root", lambda: sandbox.ours)
    monkeypatch.delenv(loader.EXTRAS, raising=False)
    both = "the core, then two (changes a, b; new modules: 1), then one (changes nothing; new modules: 1)"
    assert diagnose(monkeypatch)["extras"] == doctor.Check("extras", "ok", both)
    monkeypatch.setenv(loader.EXTRAS, "none")
    assert diagnose(monkeypatch)["extras"].detail == "the core; not selected: two, one"
    monkeypatch.setenv(loader.EXTRAS, "three")
    found = diagnose(monkeypatch, loader={"error": "PdRadixError: it names three"})
    assert found["extras"].status == found["loader"].status == "fail"
    for name in ("extras", "loader"):
        assert "'three'" in found[name].detail and "It takes none, or some of: two, one." in found[name].detail
        assert loader.EXTRAS in found[name].way_out


@pytest.mark.usefixtures("clean")
def test_switched_off_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for no in ("0", "false "):
        monkeypatch.setenv("SGLANG_PD_RADIX", no)
        assert diagnose(monkeypatch, loader={"active": False, "reason": ""})["loader"].status == "warn"
    monkeypatch.setenv("SGLANG_PD_RADIX", "off")
    check = diagnose(monkeypatch, loader={"error": "it exited with 1"})["loader"]
    assert check.status == "fail" and "SGLANG_PD_RADIX is 'off': give 1" in check.detail


@pytest.mark.parametrize("version", [None, "0.5.11"])
def test_wrong_engine(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(loader, "engine_version", lambda: version)
    checks = diagnose(monkeypatch)
    assert checks["engine"].status == "fail"
    assert checks["engine"].way_out == "pip install sglang==0.5.10.post1"
    assert checks["drift"].status == "warn"


@pytest.mark.usefixtures("clean")
def test_a_switch_that_says_neither_yes_nor_no_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"error": "ValueError: SGLANG_TORCH_LAYERS is 'off': give 1"}
    monkeypatch.setenv("SGLANG_TORCH_LAYERS", "off")
    found = diagnose(monkeypatch, loader=answer)["loader"]
    assert found.status == "fail" and found.detail.startswith("SGLANG_TORCH_LAYERS is 'off': give 1 to have")
    assert found.way_out == "unset SGLANG_TORCH_LAYERS"
    # Then nobody reads it.
    monkeypatch.setenv("SGLANG_PD_RADIX", "0")
    assert diagnose(monkeypatch, loader={"active": False, "reason": ""})["loader"].detail == "switched off"


@pytest.mark.usefixtures("clean")
def test_limits_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {resource.RLIMIT_MEMLOCK: 65536, resource.RLIMIT_NOFILE: 1024}
    found = diagnose(monkeypatch, limits=small, shared=2**26)
    assert {found[name].status for name in ("memlock", "open files", "shared memory")} == {"warn"}
    assert "ulimit -l is 64 KiB" in found["memlock"].detail and "memlock=-1" in found["memlock"].way_out
    assert "ulimit -n is 1024" in found["open files"].detail and "0.0625 GiB" in found["shared memory"].detail
    # It matters for RDMA alone.
    none = {"ports": {}, "verbs": False, "transports": ["tcp"]}
    found = diagnose(monkeypatch, limits=small, ucx=none)
    assert found["memlock"].status == found["ucx"].status == "n/a" and "UCX has tcp" in found["ucx"].detail
    monkeypatch.undo()
    assert doctor._shared_memory("/none/of/this").status == "warn"


def test_a_fleet_of_mixed_versions_is_told() -> None:
    with workers(3) as found:
        for worker in found:
            worker.says("decode", POOL | {"requests": {"running": 1}})
            worker.answers["/server_info"] |= {"version": "0.5.10.post1", "page_size": 16}
        urls = [f"http://{worker.address}" for worker in found]
        same = doctor.fleet(urls)
        assert same.status == "ok" and same.detail.startswith("3 workers: sglang 0.5.10.post1, sglang-pd-radix there, ")
        found[1].answers["/server_info"] |= {"version": "0.5.11", "page_size": 64}
        del found[2].answers["/server_info"]["internal_states"][0]["kv_pool"]
        mixed = doctor.fleet(urls)
        assert mixed.status == "warn" and f"sglang 0.5.10.post1 ({found[0].address} " in mixed.detail
        assert f"0.5.11 ({found[1].address}); sglang-pd-radix there" in mixed.detail
        assert f"not there, or an older one ({found[2].address})" in mixed.detail and "page size 16" in mixed.detail
    silent = doctor.fleet([urls[0]])
    assert silent.status == "warn" and f"no answer to /server_info from {urls[0]}" in silent.detail


def test_a_gateway_that_is_not_there_is_told_before_anything_is_asked(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda **_: pytest.fail("it takes its time"))
    assert cli.main(["doctor", "--gateway", "http://localhost:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing listens at http://localhost:9 (" in line and "start it, or correct its address" in line


@pytest.mark.usefixtures("clean")
def test_a_gateway_s_workers_are_in_the_report(monkeypatch, capsys) -> None:
    diagnose(monkeypatch)
    with workers(2) as (gateway, worker):
        gateway.answers["/workers"] = {"workers": [{"url": f"http://{worker.address}"}]}
        worker.says("decode", POOL | {"requests": {}})
        assert cli.main(["doctor", "--gateway", gateway.address]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["ok", "fleet", "1", "workers:"]


def test_drift_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "check_pins", lambda: [registry.Drift(f"m:f{i}", "changed") for i in range(5)])
    found = diagnose(monkeypatch)["drift"]
    assert found.status == "fail"
    assert found.detail.startswith("m:f0 differs from what the patch set was written against; m:f1")
    assert found.detail.endswith("; and 2 more")


def test_probes_cannot_hang_crash_or_confuse_the_doctor() -> None:
    began = time.monotonic()
    answers = doctor.ask(
        {
            "good": "print('noise'); answer = {'x': 1}",
            "raises": "import no_such_module",
            "exits": "import sys; sys.exit(3)",
            "dies": "import os; os._exit(9)",
        },
        timeout=300,
    )
    # As long as they take to start, and not until the time is up.
    assert time.monotonic() - began < 100
    assert answers["good"] == {"x": 1}
    assert answers["raises"] == {"error": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert answers["exits"] == {"error": "SystemExit: 3"}
    assert answers["dies"] == {"error": "its process ended without an answer (exit code 9)"}
    # For these the time has to run out: what a probe leaves behind keeps its output open.
    began = time.monotonic()
    hanging = {
        "hangs": "import time; time.sleep(600)",
        "leaves": "import subprocess; subprocess.Popen(['sleep', '600']); answer = {}",
    }
    assert doctor.ask(hanging, timeout=1) == dict.fromkeys(hanging, {"late": "no answer within 1 s"})
    assert time.monotonic() - began < 100


def test_no_probe_outlives_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while it waits for the first."""
    children = []

    def started(code: str, start=doctor._start):
        children.append(start(code))
        return children[-1]

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_start", started)
    monkeypatch.setattr(doctor, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor.ask({"good": "answer = {}", "hangs": "import time; time.sleep(60)"}, timeout=30)
    assert len(children) == 2 and all(child.poll() is not None for child in children)


def test_real_probes_answer_here() -> None:
    answers = doctor.ask(doctor._PROBES, 60)
    assert "error" not in answers["loader"] and answers["loader"]["active"], answers["loader"]
    assert "UCX" in answers["nixl"]["plugins"]
    assert set(answers["cuda"]) == {"driver", "devices"}
    assert set(answers["ucx"]) == {"ports", "verbs", "transports"}
    assert answers["router"]["installed"]["smg"] and answers["router"]["installed"]["sglang-router"]


def test_loader_probe_sees_an_installation_that_was_not_started(tmp_path: Path) -> None:
    """``-S`` skips the .pth files, as an install outside site-packages would."""
    sandbox = Sandbox(tmp_path)
    code = doctor._PROBES["loader"] + "\nprint(answer['active'])"
    assert sandbox.start("-S", "-c", code).stdout.strip() == "False"


# -- the command -----------------------------------------------------------------------------------------------------


def test_sub_command_is_imported_only_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang_pd_radix.tools.doctor"
    monkeypatch.delitem(sys.modules, name)
    assert cli.main(["--help"]) == 0
    assert name not in sys.modules


def test_command_that_is_not_installed_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "not-there", "no such thing")
    monkeypatch.setitem(cli.GROUPS["operate"], "not-there", "no such thing")
    assert cli.main(["--help"]) == 0
    assert "not-there" not in capsys.readouterr().out
    assert cli.main(["not-there"]) == 2


def test_what_a_locale_has_no_letters_for_is_told_without() -> None:
    program = """
import sys, types
from sglang_pd_radix.tools import cli, dashboard
dashboard.run = lambda args: print("a \N{RIGHTWARDS ARROW} b") or 0
sys.exit(cli.main(["dashboard"]))
"""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (0, b"a \\u2192 b\n"), done.stderr


@pytest.mark.parametrize("argv, code", [(["patches"], 128 + signal.SIGPIPE), (["doctor", "--json"], 7)])
def test_reader_may_close_the_pipe(argv: list[str], code: int) -> None:
    """Of what had its verdict before the rest of its text met the closed pipe, the exit code is that."""
    program = (
        "import sys, time; from sglang_pd_radix.tools import cli, doctor\n"
        f"doctor.run = lambda args: print('x') or time.sleep(1) or 7\nsys.exit(cli.main({argv}))"
    )
    command = f"env -u PYTHONUNBUFFERED {shlex.quote(sys.executable)} -c {shlex.quote(program)} | head -c 0"
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device", "x.json"), UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogate")],
)
def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def diagnose(**_: object) -> list[doctor.Check]:
        raise error

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == f"pd-radix: {error}\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_a_command_has_made_goes_with_it(monkeypatch: pytest.MonkeyPatch, signum: signal.Signals) -> None:
    """However it is ended."""
    unwound = []

    def diagnose(**_: object) -> list[doctor.Check]:
        try:
            signal.raise_signal(signum)
            return []
        finally:
            unwound.append(signum)

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    # What starts these tests may ignore some of them, as `nohup` does.
    usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(signum, usual)
    try:
        assert cli.main(["doctor"]) == 128 + signum and unwound == [signum]
        assert signal.getsignal(signum) == usual
    finally:
        signal.signal(signum, before)
