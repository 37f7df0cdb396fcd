"""`benchmark/chaos.py` as a whole, on stand-ins for the servers: it finds what is wrong, and nothing else."""

from __future__ import annotations

import functools
import json
import os
import signal
import textwrap
import time
from pathlib import Path

import chaos
import pytest
from faults import blame, deploy, schedule

# Answers like a server of any role; what it says to a prompt follows from the prompt. FAKE_<ROLE> says what is wrong,
# comma-separated. The router answers by itself, for one decode worker after the other; it is wrong from FAKE_AFTER
# requests on, for FAKE_FOR.
SERVER = """
import http.server, json, os, socket, sys, threading, time, zlib
role, args = sys.argv[1], sys.argv[2:]
faults, count = os.environ.get("FAKE_" + role.upper(), "").split(","), 0
after, lasts = int(os.environ.get("FAKE_AFTER", 160)), int(os.environ.get("FAKE_FOR", 10**9))
trees, kept = [set(), set()], []
pool = {"idle": True, "size": 100, "available": 100, "evictable": 0, "protected": 0, "free_req_slots": 4,
        "req_slots": 4, "metadata_buffers": 8, "free_metadata_buffers": 8, "rooms": {"live": 0}}
if role == "decode":
    pool |= {"locks_taken": 3, "locks_released": 3, "audit": []}
if "leaks" in faults:
    pool["available"] = 84
if "stalls" in faults:
    pool["longest_queue_step_s"] = 9.0
if "opens" in faults:
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
        if "dies" in faults and self.path not in ("/generate", "/flush_cache", "/freeze_gc"):
            # At the first blow.
            os._exit(3)
        if "loses" in faults and self.path not in ("/generate", "/freeze_gc"):
            # At any blow, until a flush makes all anew.
            flushed = self.path.startswith("/flush_cache")
            pool.update(available=100 if flushed else 84, locks_taken=3 if flushed else 4)
        if self.path != "/generate":
            return self.answer({})
        count += 1
        at = count % 2
        wrong = after < count <= after + lasts
        if "fails" in faults and wrong:
            return self.answer({"error": "no"}, 500)
        prompt = body.get("input_ids") or []
        tokens = body["sampling_params"]["max_new_tokens"]
        first = zlib.crc32(json.dumps(prompt).encode()) % 1000
        ids = [first + i for i in range(tokens)]
        if "lies" in faults and wrong:
            ids[-1] += 1
        time.sleep(0.2 if "slows" in faults and wrong else 0.01)
        pages = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        held = 16 * len([page for page in pages if page in trees[at]])
        trees[at].update(pages)
        if "misses" in faults and at and wrong:
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
    monkeypatch.setattr(chaos, "SETTLE_S", 1.0)
    # What these do in no time is no measure of theirs.
    monkeypatch.setattr(chaos, "SLOW", 0.05)


def run_chaos(tmp_path: Path, *more: str) -> tuple[int, dict]:
    arguments = ["--one-host", "--seconds", "3.5", "--requests", "100000", "--distinct", "12", "--clients", "2"]
    arguments += ["--model", "none", "--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "report.json")]
    status = chaos.main([*arguments, *more])
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
    status, report = run_chaos(tmp_path, "--seconds", "1.5")
    assert status == 1
    found = "\n".join(report["problems"])
    assert "differs from token" in found
    assert all(f"decode-{i}: 16 tokens of KV are lost" in found for i in range(2)) and "prefill" not in found
    assert "WRONG: " in capsys.readouterr().out


@pytest.mark.thorough
def test_what_a_flush_makes_good_is_looked_at_before(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    """The replays after a storm flush every worker, and what the storm has lost was gone before anybody looked."""
    monkeypatch.setenv("FAKE_DECODE", "loses")
    status, report = run_chaos(tmp_path, "--seconds", "1", "--without", "kill,flush")
    found = [f"decode-{i}: {what}" for i in range(2) for what in ("16 tokens of KV are lost", "4 locks were taken")]
    assert status == 1 and len(report["problems"]) == len(found)
    assert all(
        problem.startswith(f"after the storm: {what}") for problem, what in zip(report["problems"], found, strict=True)
    )


@pytest.mark.thorough
def test_no_answer_goes_unjudged(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    """Nor does it that the gateway does not find its workers again."""
    judged: list[chaos.Clients] = []
    right = chaos.Run._right
    monkeypatch.setattr(chaos.Run, "_right", lambda run, clients: judged.append(clients) or right(run, clients))
    asked: list[chaos.Clients] = []
    replay = chaos._replay
    monkeypatch.setattr(chaos, "_replay", lambda *args, **more: asked.append(replay(*args, **more)) or asked[-1])
    monkeypatch.setattr(chaos, "wait_answered", lambda url, ask, seconds: False)
    status, report = run_chaos(tmp_path, "--seconds", "1")
    assert status == 1 and report["problems"] == ["after the storm the gateway does not answer eight times in a row"]
    assert len(asked) > 2 * chaos.REPLAYS and set(asked) < set(judged)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_was_found_is_written_when_it_is_ended(tmp_path: Path, stand_ins: None, monkeypatch, signum: int):
    def all_(self: chaos.Run) -> None:
        self.report["problems"].append("5 answers are wrong")
        os.kill(os.getpid(), signum)
        time.sleep(5)

    monkeypatch.setattr(chaos.Run, "all", all_)
    before = signal.getsignal(signum)
    status, report = run_chaos(tmp_path)
    ended = f"ended by signal {signum} before it was done"
    assert status == 1 and report["problems"] == ["5 answers are wrong", ended] and report["ended"] == ended
    assert signal.getsignal(signum) is before


@pytest.mark.thorough
def test_a_storm_in_which_requests_fail_fast_and_one_tree_is_not_used(
    tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Nobody's answer is wrong, nothing is held, and afterwards all is as before."""
    monkeypatch.setenv("FAKE_ROUTER", "fails")
    monkeypatch.setenv("FAKE_AFTER", str(CALM))
    monkeypatch.setenv("FAKE_FOR", "20")
    status, report = run_chaos(tmp_path)
    assert status == 1 and report["storm"]["ended"]["failed"] == 20
    assert all("while nothing was wrong" in p or "what was done explains" in p for p in report["problems"])
    monkeypatch.setenv("FAKE_ROUTER", "misses")
    monkeypatch.setenv("FAKE_AFTER", "0")
    monkeypatch.delenv("FAKE_FOR")
    status, report = run_chaos(tmp_path)
    assert status == 1 and "storm" not in report
    assert [p.partition(" held ")[0] for p in report["problems"]] == ["in calm: the tree of decode-1"]
    assert capsys.readouterr().out.count("FAILED: ") == 2


