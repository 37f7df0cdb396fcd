"""`benchmark/faults`: what is done to a deployment, who asks it meanwhile, and the verdict. It starts no server."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import chaos
import pytest
from faults import books, judge
from faults.deploy import Fire
from faults.schedule import MANNERS, Event, Manner, Shape, events, manner
from faults.traffic import Ask, Clients, trace_asks
from test_fault_verdicts import told

from sglang_pd_radix.tools.cluster import Process


def first(seed: int, count: int, shape: Shape | None = None) -> list[Event]:
    return list(itertools.islice(events(seed, shape or Shape()), count))


# ---- the schedule ----


def test_a_seed_says_it_all():
    assert first(7, 200) == first(7, 200)
    assert first(7, 200) != first(8, 200)
    # The first of many are those of a short storm.
    assert first(7, 40) == first(7, 200)[:40]
    assert [manner(7, n) for n in range(100)] == [manner(7, n) for n in range(100)]
    assert [manner(7, n) for n in range(100)] != [manner(8, n) for n in range(100)]


def test_this_is_what_seed_1_says():
    """What is written down with a report can be done again, with another Python too."""
    assert [str(event) for event in first(1, 3)] == [
        "   3.4 s  kill prefill-1 for 2.5 s",
        "   5.8 s  weights in_place decode-0",
        "   8.8 s  pause retract decode-1 for 2.3 s",
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [Shape(), Shape(3, 1, link=False)])
def test_somebody_is_always_left_to_answer(seed: int, shape: Shape):
    until: dict[str, float] = {}
    dead_until, last = 0.0, 0.0
    for event in first(seed, 300, shape):
        assert event.at_s >= last
        last = event.at_s
        role = event.target.partition("-")[0]
        # Times are told to a tenth of a second.
        assert event.at_s >= until.get(event.target, 0.0) - 0.2
        until[event.target] = event.at_s + event.lasts_s + (shape.restart_s if event.kind == "kill" else 0.0)
        if event.kind in ("kill", "stop", "pause"):
            others = [w for w in shape.workers(role) if w != event.target]
            assert not others or all(until.get(role + "/out", 0.0) <= event.at_s + 0.2 for _ in others)
            until[role + "/out"] = until[event.target]
        if event.kind == "kill":
            assert event.at_s >= dead_until - 0.2
            dead_until = until[event.target]


def test_everything_comes_once_before_anything_comes_again():
    deck = Shape().deck()
    dealt = [(event.kind, event.target.partition("-")[0], event.detail) for event in first(3, 5 * len(deck))]
    for start in range(0, len(dealt), len(deck)):
        assert sorted(dealt[start : start + len(deck)]) == sorted(deck)
    kinds = {kind for kind, _, _ in deck}
    assert kinds == {"kill", "stop", "flush", "pause", "weights", "cut", "slow"}


@pytest.mark.parametrize("seed", range(8))
def test_every_worker_has_its_turn_of_everything(seed: int):
    """A worker that is never killed late in a storm is one of which nobody knows what it has kept by then."""
    storm = list(itertools.takewhile(lambda event: event.at_s < 764, events(seed, Shape())))
    for kind in ("kill", "stop", "flush", "pause", "weights"):
        times = {worker: [e.at_s for e in storm if (e.kind, e.target) == (kind, worker)]
                 for role in ("prefill", "decode") for worker in Shape().workers(role)}  # fmt: skip
        counts = [len(seen) for seen in times.values()]
        assert min(counts) >= 2 and all(abs(counts[i] - counts[i + 1]) <= 1 for i in (0, 2)), times
        assert min(seen[-1] for seen in times.values()) > 764 / 2, times


@pytest.mark.parametrize("seed", range(8))
def test_short_storms_kill_of_both_roles(seed: int):
    storm = list(itertools.takewhile(lambda event: event.at_s < 75, events(seed, Shape())))
    assert {event.target.partition("-")[0] for event in storm if event.kind == "kill"} == {"prefill", "decode"}


def test_what_cannot_be_had_is_left_out():
    assert not {event.kind for event in first(1, 100, Shape(link=False))} & {"cut", "slow"}
    assert "kill" not in {event.kind for event in first(1, 100, Shape(without=frozenset({"kill"})))}
    everything = frozenset(kind for kind, _, _ in Shape().deck())
    assert first(1, 3, Shape(without=everything)) == []


def test_every_kind_of_event_can_be_carried_out():
    assert all(hasattr(Fire, f"_{kind}") for kind, _, _ in Shape().deck())


def test_most_clients_behave():
    kinds = [manner(1, n).kind for n in range(2000)]
    for kind, parts in MANNERS.items():
        assert abs(kinds.count(kind) / 2000 - parts / 100) < 0.05
    assert all(m.after_s > 0 for n in range(2000) if (m := manner(1, n)).kind == "abort")


def test_the_schedule_can_be_asked_for_alone(capsys):
    assert chaos.main(["--schedule", "30", "--seed", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [str(e) for e in itertools.takewhile(lambda e: e.at_s < 30, events(1, Shape()))]


# ---- the clients ----


def answer(ids: list[int], reason: dict | None = None) -> dict:
    meta = {"finish_reason": reason or {"type": "length", "length": len(ids)}, "weight_version": "decode-7"}
    return {"output_ids": ids, "meta_info": {**meta, "cached_tokens_details": {"decode_prefix": 16}}}


# The tests of clients are over: those that are still answered need not wait any longer.
over = threading.Event()


class Server(http.server.BaseHTTPRequestHandler):
    """Answers a prompt of one token as that token says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (token,), count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids, status, reason = [token] * count, 200, None
        if token == 2:
            status = 500
        elif token == 3:
            reason = {"type": "abort", "message": "Aborted"}
        elif token == 4:
            reason = {"type": "abort", "message": "lost", "status_code": 500}
        elif token == 5:
            ids = ids[:-1]
        elif token == 6:
            over.wait(30)
        if not body["stream"]:
            self.reply(status, json.dumps(answer(ids, reason)).encode())
            return
        pieces = [answer(ids[: n + 1], reason) for n in range(len(ids))]
        if token == 7:
            pieces = [*pieces[:1], {"error": {"message": "lost"}}]
        lines = [b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces]
        if token != 8:
            lines.append(b"data: [DONE]\n\n")
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for line in lines:
                self.wfile.write(line)
                self.wfile.flush()
                if token == 9 and over.wait(30):
                    break
        self.close_connection = True

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    over.set()
    server.shutdown()


