"""`pd-radix drain`: the gateway lets go of a worker, what it has ends, and then its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from test_top import POOL, Worker, workers

from sglang_pd_radix.tools import cli, drain
from sglang_pd_radix.tools.operate import reading
from sglang_pd_radix.tools.operate.reading import addresses


@pytest.fixture
def found(monkeypatch):
    """A gateway of which requests to let go are recorded in ``let_go``, a prefill and two decode workers."""
    monkeypatch.setattr(drain, "LOOK_S", 0.02)
    monkeypatch.setattr(drain, "QUIET_S", 0.2)
    with workers(4) as (gateway, *others):
        listed = [
            {
                "id": f"id-{n}",
                "url": f"http://{other.address}",
                "worker_type": role,
                "is_healthy": True,
                "status": "ready",
            }
            for n, (role, other) in enumerate(zip(("prefill", "decode", "decode"), others, strict=True))
        ]
        gateway.answers["/workers"], gateway.let_go = {"workers": listed}, []

        def let_go(path: str) -> int:
            gateway.let_go.append(path)
            worker = next(worker for worker in listed if path == f"/workers/{worker['id']}")
            worker |= {"status": "draining", "is_healthy": False}
            return 202

        gateway.on_delete = let_go
        for other in others:
            has(other, 0)
        yield gateway, *others


def has(worker: Worker, running: int, idle: bool | None = None) -> None:
    requests = {"running": running, "waiting": 0}
    worker.says("decode", POOL | {"requests": requests, "idle": not running if idle is None else idle})


def has_in_turn(worker: Worker, *answers: object, path: str = "/server_info") -> None:
    """Have it answer each question at ``path`` with the next of these, and then for ever with the last.

    At looks and not after seconds, which on a slow machine are over before the first look.
    """
    left = [*answers]
    worker.answers[path] = lambda: left.pop(0) if len(left) > 1 else left[0]


def running(worker: Worker, *counts: int) -> list[object]:
    """What `has` has it answer for each of these."""
    answers = []
    for count in counts:
        has(worker, count)
        answers.append(worker.answers["/server_info"])
    return answers


def drained(gateway: Worker, worker: Worker, *more: str) -> int:
    return cli.main(["drain", worker.address, "--gateway", gateway.address, *more])


def test_what_it_has_is_waited_for(found, capsys):
    gateway, _, worker, _ = found
    has_in_turn(worker, *running(worker, *[2] * 10, 0))
    began = time.monotonic()
    assert drained(gateway, worker) == 0
    assert time.monotonic() - began >= 10 * drain.LOOK_S + drain.QUIET_S
    assert gateway.let_go == ["/workers/id-1"]
    said = capsys.readouterr().err
    assert "has 2 running" in said and "has ended what it had" in said


def test_a_worker_that_takes_its_time_to_answer_is_waited_for(found, monkeypatch, capsys):
    """A long chunk, a kernel that is compiled: the gateway has let go by then, and the rest of the time is its own."""
    gateway, _, worker, _ = found
    monkeypatch.setattr(reading, "TIMEOUT_S", 1.0)
    (answer,), looks = running(worker, 0), []

    def answers() -> object:
        looks.append(time.monotonic())
        # Nobody waits for it by then.
        time.sleep(3 if len(looks) == 1 else 0)
        return answer

    worker.answers["/server_info"] = answers
    assert drained(gateway, worker) == 0
    assert gateway.let_go == ["/workers/id-1"]
    assert f"{worker.address} has not answered yet" in capsys.readouterr().err


def test_all_ranks_of_its_address_are_let_go_of(found, capsys):
    """With --dp-aware a gateway has each DP rank as a worker."""
    gateway, prefill, worker, other = found
    listed = gateway.answers["/workers"]["workers"]
    for one in listed:
        one["url"] += "@0"
    ranks = [{**one, "id": one["id"] + "-1", "url": one["url"][:-1] + "1"} for one in listed]
    listed += ranks
    # Its ranks are no other workers.
    assert drained(gateway, prefill) == 1
    assert "the last prefill worker" in capsys.readouterr().err and not gateway.let_go
    assert addresses([], gateway.address, None) == [f"http://{one.address}" for one in (prefill, worker, other)]
    assert drained(gateway, worker) == 0
    assert gateway.let_go == ["/workers/id-1", "/workers/id-1-1"]
    assert all(one["status"] == "draining" for one in listed if one["id"].startswith("id-1"))
    assert drained(gateway, other) == 1
    assert "the last decode worker" in capsys.readouterr().err


def test_what_comes_late_is_waited_for_too(found):
    gateway, _, worker, _ = found
    has_in_turn(worker, *running(worker, 0, *[1] * 10, 0))
    began = time.monotonic()
    assert drained(gateway, worker) == 0
    assert time.monotonic() - began >= 11 * drain.LOOK_S + drain.QUIET_S


@pytest.mark.parametrize("running", [1, 0])
def test_what_does_not_end_is_told(found, capsys, running):
    """Also where no queue has it: pages in quarantine are a prefill's to write to."""
    gateway, _, worker, _ = found
    has(worker, running, idle=False)
    assert drained(gateway, worker, "--timeout", "0.3") == 1
    said = capsys.readouterr().err
    assert ("still has 1 running" if running else "still has something") in said