@pytest.mark.thorough
def test_answers_that_are_wrong_in_calm_too(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    """What the deployment itself says in calm is not the measure."""
    monkeypatch.setenv("FAKE_ROUTER", "lies")
    monkeypatch.setenv("FAKE_AFTER", "0")
    status, report = run_chaos(tmp_path)
    assert status == 1 and "storm" not in report
    assert report["problems"] and all("of one engine alone" in problem for problem in report["problems"])


# Requests before the storm: replays of 12 requests, three for the trees and those for the pace; and some to see who
# is up.
CALM = 12 * (3 + chaos.REPLAYS) + 10


@pytest.mark.thorough
def test_what_is_wrong_in_the_storm_alone_is_found(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    """Each by its own part of the verdict: what is right again in the calm after it was seen here or nowhere."""
    without = functools.partial(chaos.Shape, without=frozenset({"kill", "flush", "weights", "stop"}))
    monkeypatch.setattr(chaos, "Shape", lambda **options: without(link=False))
    for role, faults in (("ROUTER", "lies"), ("PREFILL", "opens"), ("DECODE", "stalls")):
        monkeypatch.setenv(f"FAKE_{role}", faults)
    monkeypatch.setenv("FAKE_AFTER", str(CALM))
    monkeypatch.setenv("FAKE_FOR", "150")
    status, report = run_chaos(tmp_path, "--longest-step", "1", "--requests", "200", "--seconds", "60")
    assert status == 1
    found = "\n".join(report["problems"])
    for part in (
        "differs from token",
        "decode-0: a step of its queues has taken 9.00 s",
        "prefill-0: ",
    ):
        assert part in found, part
    assert "descriptors more than before" in found
    assert "in calm" not in found and "after the storm" not in found


@pytest.mark.thorough
def test_words_that_come_late_and_what_is_not_undone(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    slow = functools.partial(chaos.Shape, out_s=(9.0, 9.0), without=frozenset({"kill", "flush", "weights", "pause"}))
    monkeypatch.setattr(chaos, "Shape", lambda **options: slow(link=False))
    monkeypatch.setattr(chaos, "UNDONE_S", 0.0)
    status, report = run_chaos(tmp_path, "--told-within", "0.005")
    assert status == 1
    found = "\n".join(report["problems"])
    assert "what was done to the workers is not undone after 0 s" in found
    assert "was told nothing within 0 s" in found or "whole after 0 s" in found


@pytest.mark.thorough
def test_requests_that_fail_in_calm(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_ROUTER", "fails")
    monkeypatch.setenv("FAKE_AFTER", "20")
    monkeypatch.setenv("FAKE_FOR", "5")
    status, report = run_chaos(tmp_path)
    assert status == 1 and "storm" not in report
    assert any(problem.startswith("5 requests failed in calm: 500") for problem in report["problems"])


@pytest.mark.thorough
def test_a_pace_that_is_lost(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chaos, "SLOW", 0.5)
    monkeypatch.setenv("FAKE_ROUTER", "slows")
    status, report = run_chaos(tmp_path)
    assert status == 1
    assert any(problem.startswith("the pace is lost: ") for problem in report["problems"]), report["problems"]


@pytest.mark.thorough
def test_a_worker_that_ends_by_itself(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_PREFILL", "dies")
    status, report = run_chaos(tmp_path, "--without", "kill")
    assert status == 1
    assert any(f"prefill-{i} ended by itself: prefill-{i} exited with code 3" in p for p in report["problems"]
               for i in range(2))  # fmt: skip
