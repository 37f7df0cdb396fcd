"""`benchmark/chaos.py` as a whole, on stand-ins for the servers: it finds what is wrong, and nothing else."""

from __future__ import annotations

import functools
import json
import textwrap
from pathlib import Path

import chaos
import pytest
import soak
from faults import deploy, schedule

# Answers like a server of any role; what it says to a prompt follows from the prompt. FAKE_<ROLE> says what is wrong.
SERVER = """
import http.server, json, os, sys, threading, time, zlib
role, args = sys.argv[1], sys.argv[2:]
fault, count = os.environ.get("FAKE_" + role.upper(), ""), 0
pool = {"idle": True, "size": 100, "available": 100, "evictable": 0, "protected": 0, "free_req_slots": 4,
        "req_slots": 4, "metadata_buffers": 8, "free_metadata_buffers": 8, "rooms": {"live": 0}}
if fault == "leaks":
    pool["available"] = 84
if fault == "dies":
    threading.Timer(4, os._exit, (3,)).start()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.answer({"internal_states": [{"kv_pool": pool}]})
    def do_POST(self):
        global count
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            return self.answer({})
        count += 1
        tokens = body["sampling_params"]["max_new_tokens"]
        first = zlib.crc32(json.dumps(body.get("input_ids")).encode()) % 1000
        ids = [first + i for i in range(tokens)]
        if fault == "lies" and count > 60:
            ids[-1] += 1
        time.sleep(0.01)
        told = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}}}
        if not body.get("stream"):
            return self.answer(told)
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps(told).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    def answer(self, document):
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass

port = int(args[args.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    commands = {role: ("-S", "-E", str(script), role) for role in ("prefill", "decode", "router")}
    monkeypatch.setattr(deploy, "cluster", functools.partial(deploy.cluster, commands=commands))
    # A storm of some seconds, in which everything comes.
    monkeypatch.setattr(schedule, "PAUSE_S", (0.05, 0.1))
    shape = functools.partial(schedule.Shape, out_s=(0.1, 0.2), dead_s=(0.0, 0.1), restart_s=0.6)
    monkeypatch.setattr(chaos, "Shape", shape)
    # What these do in no time is no measure of theirs.
    monkeypatch.setattr(chaos.judge, "RATE_BACK", 0.1)


def run_chaos(tmp_path: Path) -> tuple[int, dict]:
    arguments = ["--one-host", "--seconds", "3.5", "--requests", "100000", "--distinct", "12", "--clients", "2"]
    arguments += ["--model", "none", "--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    status = chaos.main(arguments)
    return status, json.loads((tmp_path / "report.json").read_text())


def test_a_storm_that_harms_nobody(tmp_path: Path, stand_ins: None, capsys: pytest.CaptureFixture):
    status, report = run_chaos(tmp_path)
    assert report["problems"] == [] and status == 0
    said = capsys.readouterr().out
    assert "all is well" in said
    kinds = {done["event"].split()[2] for done in report["events"]}
    assert kinds == {"kill", "stop", "flush", "pause", "weights"}
    assert any(done["outcome"].startswith("ready") for done in report["events"])
    assert report["storm"]["ended"]["whole"] > 30 and set(report["books"]) == {
        "prefill-0", "prefill-1", "decode-0", "decode-1"
    }  # fmt: skip
    # The logs of lives that have ended are there.
    assert [path for path in (tmp_path / "logs").iterdir() if path.name.endswith(".1.log")]


def test_what_is_wrong_is_found(
    tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("FAKE_ROUTER", "lies")
    monkeypatch.setenv("FAKE_DECODE", "leaks")
    status, report = run_chaos(tmp_path)
    assert status == 1
    found = "\n".join(report["problems"])
    assert "differs from token" in found
    assert all(f"decode-{i}: 16 tokens of KV are lost" in found for i in range(2)) and "prefill" not in found
    assert "WRONG: " in capsys.readouterr().out


@pytest.mark.thorough
def test_a_worker_that_ends_by_itself(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_PREFILL", "dies")
    monkeypatch.setattr(chaos, "Shape", functools.partial(schedule.Shape, without=frozenset({"kill"})))
    status, report = run_chaos(tmp_path)
    assert status == 1
    assert any(f"prefill-{i} ended by itself: prefill-{i} exited with code 3" in p for p in report["problems"]
               for i in range(2))  # fmt: skip


@pytest.mark.parametrize("leaks", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_short_soak(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch, leaks: bool):
    if leaks:
        monkeypatch.setenv("FAKE_DECODE", "leaks")
    arguments = ["--minutes", "0.03", "--every", "0.1", "--distinct", "12", "--clients", "2", "--model", "none"]
    arguments += ["--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "soak.json")]
    status = soak.main([*arguments, "--plot", str(tmp_path / "plots")])
    report = json.loads((tmp_path / "soak.json").read_text())
    assert status == int(leaks) and bool(report["problems"]) == leaks, report["problems"]
    assert {one["worker"] for one in report["samples"]} == {"prefill-0", "decode-0"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "soak-rss.svg", "soak-descriptors.svg", "soak-held.svg", "soak-rooms.svg"
    }  # fmt: skip


def test_what_grows_is_said():
    def seen(grows: float) -> list[dict]:
        return [
            {"at_s": t, "worker": "decode-0", "rss_kib": 500_000 + grows * 1000 * t, "descriptors": 100,
             "threads": 50 + grows * t, "held": 0, "rooms": 3}
            for t in range(100)
        ]  # fmt: skip

    assert soak.growth(seen(0.0)) == []
    found = soak.growth(seen(1.0))
    assert len(found) == 2 and "rss_kib grew" in found[0] and "threads grew from 87 to 137" in found[1]
