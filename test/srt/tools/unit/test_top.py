"""`pd-radix top`: what it reads of workers, in which order it shows them, and itself in a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from rich.console import Console, Group

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.operate import reading
from sglang_pd_radix.tools.operate.columns import COLUMNS, LEGEND, NAMES, ordered, size, summary
from sglang_pd_radix.tools.operate.reading import Look, Rank, Reader, addresses
from sglang_pd_radix.tools.operate.screen import view
from sglang_pd_radix.tools.operate.texts import printable

POOL = {"size": 1000, "available": 400, "evictable": 500, "protected": 100, "idle": False}


def oldest(rid: str, seconds: float) -> dict:
    return {
        "rid": rid, "state": "running", "seconds": seconds, "prompt_tokens": 9, "decode_prefix": 4, "output_tokens": 2,
    }  # fmt: skip


class Worker:
    """A worker's HTTP server, of which a test sets the answers by path; a function is called at each question."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        # Seconds that each answer takes.
        self.delay_s = 0.0
        # Without which it answers no GET but one after its health, and no DELETE.
        self.key: str | None = None
        self.on_delete: Callable[[str], int] = lambda path: 404
        self.on_post: Callable[[str, Any], int] = lambda path, body: 404
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                time.sleep(worker.delay_s)
                if self.path != "/health" and not self.has_key():
                    return
                answer = worker.answers.get(self.path)
                if callable(answer):
                    answer = answer()
                self.send_response(404 if answer is None else 200)
                self.end_headers()
                self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

            def has_key(self) -> bool:
                if not worker.key or self.headers["Authorization"] == f"Bearer {worker.key}":
                    return True
                self.send_response(401)
                self.end_headers()
                return False

            def do_DELETE(self):
                if not self.has_key():
                    return
                self.send_response(worker.on_delete(self.path))
                self.end_headers()

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(worker.on_post(self.path, json.loads(body)))
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def says(self, role: str, *pools: dict, metrics: str | None = None) -> None:
        self.answers["/server_info"] = {
            "disaggregation_mode": role,
            "disaggregation_decode_enable_radix_cache": role == "decode",
            "internal_states": [{"kv_pool": pool} for pool in pools],
        }
        self.answers["/metrics"] = metrics


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    found = [Worker() for _ in range(count)]
    try:
        yield found
    finally:
        for worker in found:
            worker.server.shutdown()
            worker.server.server_close()


def counted(held: int, prompt: int, rank: str = "") -> str:
    labels = f'model_name="m",engine_type="decode"{rank}'
    return (
        "# TYPE sglang:decode_prefix_hit_tokens counter\n"
        f"sglang:decode_prefix_hit_tokens_total{{{labels}}} {held}\n"
        "# TYPE sglang:decode_prompt_tokens counter\n"
        f"sglang:decode_prompt_tokens_total{{{labels}}} {prompt}\n"
        "# TYPE sglang:kv_transfer_failures counter\n"
        f'sglang:kv_transfer_failures_total{{{labels},cause="timeout"}} 2\n'
        f'sglang:kv_transfer_failures_total{{{labels},cause="digest"}} 1\n'
    )