def test_a_worker_that_has_fewer_figures(found, capsys):
    """One of an earlier version says whether it is idle; the engine alone, how many requests it has."""
    gateway, _, earlier, engine = found
    gateway.answers["/workers"]["workers"].append(
        {"id": "more", "url": "http://127.0.0.1:9", "worker_type": "decode", "is_healthy": True, "status": "ready"}
    )
    told = []
    for pool in ({"size": 100, "available": 50, "idle": False}, {"size": 100, "available": 100, "idle": True}):
        earlier.says("decode", pool)
        told.append(earlier.answers["/server_info"])
    has_in_turn(earlier, *told[:1] * 10, *told)
    began = time.monotonic()
    assert drained(gateway, earlier) == 0
    assert time.monotonic() - began >= 11 * drain.LOOK_S + drain.QUIET_S
    assert "has something that no queue has" in capsys.readouterr().err
    engine.says("decode", {}, {})
    assert drained(gateway, engine, "--timeout", "0.3") == 1
    assert "still has an unknown number of requests" in capsys.readouterr().err
    engine_has_some = [{"num_reqs": 2, "num_waiting_reqs": 1}, {"num_reqs": 1}]
    engine_has_none = [{"num_reqs": 0}, {"num_reqs": 0}]
    has_in_turn(engine, *[engine_has_some] * 10, engine_has_none, path="/get_load")
    engine_id = gateway.answers["/workers"]["workers"][2]
    engine_id |= {"status": "ready", "is_healthy": True}
    began = time.monotonic()
    assert drained(gateway, engine) == 0
    # A look takes two of these answers.
    assert time.monotonic() - began >= 5 * drain.LOOK_S + drain.QUIET_S
    assert "has 3 requests" in capsys.readouterr().err


def test_then_its_process_ends(found):
    gateway, _, worker, _ = found
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        has_in_turn(worker, *running(worker, 1, 1, 0))
        assert drained(gateway, worker, "--pid", str(process.pid)) == 0
        assert process.wait(timeout=60) == -15
    finally:
        process.kill()


def test_a_process_that_has_ended_by_itself_is_no_error():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    known = drain.check_pid(process.pid)
    process.kill()
    process.wait()
    drain.end(known, time.monotonic() + 5)


def test_the_last_of_its_kind_stays(found, capsys):
    gateway, prefill, first, second = found
    assert drained(gateway, prefill) == 1
    assert "the last prefill worker" in capsys.readouterr().err
    assert drained(gateway, first) == 0
    assert drained(gateway, second) == 1
    assert gateway.let_go == ["/workers/id-1"]


def test_a_worker_that_the_gateway_has_removed_before_is_waited_for(found, capsys):
    """As by smg's service discovery, once a pod is to end."""
    gateway, _, worker, _ = found
    gateway.answers["/workers"]["workers"] = [
        one for one in gateway.answers["/workers"]["workers"] if worker.address not in one["url"]
    ]
    assert drained(gateway, worker) == 0 and gateway.let_go == []
    assert "answers as a decode worker" in capsys.readouterr().err
    assert drained(gateway, worker, "--pid", str(os.getppid())) == 1
    assert "name it as the gateway does" in capsys.readouterr().err


def test_a_worker_that_nobody_knows_and_one_that_is_gone(found, capsys):
    gateway, _, worker, _ = found
    assert cli.main(["drain", "127.0.0.1:9", "--gateway", gateway.address]) == 1
    assert "knows no worker http://127.0.0.1:9" in capsys.readouterr().err
    gateway.answers["/workers"]["workers"].append(
        {"id": "gone", "url": "http://127.0.0.1:9", "worker_type": "decode", "is_healthy": False, "status": "ready"}
    )
    gateway.on_delete = lambda path: 500
    assert drained(gateway, worker) == 1
    assert "does not remove" in capsys.readouterr().err


