"""How a prefill is told of the rooms that decode computes."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import requests
from sglang.srt.disaggregation import computed_rooms
from waiting import until


def test_a_prefill_is_told_of_each_room_until_it_has_heard(monkeypatch):
    """A connection that was being closed is made anew at once; what the prefill has not taken is told again later."""
    heard, refused, closing = [], [8], [9]

    def post(url: str, json: dict[str, int], timeout: float) -> Any:
        heard.append((url, json["room"]))
        if json["room"] in closing:
            closing.clear()
            raise requests.ConnectionError("closed")
        failed = json["room"] in refused and refused.remove(json["room"]) is None
        return SimpleNamespace(status_code=500 if failed else 200, text="")

    monkeypatch.setattr(computed_rooms, "_requests", SimpleNamespace(post=post))
    monkeypatch.setattr(computed_rooms, "AGAIN_S", 0.2)
    began = time.monotonic()
    for addr, room in (("a:1", 7), ("a:1", 8), ("b:1", 9)):
        computed_rooms.tell_prefill(addr, room)
    until(lambda: sum(url.startswith("http://b:1") for url, _ in heard) == 2, "it is told at once")
    assert time.monotonic() - began < 0.2
    until(lambda: len(heard) == 5, "it is told again")
    assert sorted(room for url, room in heard if url == "http://a:1/computed_room") == [7, 8, 8]


def test_an_answer_neither_holds_a_thread_nor_leaves_a_cookie():
    """Requests name peers, which may answer what they like."""
    asked = []

    class Peer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.headers.get("Cookie"))
            self.send_response(503)
            for name, value in (("Retry-After", "60"), ("Set-Cookie", "a=b"), ("Content-Length", "0")):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began = time.monotonic()
    try:
        addr = f"127.0.0.1:{server.server_port}"
        assert not computed_rooms._has_taken(addr, 5) and not computed_rooms._has_taken(addr, 5)
    finally:
        server.shutdown()
        server.server_close()
    assert asked == [None, None] and time.monotonic() - began < 5
