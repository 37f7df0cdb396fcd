"""``pd-radix doctor``: checks this installation, and what this machine can run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from sglang_pd_radix.environment import patches_engine
from sglang_pd_radix.errors import PatchError, PdRadixError
from sglang_pd_radix.patching import loader, registry
from sglang_pd_radix.supplied import pegaflow_host, torch_layers

from . import process_group
from .cluster.local_http import http
from .operate.reading import TIMEOUT_S, addresses
from .operate.texts import printable
from .progress import Display

# Libraries with native parts are probed in separate processes, all at once: one may hang, crash or print.
TIMEOUT = 20.0
_PROBES = {
    "loader": """
import sglang
from sglang_pd_radix.patching import loader
answer = loader.status()
""",
    "nixl": """
import os
from nixl._api import nixl_agent, nixl_agent_config
backend = os.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX")
agent = nixl_agent("pd-radix-doctor", nixl_agent_config(backends=[]))
answer = {"plugins": sorted(agent.get_plugin_list()), "backend": backend}
if backend in answer["plugins"]:
    agent.create_backend(backend)
""",
    "mooncake": """
from sglang_pd_radix.supplied import cpu_host, mooncake_host
answer = {
    "installed": mooncake_host.installed(),
    "trouble": mooncake_host.trouble(cpu_host.active()),
    "transport": mooncake_host.transport(),
}
""",
    "router": """
import importlib, importlib.metadata
answer = {"installed": {}, "trouble": {}}
for name, module in (("smg", "smg.smg_rs"), ("sglang-router", "sglang_router.sglang_router_rs")):
    try:
        importlib.import_module(module)
        answer["installed"][name] = importlib.metadata.version(name)
    except ImportError as error:
        answer["trouble"][name] = f"{type(error).__name__}: {error}"
""",
    "cuda": """
