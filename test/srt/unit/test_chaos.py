"""`benchmark/chaos.py` as a whole, on stand-ins for the servers: it finds what is wrong, and nothing else."""

from __future__ import annotations

import functools
import json
import textwrap
from pathlib import Path

import chaos
import pytest
import soak
from faults import blame, deploy, growth, hits, pace, schedule
from faults.watch import Sample

# Answers like a server of any role; what it says to a prompt follows from the prompt. FAKE_<ROLE> says what is wrong.
# The router answers by itself, for one decode worker after the other.
SERVER = """
import http.server, json, os, socket, sys, threading, time, zlib
role, args = sys.argv[1], sys.argv[2:]
fault, count = os.environ.get("FAKE_" + role.upper(), ""), 0
after = int(os.environ.get("FAKE_AFTER", 160))
trees, kept = [set(), set()], []
pool = {"idle": True, "size": 100, "available": 100, "evictable": 0, "protected": 0, "free_req_slots": 4,
        "req_slots": 4, "metadata_buffers": 8, "free_metadata_buffers": 8, "rooms": {"live": 0}}
if role == "decode":
    pool |= {"locks_taken": 3, "locks_released": 3, "audit": []}
if fault == "leaks":
    pool["available"] = 84
if fault == "opens":
    # As many descriptors as if each request left one behind.
    def opens():
        while True:
            time.sleep(0.02)
            kept.append(socket.socket())
    threading.Thread(target=opens, daemon=True).start()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.answer({"internal_states": [{"kv_pool": pool}]})
    def do_POST(self):
        global count
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fault == "dies" and self.path not in ("/generate", "/flush_cache"):
            # At the first blow.
            os._exit(3)
        if self.path != "/generate":
            return self.answer({})
        count += 1
        if fault == "fails" and after < count <= after + 20:
            return self.answer({"error": "no"}, 500)
        prompt = body.get("input_ids") or []
        tokens = body["sampling_params"]["max_new_tokens"]
        first = zlib.crc32(json.dumps(prompt).encode()) % 1000
        ids = [first + i for i in range(tokens)]
        if fault == "lies" and count > after:
            ids[-1] += 1
        time.sleep(0.2 if fault == "slows" and count > after else 0.01)
        at = count % 2
        pages = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        held = 16 * len([page for page in pages if page in trees[at]])
        trees[at].update(pages)
        if fault == "misses" and at:
            held = 0
        meta = {"finish_reason": {"type": "length"}, "weight_version": f"decode-{at}"}
        told = {"output_ids": ids, "meta_info": {**meta, "cached_tokens_details": {"decode_prefix": held}}}
        if not body.get("stream"):
            return self.answer(told)
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps(told).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    def answer(self, document, status=200):
        content = json.dumps(document).encode()
        self.send_response(status)
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
    commands = {role: ("-S", "-E", str(script), role) for role in ("prefill", "decode", "router", "engine")}
    monkeypatch.setattr(deploy, "cluster", functools.partial(deploy.cluster, commands=commands))
    monkeypatch.setattr(deploy, "engine_alone", functools.partial(deploy.engine_alone, commands=commands))
    # A storm of some seconds, in which everything comes.
    monkeypatch.setattr(schedule, "PAUSE_S", (0.05, 0.1))
    shape = functools.partial(schedule.Shape, out_s=(0.1, 0.2), dead_s=(0.0, 0.1), restart_s=0.6)
    monkeypatch.setattr(chaos, "Shape", shape)
    monkeypatch.setattr(blame, "HARMS", dict.fromkeys(blame.HARMS, 0.0))
    monkeypatch.setattr(blame, "EARLY_S", 0.0)
    monkeypatch.setattr(hits, "ENOUGH", 100)
    # What these do in no time is no measure of theirs.
    monkeypatch.setattr(pace, "SLOW", 0.05)
    monkeypatch.setattr(pace, "MIDDLE", 0.1)


def run_chaos(tmp_path: Path) -> tuple[int, dict]:
    arguments = ["--one-host", "--seconds", "3.5", "--requests", "100000", "--distinct", "12", "--clients", "2"]
    arguments += ["--model", "none", "--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    status = chaos.main(arguments)
    return status, json.loads((tmp_path / "report.json").read_text())


def test_a_storm_that_harms_nobody(tmp_path: Path, stand_ins: None, capsys: pytest.CaptureFixture):
    status, report = run_chaos(tmp_path)
    assert report["problems"] == [] and status == 0
    said = capsys.readouterr().out
    assert "all is well" in said and "pace: " in said
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


def test_a_storm_in_which_requests_fail_fast_and_one_tree_is_not_used(
    tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Nobody's answer is wrong, nothing is held, and afterwards all is as before."""
    monkeypatch.setenv("FAKE_ROUTER", "fails")
    status, report = run_chaos(tmp_path)
    assert status == 1 and report["storm"]["ended"]["failed"] == 20
    assert all("while nothing was wrong" in p or "what was done explains" in p for p in report["problems"])
    monkeypatch.setenv("FAKE_ROUTER", "misses")
    status, report = run_chaos(tmp_path)
    assert status == 1 and "storm" not in report
    assert [p.partition(" held ")[0] for p in report["problems"]] == ["in calm: the tree of decode-1"]
    assert capsys.readouterr().out.count("FAILED: ") == 2