def test_what_is_read_of_workers():
    with workers(3) as (prefill, decode, ranks):
        prefill.says("prefill", POOL | {"requests": {"waiting": 2, "running": 1}, "oldest": [oldest("a", 3.0)]})
        decode.says(
            "decode",
            POOL | {"requests": {"running": 4, "transfer": 2}, "oldest": [oldest("b", 7.0)]},
            metrics=counted(25, 100),
        )
        requests = [{"running": 1}, {"running": 5}]
        metrics = counted(10, 20, ',dp_rank="0"') + counted(1, 20, ',dp_rank="1"')
        ranks.says("decode", *(POOL | {"requests": each} for each in requests), metrics=metrics)
        reader = Reader(addresses([prefill.address, decode.address, ranks.address, "127.0.0.1:9"], None, None))
        look = reader.look()
        decode.says("decode", POOL | {"requests": {"running": 4}}, metrics=counted(55, 140))
        again = reader.look()
        decode.says("decode", POOL | {"requests": {"running": 4}}, metrics=counted(5, 10))
        restarted = reader.look()
    first, second, zero, one, gone = look.ranks
    assert [rank.role for rank in look.ranks] == ["prefill", "decode", "decode", "decode", "?"]
    assert [rank.name for rank in (zero, one)] == [f"{ranks.address}/0", f"{ranks.address}/1"]
    assert (first.queued, second.queued, zero.queued) == (2, 2, 0)
    assert (first.held_part, second.held_part, zero.held_part, one.held_part) == (None, 0.25, 0.5, 0.05)
    assert second.counters["failures"] == 3 and second.flag and not first.flag
    assert gone.error == "does not answer"
    assert [(each["rid"], each["worker"]) for each in look.oldest] == [("b", decode.address), ("a", prefill.address)]
    # From the second look on, what happened between the two.
    assert look.ranks[1].rates == {} and again.ranks[1].held_part == pytest.approx(30 / 40)
    # One that has begun anew has no rates yet.
    assert restarted.ranks[1].rates == {} and restarted.ranks[1].held_part == 0.5
    total = look.as_dict()["total"]
    assert total["requests"]["decode"] == {"running": 10, "transfer": 2} and total["unreachable"] == ["127.0.0.1:9"]
    assert "10 running, 2 not yet" in summary(look) and "127.0.0.1:9" in summary(look)


def test_the_first_line_counts_a_failed_pair_once_for_each_of_its_workers():
    """And does not wait for what has failed and been answered."""
    prefill = Rank("p", "prefill", requests={"running": 0}, counters={"failures": 1.0})
    decode = Rank("d", "decode", flag=True, requests={"waiting": 2, "quarantined": 1}, counters={"failures": 1.0})
    said = summary(Look(0, [decode, prefill], [])).split(" | ")
    assert "0 running, 2 not yet, 1 in quarantine" in said and "failed: 1 on prefill, 1 on decode" in said
    # Without metrics nobody knows.
    said = summary(Look(0, [Rank("p", "prefill"), Rank("d", "decode", requests={"running": 1})], [])).split(" | ")
    assert "1 running, 0 not yet" in said and "failed: –" in said


def test_dp_ranks_are_those_that_they_say_they_are():
    """They are told in the order in which they answered. One of an older version does not say it."""
    held = {"0": 1, "1": 2, "2": 3}
    metrics = "".join(counted(held[rank], 10, f',dp_rank="{rank}"') for rank in held)
    with workers(2) as (worker, older):
        told = [{"requests": {"running": rank}, "oldest": [oldest(f"r{rank}", 1.0)]} for rank in range(3)]
        worker.says("decode", *(POOL | told[rank] | {"dp_rank": rank} for rank in (1, 2, 0)), metrics=metrics)
        older.says("decode", *(POOL | {"requests": {"running": n}} for n in (7, 8)))
        look = Reader([f"http://{worker.address}", f"http://{older.address}"]).look()
    assert [rank.name for rank in look.ranks] == [
        *(f"{worker.address}/{n}" for n in range(3)),
        *(f"{older.address}/{n}" for n in range(2)),
    ]
    assert [rank.requests["running"] for rank in look.ranks] == [0, 1, 2, 7, 8]
    assert [rank.held_part for rank in look.ranks[:3]] == [0.1, 0.2, 0.3]
    of_rank = {each["rid"]: each["worker"][-2:] for each in look.oldest}
    assert of_rank == {"r0": "/0", "r1": "/1", "r2": "/2"}


def test_a_worker_without_this_package_is_named():
    with workers(1) as (worker,):
        worker.says("decode", {})
        (rank,) = Reader([f"http://{worker.address}"]).look().ranks
    assert "without this package" in rank.error


