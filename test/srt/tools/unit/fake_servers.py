"""Stand-ins for the servers of a deployment: real processes, real signals, no engine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from waiting import until

from sglang_pd_radix.tools import up
from sglang_pd_radix.tools.arguments import join_values

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


def parse(*arguments):
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return parser.parse_args(join_values(arguments))


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


def started_up(process, tmp_path):
    until((tmp_path / "up.json").exists, "no JSON file")
    return json.loads((tmp_path / "up.json").read_text())