@pytest.mark.parametrize(
    "token, how, kind, said",
    [
        (1, "plain", "whole", ""),
        (1, "stream", "whole", ""),
        (1, "slow", "whole", ""),
        (2, "plain", "failed", "finish_reason"),
        (3, "plain", "aborted", "Aborted"),
        (3, "stream", "aborted", "Aborted"),
        (4, "stream", "failed", "lost"),
        (5, "plain", "failed", "3 of 4 tokens"),
        (6, "plain", "failed", "no word"),
        (6, "abort", "left", ""),
        (7, "stream", "failed", "lost"),
        (8, "stream", "failed", "ended in the middle"),
        (9, "abort", "left", ""),
    ],
)
def test_what_a_client_is_told(url: str, token: int, how: str, kind: str, said: str):
    # Who leaves in the middle of an answer has got its beginning by then.
    asked = Manner(how, after_s=2.0 if token == 9 else 0.1, nap_s=0.01 if how == "slow" else 0.0)
    give_up_s = 0.5 if said == "no word" else 60
    clients = Clients(url, [Ask((token,), 4)], 1, 1, lambda number: asked, give_up_s=give_up_s).start()
    assert clients.join(60)
    (told,) = clients.told
    assert told.ended_how == kind and said in told.error and told.took_s < 20
    assert told.error or kind != "failed"
    assert not told.error or kind in ("failed", "aborted")
    assert told.ids == ((token,) * 4 if kind == "whole" else None)
    assert told.status == (500 if token == 2 else 0 if token == 6 else 200)
    assert (told.worker, told.hit) == (("decode-7", 16) if kind == "whole" else (None, None))
    if how in ("stream", "slow") and kind == "whole":
        assert told.began_s < told.first_s < told.ended_s


def test_clients_take_turns_and_can_be_stopped(url: str):
    asks = [Ask((1,), 2), Ask((1,), 3), Ask((1,), 4)]
    clients = Clients(url, asks, 10, 3).start()
    assert clients.join(60) and not clients.busy
    assert sorted(told.number for told in clients.told) == list(range(10))
    assert all(told.ask == told.number % 3 and len(told.ids) == len(asks[told.ask].ids) + 1 + told.ask
               for told in clients.told)  # fmt: skip
    assert clients.rate > 0
    endless = Clients(url, asks, 10**6, 2).start()
    endless.stop()
    assert endless.join(60)


def test_nobody_there(url: str):
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        clients = Clients(f"http://127.0.0.1:{port.getsockname()[1]}", [Ask((1,), 2)], 1, 1).start()
        assert clients.join(60)
    assert clients.told[0].ended_how == "failed" and clients.told[0].status == 0