def test_answers_that_are_wrong_in_calm_too(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    """What the deployment itself says in calm is not the measure."""
    monkeypatch.setenv("FAKE_ROUTER", "lies")
    monkeypatch.setenv("FAKE_AFTER", "0")
    status, report = run_chaos(tmp_path)
    assert status == 1 and "storm" not in report
    assert report["problems"] and all("of one engine alone" in problem for problem in report["problems"])


def test_a_pace_that_is_lost(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace, "SLOW", 0.8)
    monkeypatch.setattr(pace, "MIDDLE", 0.9)
    # Whatever else this machine does.
    monkeypatch.setattr(pace, "OTHERS", 1.0)
    monkeypatch.setenv("FAKE_ROUTER", "slows")
    status, report = run_chaos(tmp_path)
    assert status == 1
    assert any(problem.startswith("the pace is lost: 0.") for problem in report["problems"]), report["problems"]


def test_a_worker_that_ends_by_itself(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_PREFILL", "dies")
    monkeypatch.setattr(chaos, "Shape", functools.partial(schedule.Shape, without=frozenset({"kill"})))
    status, report = run_chaos(tmp_path)
    assert status == 1
    assert any(f"prefill-{i} ended by itself: prefill-{i} exited with code 3" in p for p in report["problems"]
               for i in range(2))  # fmt: skip


def run_soak(tmp_path: Path, *more: str) -> tuple[int, dict]:
    arguments = ["--minutes", "0.1", "--every", "0.1", "--distinct", "12", "--clients", "2", "--model", "none"]
    arguments += ["--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "soak.json")]
    status = soak.main([*arguments, *more])
    return status, json.loads((tmp_path / "soak.json").read_text())


@pytest.mark.parametrize("leaks", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_short_soak(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch, leaks: bool):
    if leaks:
        monkeypatch.setenv("FAKE_DECODE", "leaks")
    # The stand-in for the router answers for two decode workers by turns.
    status, report = run_soak(tmp_path, "--plot", str(tmp_path / "plots"))
    assert status == int(leaks) and bool(report["problems"]) == leaks, report["problems"]
    assert {one["worker"] for one in report["samples"]} == {"prefill-0", "decode-0"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "soak-rss.svg", "soak-descriptors.svg", "soak-held.svg", "soak-rooms.svg"
    }  # fmt: skip
    # So short a run cannot say much, and says that.
    assert any("growth of memory" in what for what in report["not_judged"])
    assert soak.main(["--add", str(tmp_path / "soak.json")]) == int(leaks)


def test_a_soak_with_wrong_answers_and_lost_descriptors(
    tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(growth, "WARM", dict.fromkeys(growth.WARM, 5))
    monkeypatch.setenv("FAKE_ROUTER", "lies")
    monkeypatch.setenv("FAKE_AFTER", "20")
    monkeypatch.setenv("FAKE_PREFILL", "opens")
    status, report = run_soak(tmp_path)
    assert status == 1
    assert any("of one engine alone" in problem for problem in report["problems"])
    grown = [problem for problem in report["problems"] if "grow with the requests served" in problem]
    assert len(grown) == 1 and grown[0].startswith("prefill: descriptors"), report["problems"]
    assert "FAILED: " in capsys.readouterr().out


def test_a_report_of_another_version_is_not_added(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "old.json").write_text(json.dumps({"samples": [{"at_s": 1, "worker": "decode-0"}]}))
    assert soak.main(["--add", str(tmp_path / "old.json")]) == 1
    assert "run it again" in capsys.readouterr().err


def test_rooms_that_stay_are_said():
    def seen(grows: float) -> list[Sample]:
        return [Sample("decode-0", 1, t, float(t), 100, 50, 1000, 0, int(3 + grows * t)) for t in range(100)]

    assert soak.rooms_problems(seen(0.0)) == []
    (found,) = soak.rooms_problems(seen(1.0))
    assert found == "decode-0: rooms in its books grew from 40 to 90"
