"""What workers tell each other over HTTP: past those that do not answer, again, and whatever is sent."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from prefill_front import bootstrap_server
from sglang.srt.disaggregation import peer_calls, room_notes
from sglang.srt.disaggregation.peer_calls import (
    FIELDS,
    NotNow,
    Unanswered,
    add_route,
    ask,
    listen,
    tell,
)
from sglang.srt.disaggregation.refusal import REFUSED_RANK_ROUTE, REFUSED_ROUTE
from waiting import until

# Of an extra, with rooms alone.
TOLD_ROUTE = "/told_room"
add_route(TOLD_ROUTE)

GOOD: dict[str, dict[str, Any]] = {
    route: {name: kind(1) for name, kind in fields.items()} for route, fields in FIELDS.items()
}


@pytest.fixture
def heard(monkeypatch) -> list[tuple]:
    """All that is heard by who listens."""
    monkeypatch.setattr(peer_calls, "_listeners", {})
    found: list[tuple] = []
    for route in FIELDS:
        listen(route, lambda rooms, route=route, **said: found.append((route, rooms, said)))
    return found


@pytest.fixture
def prefill(heard) -> Iterator[str]:
    """The address of a prefill that answers."""
    with bootstrap_server() as port:
        for route in FIELDS:
            listen(route, lambda rooms, route=route, **said: heard.append((route, rooms, said)))
        yield f"127.0.0.1:{port}"


@pytest.fixture
def black_holes(monkeypatch) -> Iterator[list[str]]:
    """The addresses of workers that accept connections and never answer."""
    monkeypatch.setattr(peer_calls, "ANSWER_S", 600.0)
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen(2000)
        yield [f"127.0.{i}.1:{silent.getsockname()[1]}" for i in range(100)]


def test_those_that_do_not_answer_hold_up_nothing_for_another(prefill, heard, black_holes):
    began = time.monotonic()
    silent = [
        call
        for room in range(1, 6)
        for addr in black_holes
        for call in (
            tell(addr, REFUSED_ROUTE, [room], reason="why"),
            tell(addr, TOLD_ROUTE, [room]),
            ask(addr, REFUSED_RANK_ROUTE, [room], dp_rank=1),
        )
    ]
    tell(prefill, REFUSED_ROUTE, [7, 8], reason="why").result(20)
    tell(prefill, TOLD_ROUTE, [9]).result(20)
    assert ask(prefill, REFUSED_RANK_ROUTE, [7], dp_rank=1).result(20) == (200, "OK")
    assert time.monotonic() - began < 15
    assert heard == [
        (REFUSED_ROUTE, [7, 8], {"reason": "why"}),
        (TOLD_ROUTE, [9], {}),
        (REFUSED_RANK_ROUTE, [7], {"dp_rank": 1}),
    ]
    assert not any(call.done() for call in silent) and all(call.cancel() for call in silent)


def test_one_that_does_not_answer_is_given_up(monkeypatch, black_holes, caplog):
    monkeypatch.setattr(peer_calls, "ANSWER_S", 0.2)
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.1)
    # Also those that wait for a connection.
    asked = [ask(black_holes[0], REFUSED_RANK_ROUTE, [5], dp_rank=1) for _ in range(4 * peer_calls.AT_ONCE)]
    for one in asked:
        with pytest.raises(Unanswered, match="no answer in 0.2 s"):
            one.result(20)
    with pytest.raises(Unanswered):
        tell(black_holes[0], REFUSED_ROUTE, [5, 6], reason="why").result(20)
    told = lambda: [one.getMessage() for one in caplog.records if one.name == peer_calls.__name__]  # noqa: E731
    until(told, "the log", timeout=5)
    (said,) = told()
    assert "was not informed of room 5 and 1 more (refused_room): no answer in 0.2 s" in said


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6(heard, host):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    from sglang.srt.disaggregation.refusal import tell_prefill

    with bootstrap_server("::1") as port:
        tell_prefill(host, port, [5], "why").result(20)
    assert heard == [(REFUSED_ROUTE, [5], {"reason": "why"})]


@pytest.fixture
def peer(monkeypatch) -> Iterator[Callable[..., tuple[str, list]]]:
    """Starts a worker that answers with these statuses, the last of them for good."""
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.1)
    servers = []

    def start(*statuses: int) -> tuple[str, list]:
        asked: list[Any] = []

        class Peer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                asked.append((self.headers.get("Cookie"), self.client_address))
                self.send_response(statuses[min(len(asked), len(statuses)) - 1])
                headers = {"Retry-After": "60", "Set-Cookie": "a=b", "Location": "/elsewhere", "Content-Length": "0"}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("statuses", "times", "taken"),
    [
        ([200], 1, True),
        ([500, 503, 200], 3, True),
        ([503], peer_calls.TRIES, False),
        # It is the bare engine.
        ([404], 1, True),
        # Nor would these be other answers the next time.
        ([400], 1, False),
        ([401], 1, False),
        ([302], 1, False),
    ],
)
def test_a_worker_is_told_until_it_has_heard(peer, caplog, statuses, times, taken):
    """Over one connection; requests name workers, and their answers have no other effect."""
    addr, asked = peer(*statuses)
    told = tell(addr, TOLD_ROUTE, [5])
    assert (told.exception(20) is None) == taken
    assert len(asked) == times and len(set(asked)) == 1 and asked[0][0] is None
    until(lambda: caplog.text.count("was not informed") == (not taken), "the log", timeout=5)


def test_a_worker_that_is_started_again_is_told(monkeypatch):
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.2)
    with socket.socket() as none:
        none.bind(("127.0.0.1", 0))
        addr = f"127.0.0.1:{none.getsockname()[1]}"
        told = tell(addr, TOLD_ROUTE, [5])
        time.sleep(0.1)
        port = none.getsockname()[1]
    with ThreadingHTTPServer(("127.0.0.1", port), type("Taken", (BaseHTTPRequestHandler,), {"do_POST": _take})) as back:
        threading.Thread(target=back.serve_forever, daemon=True).start()
        told.result(20)
        back.shutdown()


def _take(self: Any) -> None:
    self.send_response(200)
    self.send_header("Content-Length", "0")
    self.end_headers()


@pytest.mark.parametrize("addr", ["", "a b:1", "[:1", "x" * 70 + ".invalid:1", "127.0.0.1:99999", "a/b:1"])
def test_what_is_no_address_costs_one_line(monkeypatch, caplog, addr):
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.0)
    assert isinstance(tell(addr, TOLD_ROUTE, [5]).exception(20), Unanswered)
    # A loop of a test before it may be collected meanwhile, and say so.
    until(lambda: len([line for line in caplog.records if line.name != "asyncio"]) == 1, "the log", timeout=5)


def test_calls_are_bounded_and_go_on_where_a_thread_can_be_started(monkeypatch, prefill, black_holes, no_threads):
    monkeypatch.setattr(peer_calls, "_calls", peer_calls._Calls())
    with no_threads():
        assert isinstance(tell(prefill, TOLD_ROUTE, [5]).exception(0), Unanswered)
    tell(prefill, TOLD_ROUTE, [5]).result(20)
    monkeypatch.setattr(peer_calls, "MOST_WAITING", 3)
    waiting = [tell(black_holes[0], TOLD_ROUTE, [5]) for _ in range(3)]
    with pytest.raises(Unanswered, match="too many calls wait"):
        ask(prefill, REFUSED_RANK_ROUTE, [5], dp_rank=1).result(0)
    assert all(one.cancel() for one in waiting)
    assert ask(prefill, REFUSED_RANK_ROUTE, [5], dp_rank=1).result(20) == (200, "OK")


# ---- who is told ----


@pytest.mark.parametrize("route", GOOD)
def test_what_cannot_be_meant_is_refused_with_a_word(prefill, heard, route):
    url, good = f"http://{prefill}{route}", {"rooms": [5, 6], **GOOD[route]}
    none = [
        {**good, "rooms": rooms}
        for rooms in (5, [], [0], ["5"], [True], [7, 0], [2**63], None, [7] * (room_notes.MOST + 1))
    ]
    wrong = [{**good, name: value} for name, kind in FIELDS[route].items() for value in (None, [kind(1)], True)]
    for message in ([], None, "x", {}, GOOD[route], *none, *wrong):
        reply = requests.post(url, data=json.dumps(message), timeout=20)
        assert reply.status_code == 400 and reply.text.startswith(f"{route[1:]}: "), str(message)[:80]
    for body in (b"", b"{", b'{"rooms": [1e999]}', b"[" * 100_000):
        assert requests.post(url, data=body, timeout=20).status_code == 400
    assert heard == []
    # Versions before 0.1.0 say one room.
    for message, rooms in ((good, [5, 6]), ({"room": 5, **GOOD[route]}, [5])):
        assert requests.post(url, json={**message, "more": 1}, timeout=20).status_code == 200
        assert heard.pop() == (route, rooms, GOOD[route])


def test_a_text_can_be_said_to_the_client(prefill, heard):
    """JSON may hold half a character, which no answer over HTTP can."""
    tell(prefill, REFUSED_ROUTE, [5], reason="rid \ud800 \u00fc is in use" + "!" * 5000).result(20)
    ((_, _, said),) = heard
    assert said["reason"].startswith("rid ? \u00fc is in use!") and len(said["reason"]) == peer_calls.MOST_CHARACTERS


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), 400), (NotNow("no"), 503)])
def test_what_is_refused_by_who_listens(prefill, error, status):
    def refuse(rooms: list[int], dp_rank: int) -> None:
        raise error

    listen(REFUSED_RANK_ROUTE, refuse)
    assert ask(prefill, REFUSED_RANK_ROUTE, [5], dp_rank=1).result(20) == (status, "no")


def test_a_prefill_that_nobody_listens_at_is_starting(prefill, monkeypatch):
    monkeypatch.setattr(peer_calls, "_listeners", {})
    status, said = ask(prefill, REFUSED_RANK_ROUTE, [5], dp_rank=1).result(20)
    assert status == 503 and "starting" in said


def test_a_body_that_cannot_be_read_is_a_bad_request(caplog):
    with bootstrap_server() as port:
        for route in FIELDS:
            url, headers = f"http://127.0.0.1:{port}{route}", {"Content-Encoding": "gzip"}
            reply = requests.post(url, data=b'{"room": 5}', headers=headers, timeout=20)
            assert reply.status_code == 400 and "the body of the request cannot be read" in reply.text
    assert "Traceback" not in caplog.text


def test_a_loop_awaits_an_answer(prefill):
    async def wait() -> tuple[int, str]:
        return await asyncio.wrap_future(ask(prefill, REFUSED_RANK_ROUTE, [5], dp_rank=1))

    assert asyncio.run(wait()) == (200, "OK")


def test_names_that_dns_does_not_answer_hold_up_no_other(prefill, monkeypatch):
    over, look_up = threading.Event(), socket.getaddrinfo

    def looked_up(host: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name.startswith("silent"):
            over.wait(60)
            raise socket.gaierror("nobody knows it")
        return look_up("127.0.0.1" if name == "known" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    told = [tell(f"silent-{i}:1", TOLD_ROUTE, [5]) for i in range(100)]
    try:
        known = f"known:{prefill.rpartition(':')[2]}"
        assert ask(known, REFUSED_RANK_ROUTE, [5], dp_rank=1).result(30)[0] == 200
    finally:
        over.set()
        for one in told:
            one.cancel()
