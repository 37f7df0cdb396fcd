"""`pd-radix up` with the real engine: a chat goes through, everything ends, and a bad option is explained."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

PROMPT = [{"role": "user", "content": "What is a good name for a small river?"}]


@pytest.fixture(autouse=True)
def alone(clusters):
    """These tests start servers of their own."""
    clusters.stop()


def start_up(model, tmp_path, *arguments):
    command = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "up", "--model-path", str(model)]
    command += ["--json", str(tmp_path / "up.json"), "--log-dir", str(tmp_path / "logs"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def streamed_text(url, model):
    """The answer to PROMPT from a streaming chat completion, and in how many pieces it came."""
    body = {"model": model, "messages": PROMPT, "stream": True, "max_tokens": 16, "temperature": 0}
    pieces = []
    with post(url + "/v1/chat/completions", body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    return "".join(pieces), sum(map(bool, pieces))


def asked_over(connection):
    """Status of a short request over a connection that stays."""
    connection.request("GET", "/model_info")
    reply = connection.getresponse()
    reply.read()
    return reply.status


def frozen_in(log, wait_s=20):
    """The processes of a worker whose collections leave out what they have loaded; each is told by the one before."""
    until = time.monotonic() + wait_s
    while len(found := re.findall(r"Freezing GC in (\w+)", log.read_text())) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    return sorted(found)


def without(pid):
    """Whether what the JSON file says has no such process."""
    return lambda document: all(entry["pid"] != pid for entry in document["processes"])


def processes_of(log_dir):
    """Live processes whose output goes to ``log_dir``: the servers and everything they started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1").startswith(str(log_dir)):
                found.append((int(entry.name), (entry / "cmdline").read_bytes()))
        except OSError:
            continue
    return found


def described(process, tmp_path, changed=lambda document: True):
    """What the JSON file says once that is so."""
    while True:
        assert process.poll() is None, process.communicate()[1]
        if (tmp_path / "up.json").exists() and changed(found := json.loads((tmp_path / "up.json").read_text())):
            return found
        time.sleep(0.2)


def shown(line, *more):
    """What a command prints that `up` has printed behind a word."""
    command = line.partition(":")[2].replace("pd-radix", f"{sys.executable} -m sglang_pd_radix.tools.cli", 1)
    done = subprocess.run(["bash", "-c", " ".join([command, *more])], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("crashes", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_chat_goes_through_and_ctrl_c_leaves_nothing(model, backend, tmp_path, crashes):
    """crashes: a worker, which is started again."""
    process = start_up(model, tmp_path, "--backend", backend, "--page-size", "16", *["--restart"][:crashes])
    try:
        document = described(process, tmp_path)
        assert document["model"] == str(model) and document["backend"] == backend
        roles = {entry["role"]: entry for entry in document["processes"]}
        assert set(roles) == {"prefill", "decode", "router"} and len(document["processes"]) == 3
        for role, disaggregation_mode in (("prefill", "prefill"), ("decode", "decode")):
            with urllib.request.urlopen(roles[role]["url"] + "/server_info", timeout=30) as response:
                info = json.load(response)
            assert info["disaggregation_mode"] == disaggregation_mode and info["page_size"] == 16
        assert info["disaggregation_decode_enable_radix_cache"] is True
        assert info["port"] == int(roles["decode"]["url"].rpartition(":")[2])
        for role in ("prefill", "decode"):
            assert frozen_in(Path(roles[role]["log"])) == ["Detokenizer", "Scheduler", "Tokenizer"]
        assert Path(roles["decode"]["log"]).exists() and os.getpgid(roles["decode"]["pid"]) == roles["decode"]["pid"]

        idle = http.client.HTTPConnection("127.0.0.1", info["port"], timeout=30)
        assert asked_over(idle) == 200
        asked_at, socket = time.monotonic(), idle.sock

        first, pieces = streamed_text(document["router_url"], Path(model).name)
        assert len(first.split()) == 16 and pieces > 4
        assert streamed_text(document["router_url"], Path(model).name)[0] == first
        with pytest.raises(urllib.error.HTTPError, match="503"):
            streamed_text(document["router_url"], "another")

        lines = [process.stdout.readline().rstrip() for _ in range(8)]
        assert lines[3:5] == [f"ready: {document['router_url']}", f"model: {Path(model).name}"]
        ask, watch, end = lines[5:]
        assert end == "end:   Ctrl-C"
        shown(ask)
        cached = shown(ask)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        look = shown(watch, "--json")
        assert look["total"]["counters"]["held_tokens"] > 0 and not look["total"]["unreachable"]
        assert {worker["role"] for worker in look["workers"]} == {"prefill", "decode"}
        rid = shown(ask)["id"]
        assert {record["role"] for record in shown(watch.replace(" top ", f" trace {rid} "), "--json")} >= {"decode"}
        assert len(processes_of(tmp_path / "logs")) >= 3
        # The engine's own workers would have closed it.
        time.sleep(max(0.0, asked_at + 7 - time.monotonic()))
        assert asked_over(idle) == 200 and idle.sock is socket

        if crashes:
            killed = roles["decode"]["pid"]
            os.kill(killed, signal.SIGKILL)
            roles = {entry["role"]: entry for entry in described(process, tmp_path, without(killed))["processes"]}
            assert roles["decode"]["url"].endswith(f":{info['port']}")
            assert shown(ask.replace("curl ", "curl --fail --retry 20 --retry-all-errors ", 1))["choices"]

        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out == "" and ("decode-0 was killed by SIGKILL" in err) == crashes
    # Phases are read off the logs now and then; a quick start-up shows few of them.
    for name in ("prefill-0", "decode-0"):
        assert f"{name}: starting" in err and f"{name}: ready after" in err
    assert processes_of(tmp_path / "logs") == []


@pytest.mark.thorough  # test_mooncake_host.py has what is said.
def test_missing_mooncake_library_is_explained(model, tmp_path, monkeypatch):
    """The servers find a Mooncake that does not load, as on a host without its system libraries."""
    package = tmp_path / "path" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    error = "libodd.so.1: cannot open shared object file: No such file or directory"
    (package / "engine.py").write_text(f"raise ImportError({error!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    process = start_up(model, tmp_path, "--backend", "mooncake")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("pd-radix: ")]
    for part in ("cannot be used here", "libodd.so.1", "apt-get install", "--disaggregation-transfer-backend nixl"):
        assert part in line
    assert processes_of(tmp_path / "logs") == []