def test_where_the_workers_are_from(tmp_path):
    with workers(1) as (gateway,):
        gateway.answers["/workers"] = {"workers": [{"url": "http://10.0.0.1:1/"}, {"url": "http://10.0.0.2:2"}]}
        assert addresses(["10.0.0.2:2"], gateway.address, None) == ["http://10.0.0.2:2", "http://10.0.0.1:1"]
        gateway.answers["/workers"] = {"error": "no"}
        with pytest.raises(PdRadixError, match="names no workers"):
            addresses([], gateway.address, None)
    file = tmp_path / "up.json"
    roles = ("router", "prefill", "decode")
    file.write_text(json.dumps({"processes": [{"role": role, "url": f"http://{role}"} for role in roles]}))
    assert addresses([], None, str(file)) == ["http://prefill", "http://decode"]
    file.write_text("[]")
    with pytest.raises(PdRadixError, match="is no file of"):
        addresses([], None, str(file))
    with pytest.raises(PdRadixError, match="--gateway URL"):
        addresses([], None, None)
    with workers(1) as (gateway,):
        gateway.answers["/workers"] = {"workers": []}
        with pytest.raises(PdRadixError, match="has no workers"):
            addresses([], gateway.address, None)


@pytest.mark.parametrize("address", ["::1:30000", "grpc://h:1", "http://", "h:70000", "a b:1", ""])
def test_what_cannot_be_asked_is_refused(address):
    with pytest.raises(PdRadixError, match="give HOST:PORT"):
        addresses([address], None, None)


@pytest.mark.parametrize(
    "address", ["h", "localhost:30000", "10.0.0.1:1", "[::1]:30000", "https://user:word@h.example/behind/"]
)
def test_what_can_be_asked(address):
    assert addresses([address], None, None) == [(address if "//" in address else f"http://{address}").rstrip("/")]


@pytest.mark.parametrize(
    "says",
    [
        *("<html>log in</html>", "null", "[" * 100_000, [], [{"a": 1}], {}, {"internal_states": [None]}),
        *({"internal_states": []}, {"disaggregation_mode": ["x"], "internal_states": [{}]}),
    ],
)
def test_something_else_at_an_address_costs_the_others_nothing(says):
    """A proxy, say. It is not taken for a worker that has nothing, either."""
    with workers(2) as (worker, other):
        worker.says("decode", POOL, metrics="<html>log in</html>")
        other.answers["/server_info"] = says
        look = Reader([f"http://{worker.address}", f"http://{other.address}"]).look()
    first, second = look.ranks
    assert first.pool and not first.counters and summary(look)
    assert second.error.startswith("HTTP 200") and not second.idle


@pytest.mark.parametrize(
    "odd",
    [
        {"oldest": [{"rid": "x", "seconds": None}]},
        {"oldest": [{"rid": "x", "seconds": "3"}]},
        {"oldest": [{"rid": "x", "seconds": math.nan}]},
        {"oldest": {}},
        {"requests": None},
        {"requests": ["running"]},
        {"requests": {"running": None}},
        {"size": "10"},
        {"available": 10**400},
        {"audit": 3},
        {"idle": None},
        {"dp_rank": "0"},
    ],
)
def test_an_odd_figure_is_an_error_of_its_worker_alone(odd):
    with workers(2) as (worker, other):
        worker.says("decode", POOL | {"requests": {"running": 1}, "oldest": [oldest("a", 1.0)]})
        other.says("decode", POOL | {"requests": {"running": 1}} | odd)
        look = Reader([f"http://{worker.address}", f"http://{other.address}"]).look()
    first, second = look.ranks
    assert not first.error and second.error.startswith(f"HTTP 200: {next(iter(odd))} is ") and len(look.oldest) == 1
    assert json.dumps(look.as_dict()) and summary(look) and [c.shown(r) for c in COLUMNS.values() for r in look.ranks]


def test_prompts_are_counted_and_none_was_held_yet():
    rank = Rank("w:1", "decode", counters={"prompt_tokens": 5.0})
    assert rank.held_part == 0 and "0% of prompts held" in summary(Look(0.0, [rank], []))