import ctypes
answer = {"driver": None, "devices": []}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    cuda = None
if cuda is not None:
    number, name = ctypes.c_int(), ctypes.create_string_buffer(100)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    answer["driver"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if cuda.cuInit(0) == 0:
        cuda.cuDeviceGetCount(ctypes.byref(number))
        for index in range(number.value):
            cuda.cuDeviceGetName(name, 100, index)
            answer["devices"].append(name.value.decode())
""",
    "ucx": """
import glob, re, shutil, subprocess
answer = {"ports": {}, "verbs": bool(glob.glob("/dev/infiniband/uverbs*")), "transports": None}
for path in sorted(glob.glob("/sys/class/infiniband/*/ports/*/state")):
    _, _, _, _, device, _, port, _ = path.split("/")
    answer["ports"][f"{device}:{port}"] = open(path).read().partition(":")[2].strip()
if tool := shutil.which("ucx_info"):
    told = subprocess.run([tool, "-d"], capture_output=True, text=True).stdout
    answer["transports"] = sorted(set(re.findall(r"Transport: (\\S+)", told)))
""",
}
# Prefixes of UCX's RDMA transports.
_RDMA = ("rc", "ud", "dc")
# Least open files of a worker, and least shared memory of a host, bytes.
_FEWEST_FILES, _LEAST_SHARED = 8192, 2**30
_ANSWER = "pd-radix-answer:"
_WRAPPER = """
import json
try:
{code}
except BaseException as error:
    answer = {{"error": f"{{type(error).__name__}}: {{error}}"}}
print("\\n{mark}" + json.dumps(answer), flush=True)
import os
os._exit(0)  # the answer is out; a native library's exit handler may still crash or hang
"""


@dataclass(frozen=True)
class Check:
    """One line of the report. ``status``: ``ok``, ``warn``, ``fail``, or ``n/a`` (cannot be used here).

    way_out: the remedy.
    """

    name: str
    status: str
    detail: str
    way_out: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix doctor``."""
    parser.description = "Check this installation and this machine, and with --gateway the workers of a running fleet."
    parser.epilog = "Exit code: 1 if a check fails; a warning is not a failure, and n/a is what cannot be used here."
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument("--gateway", metavar="URL", help="compare the versions and settings of this gateway's workers")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 if a check fails, otherwise 0."""
    urls = addresses([], args.gateway, None) if args.gateway else []
    checks = [*diagnose(), *([fleet(urls)] if urls else [])]
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
            if check.way_out:
                print(f"      {'':<{width}}  -> {check.way_out}")
    return 1 if any(check.status == "fail" for check in checks) else 0


def diagnose(timeout: float = TIMEOUT) -> list[Check]:
    """All checks, in the order of the report. timeout: seconds, for all probes together."""
    Display().now(f"asking {', '.join(_PROBES)}: {timeout:.0f} s at most")
    answers = ask(_PROBES, timeout)
    return [
        _python(),
        _engine(),
        _of("loader", _loader, answers["loader"]),
        _extras(),
        _drift(),
        _of("device", _device, answers["cuda"]),
        _of("nixl", _nixl, answers["nixl"]),
        _of("mooncake", _mooncake, answers["mooncake"]),
        _pegaflow(),
        Check("mori", "n/a", "not supported by this patch set (the engine itself needs ROCm for it)"),
        _of("router", _router, answers["router"]),
        _of("ucx", _ucx, answers["ucx"]),
        _of("memlock", _locked_memory, answers["ucx"]),
        _open_files(),
        _shared_memory(),
    ]


def _of(name: str, judge: Callable[[dict[str, Any]], Check], answer: dict[str, Any]) -> Check:
    """``judge`` applied to a probe's answer; a warning if there is none in time."""
    if "late" in answer:
        way_out = "run it once more while this machine has less to do; what never answers hangs"
        return Check(name, "warn", f"not checked: {answer['late']}", way_out)
    return judge(answer)


def ask(probes: dict[str, str], timeout: float) -> dict[str, dict[str, Any]]:
    """Run each snippet in its own Python, all at once; returns their ``answer``.

    ``{"error": reason}`` if it raises or dies, ``{"late": reason}`` after ``timeout`` seconds.
    """
    children: dict[str, subprocess.Popen[str]] = {}
    deadline = time.monotonic() + timeout
    answers: dict[str, dict[str, Any]] = {}
    try:
        with process_group.ends_held_back():
            for name, code in probes.items():
                children[name] = _start(code)
        for name, child in children.items():
            try:
                output, _ = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
                answers[name] = _read(output, child.returncode)
            except subprocess.TimeoutExpired:
                answers[name] = {"late": f"no answer within {timeout:.0f} s"}
    finally:
        for child in children.values():
            _end(child)
    return answers


def _start(code: str) -> subprocess.Popen[str]:
    body = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return subprocess.Popen(
        [sys.executable, "-c", _WRAPPER.format(code=body, mark=_ANSWER)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(child: subprocess.Popen[str]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.communicate()


def _read(output: str, code: int) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        if line.startswith(_ANSWER):
            answer: dict[str, Any] = json.loads(line[len(_ANSWER) :])
            return answer
    return {"error": f"its process ended without an answer (exit code {code})"}


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info < (3, 13):
        return Check("python", "ok", version)
    return Check("python", "fail", f"{version} is not supported", "use Python 3.10, 3.11 or 3.12")


def _engine() -> Check:
    version = loader.engine_version()
    install = f"pip install sglang=={loader.ENGINE_VERSION}"
    if version is None:
        return Check("engine", "fail", "sglang is not installed in this environment", install)
    reason = loader.inert_reason(version)
    return Check("engine", "fail", reason, install) if reason else Check("engine", "ok", f"sglang {version}")


def _loader(answer: dict[str, Any]) -> Check:
    if answer.get("active"):
        return Check("loader", "ok", f"applied in every Python of this environment; patches: {answer['patch_root']}")
    variable = "SGLANG_PD_RADIX"
    try:
        if not patches_engine():
            return Check("loader", "warn", "switched off", f"unset {variable} to switch the patch set on")
        variable = loader.EXTRAS
        loader.extras()
        variable = torch_layers.SWITCH
        torch_layers.wanted()
    except (PdRadixError, ValueError) as error:
        return Check("loader", "fail", str(error), f"unset {variable}")
    if "error" in answer:
        whose = "sglang-pd-radix" if answer["error"].startswith(PatchError.__name__) else "the engine"
        return Check("loader", "fail", f"`import sglang` failed: {answer['error']}", f"repair {whose}'s installation")
    reason = answer["reason"]
    return Check(
        "loader", "fail", f"inactive: {reason}", "reinstall sglang-pd-radix beside the engine: its .pth file starts it"
    )


def _extras() -> Check:
    """The extras, in order, and what they change."""
    try:
        selected, engine = loader.extras(), loader.engine_root()
        roots = loader.patch_roots(selected)
        files = list(loader.patch_files(engine, roots)) if engine else []
    except PdRadixError as error:
        return Check("extras", "fail", str(error), f"correct or unset {loader.EXTRAS}; else reinstall sglang-pd-radix")
    parts = ["the core"]
    for name, root in zip(selected, roots[1:], strict=True):
        over = [file.module.removeprefix("sglang.srt.") for file in files if file.root == root and file.overlay]
        own = len([file for file in files if file.root == root]) - len(over)
        parts.append(f"{name} (changes {', '.join(over) or 'nothing'}; new modules: {own})")
    left_out = [name for name in loader.known_extras() if name not in selected]
    detail = ", then ".join(parts) + (f"; not selected: {', '.join(left_out)}" if left_out else "")
    return Check("extras", "ok", detail)


def _drift() -> Check:
    if loader.inert_reason(loader.engine_version()):
        return Check("drift", "warn", "not checked: the installed engine is not the one that is patched")
    try:
        rows = registry.replacements()
        drift = registry.check_pins()
    except PdRadixError as error:
        return Check("drift", "fail", str(error), "reinstall sglang-pd-radix")
    if drift:
        return Check(
            "drift",
            "fail",
            "; ".join(map(str, drift[:3])) + (f"; and {len(drift) - 3} more" if len(drift) > 3 else ""),
            f"pip install --force-reinstall --no-deps sglang=={loader.ENGINE_VERSION}, and undo local edits",
        )
    pinned = len({row.pin for row in rows if row.pin})
    return Check("drift", "ok", f"{len(rows)} changes registered, {pinned} pinned engine functions unchanged")


def _device(answer: dict[str, Any]) -> Check:
    cpu = _cpu_host_active()
    if "error" in answer:
        return Check("device", "warn", f"the CUDA driver did not answer: {answer['error']}", "check nvidia-smi")
    driver, devices = answer["driver"], answer["devices"]
    if driver is None:
        detail = "CPU: no CUDA driver on this machine"
        if cpu is None:
            return Check("device", "warn", f"{detail}, and CPU support is not part of this installation")
        if not cpu:
            return Check("device", "warn", f"{detail}, and CPU support is switched off", "unset SGLANG_USE_CPU_ENGINE")
        return Check("device", "ok", f"{detail}; CPU support is on")
    if cpu:
        return Check("device", "ok", f"CPU, as chosen by SGLANG_USE_CPU_ENGINE=1 (a CUDA {driver} driver is present)")
    if not devices:
        return Check(
            "device",
            "warn",
            f"CUDA {driver} driver, but no GPU is visible",
            "check CUDA_VISIBLE_DEVICES, or set SGLANG_USE_CPU_ENGINE=1 to run on the CPU",
        )
    found = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    if int(driver.split(".")[0]) < 12:
        return Check("device", "fail", f"{found}, CUDA {driver} driver", "the engine's torch needs a CUDA 12 driver")
    return Check("device", "ok", f"{found}, CUDA {driver} driver")


def _cpu_host_active() -> bool | None:
    if importlib.util.find_spec("sglang_pd_radix.supplied.cpu_host") is None:
        return None
    from sglang_pd_radix.supplied import cpu_host

    return bool(cpu_host.active())


def _nixl(answer: dict[str, Any]) -> Check:
    if "error" in answer:
        return Check("nixl", "fail", answer["error"], "pip install nixl")
    plugins = ", ".join(answer["plugins"])
    if answer["backend"] not in answer["plugins"]:
        return Check(
            "nixl",
            "fail",
            f"no plugin {answer['backend']}; it has: {plugins or 'none'}",
            "unset SGLANG_DISAGGREGATION_NIXL_BACKEND (default UCX), or NIXL_PLUGIN_DIR if it points elsewhere",
        )
    return Check("nixl", "ok", f"transfers over {answer['backend']}; plugins: {plugins}")


def _mooncake(answer: dict[str, Any]) -> Check:
    if "error" in answer:
        way_out = "use --disaggregation-transfer-backend nixl, or reinstall Mooncake's transfer engine"
        return Check("mooncake", "warn", f"does not load: {answer['error']}", way_out)
    if answer["trouble"]:
        what, way_out = answer["trouble"]
        if answer["installed"]:
            return Check("mooncake", "warn", f"installed, but {what}", way_out)
        return Check("mooncake", "n/a", f"not installed (optional: {way_out})")
    return Check("mooncake", "ok", "loads; transfers over {}; to change that: {}".format(*answer["transport"]))


def _pegaflow() -> Check:
    version, what = pegaflow_host.installed_version(), pegaflow_host.trouble()
    if version is None:
        return Check("pegaflow", "n/a", f"not installed (optional: {pegaflow_host.INSTALL})")
    if version != pegaflow_host.VERSION:
        return Check("pegaflow", "warn", f"{version} is installed", f"{what}, or leave --enable-pegaflow out")
    if what is not None:
        return Check("pegaflow", "n/a", f"{version}, but no server can be started here (optional): {what}")
    return Check("pegaflow", "ok", f"pegaflow-llm {version}; a server can be started here")


def _ucx(answer: dict[str, Any]) -> Check:
    if "error" in answer:
        return Check("ucx", "warn", f"its devices cannot be listed: {answer['error']}", "run ucx_info -d by hand")
    ports, transports = answer["ports"], answer["transports"]
    offered = "" if transports is None else f"; UCX has {', '.join(transports) or 'no transport'}"
    if not ports:
        return Check("ucx", "n/a", f"no RDMA device: KV goes over TCP or shared memory{offered}")
    down = [f"{port} is {state}" for port, state in ports.items() if state != "ACTIVE"]
    if not answer["verbs"]:
        way_out = "start the container with --device /dev/infiniband"
        return Check("ucx", "warn", f"{', '.join(ports)}: /dev/infiniband is missing, so KV goes over TCP", way_out)
    if down:
        return Check("ucx", "warn", f"{', '.join(down)}{offered}", "name those that are up in UCX_NET_DEVICES")
    if transports is not None and not any(name.startswith(_RDMA) for name in transports):
        return Check(
            "ucx", "warn", f"{', '.join(ports)}{offered}, none of RDMA", "install a UCX with verbs (rdma-core)"
        )
    return Check("ucx", "ok", f"RDMA over {', '.join(ports)}{offered}")


def _locked_memory(answer: dict[str, Any]) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = "ulimit -l is " + ("unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB")
    if not answer.get("ports"):
        return Check("memlock", "n/a", f"{told}; it matters for RDMA alone")
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", told)
    way_out = "ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of systemd)"
    return Check("memlock", "warn", f"{told}: RDMA has to lock the whole KV pool", way_out)


def _open_files() -> Check:
    """The engine raises the soft limit up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"ulimit -n is {soft}, at most {'unlimited' if hard == resource.RLIM_INFINITY else hard}"
    if hard == resource.RLIM_INFINITY or hard >= _FEWEST_FILES:
        return Check("open files", "ok", told)
    way_out = f"allow {_FEWEST_FILES} or more (docker run --ulimit nofile=65535, LimitNOFILE=65535 of systemd)"
    return Check("open files", "warn", f"{told}: each request and each peer is a connection", way_out)


def _shared_memory(path: str = "/dev/shm") -> Check:
    try:
        size = shutil.disk_usage(path).total
    except OSError as error:
        return Check("shared memory", "warn", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    told = f"{path} has {size / 2**30:.3g} GiB"
    if size >= _LEAST_SHARED:
        return Check("shared memory", "ok", told)
    way_out = "docker run --ipc=host, or --shm-size=8g"
    return Check("shared memory", "warn", f"{told}: NCCL, UCX and the engine's processes share memory there", way_out)


def fleet(urls: Sequence[str]) -> Check:
    """Whether the workers at ``urls`` have equal versions, and settings that match within a pair."""
    with ThreadPoolExecutor(len(urls)) as pool:
        told = dict(zip(urls, pool.map(_of_worker, urls), strict=True))
    known = {url: of_worker for url, of_worker in told.items() if of_worker}
    mixed, same = [], []
    for what in _FLEET:
        by_value: dict[str, list[str]] = {}
        for url, of_worker in known.items():
            by_value.setdefault(of_worker[what], []).append(url.partition("//")[2])
        same += [f"{what} {value}" for value in by_value if len(by_value) == 1]
        if len(by_value) > 1:
            mixed.append(f"{what} " + ", ".join(f"{value} ({' '.join(of)})" for value, of in by_value.items()))
    if mixed:
        way_out = "bring all workers to the same; in the middle of a rolling upgrade this is no fault"
        return Check("fleet", "warn", f"mixed: {'; '.join(mixed)}", way_out)
    if silent := [url for url in urls if url not in known]:
        return Check("fleet", "warn", f"no answer to /server_info from {', '.join(silent)}", "see pd-radix top")
    return Check("fleet", "ok", f"{len(urls)} workers: {', '.join(same)}")


def _of_worker(url: str) -> dict[str, str]:
    """A worker's settings that have to be equal on all; {} if unavailable."""
    status, content = http(url + "/server_info", timeout=TIMEOUT_S)
    try:
        info = json.loads(content) if status == 200 else {}
        pools = [state.get("kv_pool", {}) for state in info["internal_states"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    has_package = bool(pools) and all("requests" in pool for pool in pools)
    found = {name: printable(str(info.get(key))) for name, key in _FLEET.items()}
    return found | {"sglang-pd-radix": "there" if has_package else "not there, or an older one"}


# Compared settings, and their place in /server_info.
_FLEET = {
    "sglang": "version",
    "sglang-pd-radix": "",
    "transfer over": "disaggregation_transfer_backend",
    "page size": "page_size",
    "KV of type": "kv_cache_dtype",
}


def _router(answer: dict[str, Any]) -> Check:
    if "error" in answer:
        return Check("router", "fail", answer["error"], "pip install smg")
    installed, trouble = answer["installed"], answer["trouble"]
    told = ", ".join(f"{name} {version}" for name, version in installed.items())
    if "smg" not in trouble:
        return Check("router", "ok", told)
    if not installed:
        return Check("router", "fail", trouble["smg"], "pip install smg")
    found = f"{told}, which finds no prefix among several decode workers; smg: {trouble['smg']}"
    return Check("router", "warn", found, "pip install smg")