def test_the_trace_is_cut_to_what_fits():
    asks = trace_asks(None, 50, shrink=16, longest=256)
    assert len(asks) == 50 and asks == trace_asks(None, 50, shrink=16, longest=256)
    assert all(len(a.ids) + a.answer <= 256 and a.answer >= 2 for a in asks)
    # They share what the conversations of the trace share.
    assert len({a.ids[:32] for a in asks}) == 1


# ---- the books of the kernel ----


def test_what_the_kernel_says_of_a_process_group():
    script = (
        "import socket, threading, time\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "far = socket.create_connection(server.getsockname())\n"
        "near, _ = server.accept()\n"
        "near.close()\n"
        "pipes = [__import__('os').pipe() for _ in range(5)]\n"
        "[threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(3)]\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout.readline() == b"ready\n"
        process = Process("decode", "decode-0", "", Path(), command, {}, pid=child.pid)
        found = books.of_process(process)
        child.kill()
    assert found.name == "decode-0" and found.pid == child.pid
    assert found.threads == 4 and found.close_wait == 1
    # The three that every process has, two sockets and ten ends of pipes.
    assert found.descriptors == 15
    assert found.rss_kib > 1000
    assert books.of_process(process).threads == 0


# ---- the verdict ----

SOUND = {
    "idle": True, "size": 100, "available": 60, "evictable": 40, "protected": 0, "locks_taken": 5, "locks_released": 5,
    "free_req_slots": 8, "req_slots": 8, "free_metadata_buffers": 4, "metadata_buffers": 4, "audit": [],
    "rooms": {"live": 0, "request_status": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "limit", "wrong"), [((0.1, 0.3), 0.2, True), ((0.1, 0.2), 0.2, False), ((9.0,), None, False)]
)
def test_steps_that_wait_for_somebody(steps, limit, wrong):
    pools = [{"longest_queue_step_s": seconds} for seconds in steps]
    assert bool(judge.step_problems("decode-0", pools, limit)) == wrong


def test_what_a_worker_holds_at_rest():
    """As `test_workers.py` has it of a pool, of all ranks; and every worker here tells of its pools, and of rooms."""
    assert judge.held_at_rest("decode-0", [SOUND]) == []
    lost = judge.held_at_rest("decode-0", [SOUND, SOUND | {"available": 59, "dp_rank": 1}])
    assert lost == ["decode-0 rank 1: 1 tokens of KV are lost: neither free nor in the tree"]
    rooms = judge.held_at_rest("decode-0", [SOUND | {"rooms": {"live": 0, "request_status": 3}}])
    assert rooms == ["decode-0: 3 rooms are left in request_status"]
    # Prefill has neither an audit nor a count of locks.
    prefill = {k: v for k, v in SOUND.items() if k not in ("audit", "locks_taken", "locks_released")}
    assert judge.held_at_rest("prefill-0", [prefill]) == []
    assert judge.held_at_rest("decode-0", [prefill]) != []
    for name in ("decode-0", "prefill-1"):
        assert judge.held_at_rest(name, []) == [f"{name} does not report its KV pool"]


def test_who_is_told_too_late():
    slow = told(took=300, manner="slow", first_s=69.0)
    assert judge.late_problems([told(took=59), told("failed", took=59), slow], 60) == []
    assert len(judge.late_problems([told(took=61), told("failed", took=61), told("failed", error="no word")], 60)) == 3


def test_a_slow_reader_reads_slowly_from_its_first_token_on():
    (problem,) = judge.late_problems([told(took=300, manner="slow", first_s=10.0 + 118)], 60)
    assert problem == "client 1 (slow): no token for 118 s"
    # One that never had a token, and was told of its failure late.
    (problem,) = judge.late_problems([told("failed", took=90, manner="slow", error="boom")], 60)
    assert problem == "client 1 (slow): failed after 90 s: boom"


def test_what_a_process_keeps():
    before = books.Books("decode-0", 1, [], 50, 1000, 110, 0)
    after = dataclasses.replace(before, descriptors=120, threads=60)
    assert judge.process_problems(before, after, restarts=0) == []
    many = dataclasses.replace(before, descriptors=170, threads=90, close_wait=9)
    assert len(judge.process_problems(before, many, restarts=0)) == 3
    # Each peer that comes again may cost a few.
    assert len(judge.process_problems(before, many, restarts=8)) == 1


def test_the_summary_counts_alike_what_is_alike():
    failed = [told("failed", took=t, error=f"room {t} of 10.0.0.{t}:80{t}") for t in (1, 2, 70)]
    found = judge.summary([told(ids=(1,)), *failed])
    assert found["ended"] == {"failed": 3, "whole": 1} and found["failed_later_than_60_s"] == 1
    assert found["failed_after_s"]["max"] == 70 and list(found["errors"].values()) == [3]