def test_no_rate_is_of_the_time_before_a_restart():
    """It was away in between, and counts past what it had counted then."""
    with workers(1) as (worker,):
        reader = Reader([f"http://{worker.address}"])
        worker.says("decode", POOL | {"requests": {}}, metrics=counted(900, 1000))
        reader.look()
        (before,) = reader.look().ranks
        worker.answers.clear()
        assert reader.look().ranks[0].error
        worker.says("decode", POOL | {"requests": {}}, metrics=counted(950, 5000))
        (rank,) = reader.look().ranks
    assert before.rates and rank.rates == {} and rank.held_part == 0.19


ESCAPES = "A\x1b]0;owned\x07\x9b31m\nB\u202e\ud800"


def test_what_a_terminal_would_obey_is_shown_instead():
    assert printable("é – 日本 a\\b") == "é – 日本 a\\b"
    assert printable(ESCAPES) == r"A\x1b]0;owned\x07\x9b31m\nB\u202e\ud800" and printable(ESCAPES).encode()
    with workers(1) as (worker,):
        worker.answers["/server_info"] = worker.answers["/workers"] = "busy \x1b[2J\n"
        (rank,) = Reader([f"http://{worker.address}"]).look().ranks
        assert rank.error == r"HTTP 200: busy \x1b[2J\n"
        with pytest.raises(PdRadixError) as refused:
            addresses([], worker.address, None)
        assert str(refused.value).isprintable()
        worker.answers["/workers"] = {"workers": [{"url": "http://h:1\x1b[2J"}]}
        assert all(url.isprintable() for url in addresses([], worker.address, None))
    assert summary(Look(0.0, [Rank("w\x1b[2J:1", error="no")], [])).isprintable()


def test_what_cannot_be_shown_is_refused(capsys, monkeypatch):
    assert cli.main(["top", "127.0.0.1:9", "--json", "--interval", "nan"]) == 1
    assert "--interval is nan" in capsys.readouterr().err
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor != 1)
    assert cli.main(["top", "127.0.0.1:9"]) == 1
    assert "needs a terminal" in (said := capsys.readouterr().err) and "--json" in said


def test_one_shot_json(capsys):
    with workers(1) as (worker,):
        worker.says("decode", POOL | {"requests": {"running": 4}}, metrics=counted(25, 100))
        assert cli.main(["top", worker.address, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["workers"][0]["held_part"] == 0.25 and told["total"]["counters"]["failures"] == 3
        assert cli.main(["top", worker.address, "127.0.0.1:9", "--json"]) == 1
    assert cli.main(["top", "127.0.0.1:9", "--interval", "0"]) == 1


def ranks_of(**by_name: int) -> list[Rank]:
    return [
        Rank(name, "decode", requests={"running": n, "waiting": 10 - n}, counters={"failures": n % 3})
        for name, n in by_name.items()
    ]


def test_the_order():
    ranks = ranks_of(c=1, a=9, b=5)

    def names(column: str) -> str:
        return "".join(rank.name for rank in ordered(ranks, column))

    assert (names("worker"), names("running"), names("waiting")) == ("abc", "abc", "cba")
    assert names("failures") == "bca", "equals by name"
    assert all(sorted(names(column)) == ["a", "b", "c"] for column in COLUMNS) and set(NAMES) <= set(COLUMNS)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0, "0"), (999, "999"), (1500, "1.5k"), (250_000, "250k"), (3e9, "3.0G")]
)
def test_sizes(value, shown):
    assert size(value) == shown


def test_what_is_in_a_long_step_is_busy_and_not_gone(monkeypatch):
    """Its HTTP server answers, its scheduler does not."""
    monkeypatch.setattr(reading, "TIMEOUT_S", 0.3)
    step = Event()
    with workers(2) as (prefill, hung):
        prefill.says("prefill", POOL | {"requests": {"running": 1}})
        told = prefill.answers["/server_info"]
        reader = Reader([f"http://{prefill.address}", f"http://{hung.address}"])
        reader.look()
        prefill.answers |= {"/server_info": lambda: step.wait(20) and told, "/model_info": {"model_path": "m"}}
        hung.answers["/server_info"] = lambda: step.wait(20) and told
        busy, gone = reader.look().ranks
        time.sleep(0.1)
        longer, _ = reader.look().ranks
        assert (busy.error, busy.role, busy.unheard) == ("", "prefill", True) and gone.error == "does not answer"
        assert 0.3 <= busy.in_step_s < longer.in_step_s
        assert re.fullmatch(r"busy \d+ s", COLUMNS["status"].shown(longer))
        look = Look(0.0, [longer, gone], [])
        assert look.as_dict()["total"]["unreachable"] == [hung.address] and "2 ranks" in summary(look)
        step.set()
        prefill.answers["/server_info"] = told
        again, _ = reader.look().ranks
    assert again.in_step_s is None and again.requests == {"running": 1} and not again.unheard


