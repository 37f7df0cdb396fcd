"""`faults.turns`: conversations of a storm, under keys of their own, and what is counted of reads. No engine."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import chaos
import pytest
from faults import deploy, turns
from faults.traffic import Ask, Clients

PAGE = """# TYPE sglang:prefill_reads_total counter
sglang:prefill_reads_total{tp_rank="0",outcome="read"} 5
sglang:prefill_reads_total{tp_rank="0",outcome="gone"} 2
# TYPE sglang:prefill_read_tokens_total counter
sglang:prefill_read_tokens_total 700
"""


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with the length of the prompt, again and again, and keeps what it was asked; it counts, as a prefill."""

    asked: list[tuple[dict, str | None]]

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers["X-SMG-Routing-Key"]))
        ids = [len(body["input_ids"])] * body["sampling_params"]["max_new_tokens"]
        self.reply({"output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}}})

    def do_GET(self) -> None:
        self.reply(self.server.page)

    def reply(self, said: object) -> None:
        content = (said if isinstance(said, str) else json.dumps(said)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.page = [], PAGE
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_each_turn_goes_on_from_the_answer_before_it(server, monkeypatch, tmp_path):
    engine = SimpleNamespace(router_url=server.url)
    monkeypatch.setattr(deploy, "engine_alone", lambda *_, **__: nullcontext(engine))
    asks, right = turns.of_engine_alone("model", 3, 4, 2, tmp_path, ())
    assert len(asks) == 12 and [ask.conversation for ask in asks] == [0, 1, 2] * 4
    new = []
    for place, ask in enumerate(asks):
        assert right.answers[place] == (len(ask.ids),) * ask.answer
        if place >= 3:
            said = (*asks[place - 3].ids, *right.answers[place - 3])
            assert ask.ids[: len(said)] == said
            new.append(len(ask.ids) - len(said))
    # Short, long, short: the long one is what prefill is asked for, and what decode has computed lies before it.
    assert new == [24] * 3 + [160] * 3 + [24] * 3
    # No two begin alike.
    assert len({ask.ids[:16] for ask in asks}) == 3


def test_clients_say_which_conversation_and_which_round(server):
    asks = [Ask((1,), 1, 7), Ask((1, 2), 1, 8), Ask((1, 2, 3), 1)]
    clients = Clients(server.url, asks, 6, 1, key=lambda number: turns.key(number, 3)).start()
    assert clients.join(30)
    said = [(body.get("extra_key"), key) for body, key in server.asked]
    first, second = "round 0", "round 1"
    assert said == [
        *((first, f"7 {first}"), (first, f"8 {first}"), (first, None)),
        *((second, f"7 {second}"), (second, f"8 {second}"), (second, None)),
    ]
    assert [told.key for told in clients.told] == [first] * 3 + [second] * 3
    # Without rounds as before: no key, no header.
    Clients(server.url, [Ask((1,), 1)], 1, 1).start().join(30)
    assert "extra_key" not in server.asked[-1][0] and server.asked[-1][1] is None


def test_counters_are_summed_over_lives(server):
    worker = SimpleNamespace(name="prefill-0", url=server.url, pid=1)
    counted = turns.Counted()
    counted.look(worker)
    before = counted.sums()
    server.page = PAGE.replace('"read"} 5', '"read"} 9')
    counted.look(worker)
    # It is killed, and started again; between two looks it was not there.
    worker.url, url = "http://127.0.0.1:9", worker.url
    counted.look(worker)
    worker.pid, worker.url = 2, url
    server.page = PAGE.replace('"read"} 5', '"read"} 30').replace("700", "4000")
    counted.look(worker)
    found = counted.since(before)
    assert found["sglang:prefill_reads_total read"] == 4 + 30 and found["sglang:prefill_reads_total gone"] == 2
    said = turns.told(found)
    assert "34 read" in said and "2 gone" in said and "4000 tokens" in said
    assert turns.not_judged(found, True) == []
    assert turns.read("<html>no metrics") == {}


def test_a_storm_that_was_to_read_and_did_not_says_so():
    (said,) = turns.not_judged({"sglang:prefill_reads_total read": 3.0}, True)
    assert "3 reads" in said and str(turns.ENOUGH) in said
    assert turns.not_judged({}, False) == []


def test_turns_and_a_trace_are_not_both_asked(capsys):
    assert chaos.main(["--turns", "3", "--trace", "x", "--one-host", "--model", "none"]) == 1
    assert "give one of them" in capsys.readouterr().out
