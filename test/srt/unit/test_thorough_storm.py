"""The storm of `pd-radix verify --thorough` against a small HTTP server: what it does, and what it finds."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from sglang_pd_radix.tools.thorough import storm


class Server(ThreadingHTTPServer):
    # All clients come at once.
    request_queue_size = 128
    daemon_threads = True


class Deployment:
    """A prefill and a decode worker behind one port. wrong: what goes wrong, once something was done to a worker; or
    what was done, by which KV is lost until the next thing is done."""

    def __init__(self, wrong: str | tuple[str, str] = "") -> None:
        self.wrong, self.done, self.away, self.held = wrong, [], "", set()
        deployment = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                deployment.reply(self, *deployment.answer(self.path, body))

            def do_GET(self) -> None:
                deployment.reply(self, 200, {"internal_states": [{"kv_pool": deployment.pool()}]})

            def log_message(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.server.server_port}"
        self.processes = [
            SimpleNamespace(role=role, name=f"{role}-0", url=f"{url}/{role}", bootstrap_port=1)
            for role in ("prefill", "decode", "router")
        ]

    @staticmethod
    def reply(handler: BaseHTTPRequestHandler, status: int, document: object) -> None:
        content = json.dumps(document).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        if path.endswith("/flush_cache"):
            self.done.append(("flush", path.split("/")[1]))
            return 200, {}
        ids = body["input_ids"]
        if "logprob_start_len" in body:
            if self.away == "prefill-0":
                return 503, {"error": "away"}
            start = body["logprob_start_len"]
            right = self.tokens(ids[: start + 1])
            as_likely = -0.1 if self.wrong == "ties" else -5.0
            own = [[-0.1 if a == b else as_likely, b] for a, b in zip(right, ids[start + 1 :], strict=True)]
            top = [[[-0.1, token]] for token in right]
            return 200, {"meta_info": {"input_token_logprobs": [[0, 0], *own], "input_top_logprobs": [None, *top]}}
        away = self.away
        time.sleep(0.3 if self.wrong == "slow" else 0.02)
        if path.startswith("/prefill"):
            return 200, {}
        if away:
            return (503, {"error": "away"}) if self.wrong != "hides the kill" else (200, self.whole(ids))
        if self.wrong == "fails" and any(what == "stop" for what, _ in self.done):
            return 500, {"error": "by itself"}
        return 200, self.whole(ids)

    def whole(self, ids: list[int]) -> dict:
        tokens = self.tokens(ids)
        if self.wrong == "ties" and self.done and self.done[-1] == ("start", "decode-0"):
            tokens[7] += 1
        if self.wrong == "stale" and any(what == "kill" for what, _ in self.done):
            tokens[7] += 1
        held = 256 if tuple(ids) in self.held and self.wrong != "forgets" else 0
        self.held.add(tuple(ids))
        return {"output_ids": tokens, "meta_info": {"cached_tokens_details": {"decode_prefix": held}}}

    @staticmethod
    def tokens(ids: list[int]) -> list[int]:
        return [(sum(ids) + i) % 1000 for i in range(storm.ANSWER)]

    def pool(self) -> dict:
        lost = 16 if self.wrong == "leaks" or self.done[-1:] == [self.wrong] else 0
        figures = {"size": 64, "available": 64 - lost, "evictable": 0, "protected": 0, "idle": True, "audit": []}
        same = ("req_slots", "free_req_slots", "metadata_buffers", "free_metadata_buffers")
        return {**figures, **dict.fromkeys((*same, "locks_taken", "locks_released"), 8)}

    # -- of a cluster

    log_dir = "logs"

    def check(self) -> None:
        assert not self.away

    def pause(self, names) -> None:
        self.done.append(("stop", *names))

    def resume(self, names) -> None:
        self.done.append(("go on", *names))

    def kill(self, name: str) -> None:
        self.away = name
        self.done.append(("kill", name))

    def dead(self):
        return next((process for process in self.processes if process.name == self.away), None)

    def restart(self, name: str) -> None:
        assert name == self.away
        self.away = ""
        self.done.append(("start", name))


def thrown(monkeypatch, wrong: str | tuple[str, str] = "", seconds: float = 1000.0) -> tuple[Deployment, storm.Report]:
    monkeypatch.setattr(storm, "STOPPED_S", 0.05)
    monkeypatch.setattr(storm, "AROUND_S", 0.05)
    monkeypatch.setattr(storm, "MET_S", 1.0)
    monkeypatch.setattr(storm, "SETTLED_S", 0.5)
    deployment, report = Deployment(wrong), storm.Report()
    try:
        storm.Storm(deployment, report).all(seconds, most_turns=1)
    finally:
        deployment.server.shutdown()
    return deployment, report


def test_everything_is_done_once_and_compared(monkeypatch):
    deployment, report = thrown(monkeypatch)
    assert report.problems == [] and report.not_judged == []
    faults = [f"{what} {role}" for what in ("flush", "stop", "kill") for role in ("decode", "prefill")]
    assert {round.what for round in report.rounds} >= {"calm", "again", "flush decode", "stop prefill"}
    assert [fault for fault in deployment.done if fault[0] in ("kill", "start")][:4] == [
        ("kill", "decode-0"),
        ("start", "decode-0"),
        ("kill", "prefill-0"),
        ("start", "prefill-0"),
    ]
    rounds = {round.what: round for round in report.rounds}
    assert rounds.keys() == {"calm", "again", *faults, *(f"after: {fault}" for fault in faults)}
    assert rounds["kill decode"].failed and not rounds["after: kill decode"].failed
    assert rounds["calm"].held == 0 and rounds["again"].held == 12 * 256


def test_a_kill_meets_a_request_on_a_slow_host(monkeypatch):
    """What was under way is answered all the same, and the next one is asked later than what is done lasts."""
    _, report = thrown(monkeypatch, "slow")
    assert report.problems == [] and report.not_judged == []
    rounds = {round.what: round for round in report.rounds}
    assert rounds["kill decode"].failed and rounds["kill prefill"].failed


def test_what_may_be_as_likely_is_scored_once_prefill_is_back(monkeypatch):
    deployment, report = thrown(monkeypatch, "ties")
    assert report.problems == [] and ("start", "prefill-0") in deployment.done
    assert {round.what: round for round in report.rounds}["kill prefill"].tied


@pytest.mark.parametrize("error", [KeyboardInterrupt, subprocess.TimeoutExpired("kill", 1)])
def test_clients_end_however_a_fault_does(monkeypatch, error):
    class Clients(storm.Storm):
        def _ask(self, number):
            time.sleep(0.01)
            return storm.Told(number, (1,), "", 0.01)

    def fault():
        raise error

    monkeypatch.setattr(storm, "AROUND_S", 0.05)
    left: list[BaseException] = []

    def thrown_in() -> None:
        try:
            Clients(SimpleNamespace(), storm.Report())._under("kill decode", fault, True)
        except BaseException as found:
            left.append(found)

    thread = threading.Thread(target=thrown_in, daemon=True)
    # Others, of tests before this one, may end meanwhile.
    before = set(threading.enumerate())
    thread.start()
    thread.join(60)
    assert left and set(threading.enumerate()) <= before


def test_a_worker_that_is_stopped_goes_on_when_the_storm_is_interrupted(monkeypatch):
    deployment = Deployment()

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    faults = {what: fault for what, fault, _ in storm.Storm(deployment, storm.Report())._faults()}
    monkeypatch.setattr(storm, "time", SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        faults["stop decode"]()
    deployment.server.shutdown()
    assert deployment.done == [("stop", "decode-0"), ("go on", "decode-0")]


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("stale", "answers are wrong"),
        ("fails", "requests failed, and nothing explains it"),
        ("forgets", "decode held nothing of prompts that it has had"),
        ("leaks", "16 tokens of KV are lost"),
    ],
)
def test_what_is_wrong_is_found(monkeypatch, wrong, told):
    _, report = thrown(monkeypatch, wrong)
    assert any(told in problem for problem in report.problems), report


@pytest.mark.parametrize(
    ("by", "when"),
    [(("flush", "decode"), "again"), (("go on", "decode-0"), "after: stop decode")],
    ids=["calm", "storm"],
)
def test_what_a_worker_lost_is_seen_before_its_pools_are_made_anew(monkeypatch, by, when):
    """By a flush, or where it is started again: the storm looked at them at its end alone."""
    _, report = thrown(monkeypatch, by)
    lost = "16 tokens of KV are lost: neither free nor in the tree"
    assert report.problems == [f"{when}: {role}-0: {lost}" for role in ("prefill", "decode")]


def test_a_worker_has_time_to_let_go(monkeypatch):
    """Of who asked a worker that is gone, by the time-outs of `storm.ENV`."""
    looks: list[str] = []
    idle_pools = storm.idle_pools

    def later(url: str) -> list[dict]:
        looks.append(url)
        return [pool | {"available": pool["available"] - (len(looks) % 2)} for pool in idle_pools(url)]

    monkeypatch.setattr(storm, "idle_pools", later)
    assert thrown(monkeypatch)[1].problems == []


def test_no_reader_finds_half_a_result(monkeypatch, tmp_path):
    """The file of an earlier run is replaced, not written into."""
    before, result = tmp_path / "before", tmp_path / "storm.json"
    before.write_text("all of it")
    result.hardlink_to(before)
    monkeypatch.setattr(storm, "Cluster", lambda *args, **more: contextlib.nullcontext())
    monkeypatch.setattr(storm, "Storm", lambda cluster, report: SimpleNamespace(all=lambda seconds: None))
    assert storm.main(["--model", "m", "--seconds", "1", "--json", str(result), "--log-dir", str(tmp_path)]) == 0
    assert before.read_text() == "all of it" and json.loads(result.read_text())["problems"] == []


def test_what_was_not_done_is_not_judged(monkeypatch):
    _, report = thrown(monkeypatch, seconds=0.0)
    assert report.problems == [] and len(report.not_judged) == 6
    assert "kill decode: it met no request" in thrown(monkeypatch, "hides the kill")[1].not_judged