def test_a_gateway_that_refuses_connections_is_told_of_at_once(monkeypatch, capsys):
    """Nothing was said for the 300 s of --timeout."""
    now, slept = [0.0], []
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: wait(s)))

    def wait(seconds: float) -> None:
        said = capsys.readouterr().err
        # At once, and once.
        assert ("http://127.0.0.1:9/workers does not answer: Connection refused; asked" in said) == (not slept)
        slept.append(seconds)
        now[0] += 100

    assert cli.main(["drain", "127.0.0.1:3", "--gateway", "127.0.0.1:9"]) == 1
    assert len(slept) == 4 and "does not answer: Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("pid", ["0", "-1", "1", "99999999999", str(2**22 + 1)])
def test_what_is_no_process_is_refused_before_anything_is_done(found, capsys, monkeypatch, pid):
    """0 is a group and -1 everybody."""
    ended = []
    monkeypatch.setattr(drain, "end", lambda *args: ended.append(args))
    gateway, _, worker, _ = found
    assert cli.main(["drain", worker.address, "--gateway", gateway.address, f"--pid={pid}"]) == 1
    assert f"--pid {pid}: " in capsys.readouterr().err and not gateway.let_go and not ended


def test_a_gateway_that_hangs_up_is_believed_by_its_list(found, capsys, monkeypatch):
    gateway, _, worker, other = found
    let_go = gateway.on_delete

    def hangs_up(path: str) -> int:
        let_go(path)
        raise ConnectionResetError

    gateway.on_delete = hangs_up
    monkeypatch.setattr(gateway.server, "handle_error", lambda *args: None)
    assert drained(gateway, worker) == 0
    monkeypatch.setattr(drain, "LET_GO_S", 0.3)
    gateway.answers["/workers"]["workers"].append(
        {"id": "more", "url": "http://127.0.0.1:9", "worker_type": "decode", "is_healthy": True, "status": "ready"}
    )
    gateway.on_delete = lambda path: int("no")
    assert drained(gateway, other) == 1
    said = capsys.readouterr().err
    assert "did not answer the request for removal" in said and "still uses it" in said and "Traceback" not in said


def test_a_gateway_that_asks_for_a_key_says_which(found, capsys):
    gateway, _, worker, _ = found
    gateway.on_delete = lambda path: 401
    assert drained(gateway, worker) == 1
    assert "does not remove" in (said := capsys.readouterr().err) and "SGLANG_PD_RADIX_API_KEY" in said


def test_something_else_that_answers_is_no_worker(found, capsys):
    """As the gateway itself, at an address that was mistyped."""
    gateway, prefill, _, _ = found
    assert drained(gateway, gateway) == 1
    assert f"knows no worker http://{gateway.address}" in capsys.readouterr().err
    gateway.answers["/workers"]["workers"].pop(0)
    prefill.says("null", POOL)
    assert drained(gateway, prefill) == 1
    assert f"knows no worker http://{prefill.address}" in capsys.readouterr().err


def test_a_gateway_of_another_kind(found, capsys):
    gateway, _, worker, _ = found
    for one in gateway.answers["/workers"]["workers"]:
        del one["id"]
    assert drained(gateway, worker) == 1
    assert "no id" in capsys.readouterr().err


def test_a_gateway_that_is_late_once_is_asked_again(found, monkeypatch):
    gateway, _, decode, _ = found
    monkeypatch.setattr(reading, "TIMEOUT_S", 0.3)
    listed, late = gateway.answers["/workers"], [0, 1.0, 0, 1.0]
    gateway.answers["/workers"] = lambda: time.sleep(late.pop() if late else 0) or listed
    assert cli.main(["drain", decode.address, "--gateway", gateway.address, "--timeout", "30"]) == 0
    assert gateway.let_go


def test_all_of_it_is_within_the_timeout(found, capsys):
    gateway, _, decode, _ = found
    gateway.on_delete = lambda path: 202
    began = time.monotonic()
    assert cli.main(["drain", decode.address, "--gateway", gateway.address, "--timeout", "1"]) == 1
    assert time.monotonic() - began < 20 and "still uses it after 1 s" in capsys.readouterr().err