@pytest.mark.parametrize("address", ["127.0.0.1:9", "localhost:9", "http://localhost:9"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_where_nothing_listens_one_line_says_so_at_once(monkeypatch, capsys, address, options):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    began = time.monotonic()
    for words in ([address], ["--gateway", address]):
        assert cli.main(["top", *words, *options]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("pd-radix: nothing listens at http://") and "start it, or correct its address" in line
    assert time.monotonic() - began < 4


def shown(look: Look, sort: str = "worker", width: int = 160) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    # As in a `Live`: a text alone would be joined with others and wrapped.
    console.print(Group(view(look, sort)))
    return console.file.getvalue().splitlines()


def test_the_screen():
    # Of a request of an older version less is told.
    oldest_two = [oldest("r1", 4.0) | {"worker": "a"}, {"rid": ESCAPES, "seconds": 1.0}]
    lines = shown(Look(0.0, ranks_of(c=1, a=9, b=5), oldest_two), "waiting")
    rows = [line.split() for line in lines]
    assert rows[2][:5] == ["worker", "role", "status", "run", "wait▼"]
    assert [row[:5] for row in rows[3:6]] == [
        [name, "decode", "busy", *n] for name, n in (("c", "19"), ("b", "55"), ("a", "91"))
    ]
    assert rows[8] == ["r1", "a", "running", "4.0", "9", "4", "2"]
    assert rows[9] == [printable(ESCAPES), "–", "–", "1.0", "–", "–", "–"]
    assert "15 running" in lines[0] and lines[-4:] == LEGEND.splitlines()


def test_a_terminal_of_80_columns_shows_the_status_and_the_legend():
    lines = shown(Look(0.0, [Rank("192.168.100.100:30000", "decode", flag=True, in_step_s=3600.0)], []), width=80)
    assert max(map(len, lines)) <= 80 and "busy 3600 s" in lines[3] and lines[-4:] == LEGEND.splitlines()
    assert all(column.title in LEGEND for column in COLUMNS.values() if column.title not in ("worker", "role"))


@pytest.mark.parametrize(("end", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (b"\x03", 0)])
def test_what_ends_it_gives_the_terminal_back(end, code):
    ours, theirs = pty.openpty()
    # What starts these tests may ignore them, as `nohup` and `&` in a script do, and so would the view.
    code_of_view = """import fcntl, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from sglang_pd_radix.tools import cli
sys.exit(cli.main(["top", sys.argv[1], "--interval", "0.2"]))"""
    worker = Worker()
    command = [sys.executable, "-c", code_of_view, worker.address]
    env = os.environ | {"TERM": "xterm-256color"}
    view = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    written, asked, until = b"", False, time.monotonic() + 60
    # Not `select.select`: other tests of this process hold more descriptors than that takes.
    readable = select.poll()
    readable.register(ours, select.POLLIN)
    try:
        while time.monotonic() < until:
            if readable.poll(100):
                try:
                    written += os.read(ours, 65536)
                except OSError:
                    # Its end is closed.
                    break
            if not asked and b"1 ranks |" in written:
                asked = True
                os.write(ours, end) if isinstance(end, bytes) else view.send_signal(end)
        assert view.wait(30) == code
    finally:
        view.kill()
        view.wait()
        os.close(ours)
        worker.server.shutdown()
        worker.server.server_close()
    assert written.rfind(b"\x1b[?1049l") > written.rfind(b"\x1b[?1049h") >= 0
