"""The shared secret of a deployment: what is believed, and what is not, over ZMQ and HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import nixl_world
import pytest
import requests
import zmq
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import authentication, conn
from sglang.srt.disaggregation.common.authentication import (
    LATE_S,
    VARIABLE,
    WINDOW_S,
    Secret,
    SigningSocket,
    VerifyingSocket,
)
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE
from sglang.srt.disaggregation.peer_calls import Unanswered, tell
from test_peer_calls import TOLD_ROUTE
from waiting import until
from wire_ends import push

from sglang_pd_radix.tools.cluster import free_ports

KEY, OTHER = b"0123456789abcdef", b"0123456789abcdeg"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- signatures ----


@given(st.lists(st.binary(max_size=40), max_size=5), st.data())
def test_nothing_but_what_was_signed_is_believed(parts: list[bytes], data: st.DataObject) -> None:
    key = Secret(KEY)
    tag = key.sign(parts, "zmq tcp://a:1")
    key.verify(parts, "zmq tcp://a:1", tag)
    key = Secret(KEY)
    with pytest.raises(ValueError, match="another receiver"):
        key.verify(parts, "zmq tcp://b:1", tag)
    with pytest.raises(ValueError, match="another secret"):
        Secret(OTHER).verify(parts, "zmq tcp://a:1", tag)
    at = data.draw(st.integers(0, len(tag) - 1))
    with pytest.raises(ValueError):
        key.verify(parts, "zmq tcp://a:1", tag[:at] + bytes([tag[at] ^ 1]) + tag[at + 1 :])
    with pytest.raises(ValueError, match="not signed"):
        key.verify(parts, "zmq tcp://a:1", tag[:at])
    changed = data.draw(st.lists(st.binary(max_size=40), max_size=5).filter(lambda other: other != parts))
    with pytest.raises(ValueError, match="another message"):
        key.verify(changed, "zmq tcp://a:1", tag)


def test_a_message_passes_once_and_for_a_minute() -> None:
    clock = Clock()
    key = Secret(KEY, clock, clock)
    first, second = key.sign([b"1"], "x"), key.sign([b"1"], "x")
    key.verify([b"1"], "x", first)
    with pytest.raises(ValueError, match="has come before"):
        key.verify([b"1"], "x", first)
    clock.now += WINDOW_S + 1
    for tag in (first, second):
        with pytest.raises(ValueError, match="61 s ago"):
            key.verify([b"1"], "x", tag)
    ahead = Secret(KEY, lambda: clock.now + 2 * WINDOW_S).sign([b"1"], "x")
    with pytest.raises(ValueError, match="-120 s ago"):
        key.verify([b"1"], "x", ahead)


def test_a_message_that_waited_where_the_way_was_cut_is_believed_and_only_once() -> None:
    """Nor does one pass that an earlier process was sent, which this one cannot have noted."""
    clock = Clock()
    key = Secret(KEY, clock, clock)
    first, second = key.sign([b"1"], "x"), key.sign([b"1"], "x")
    key.verify([b"1"], "x", first, LATE_S)
    clock.now += LATE_S - 1
    key.verify([b"1"], "x", second, LATE_S)
    for tag in (first, second):
        with pytest.raises(ValueError, match="has come before"):
            key.verify([b"1"], "x", tag, LATE_S)
    restarted = Secret(KEY, clock, clock)
    with pytest.raises(ValueError, match="599 s ago"):
        restarted.verify([b"1"], "x", first, LATE_S)
    clock.now += 2
    with pytest.raises(ValueError, match="601 s ago"):
        key.verify([b"1"], "x", first, LATE_S)
    # Until it would pass no more, it is remembered.
    ahead = Secret(KEY, lambda: clock.now + WINDOW_S).sign([b"1"], "x")
    key.verify([b"1"], "x", ahead, LATE_S)
    clock.now += WINDOW_S + LATE_S
    with pytest.raises(ValueError, match="has come before"):
        key.verify([b"1"], "x", ahead, LATE_S)


def test_memory_is_that_of_eleven_minutes_of_good_messages() -> None:
    clock = Clock()
    key, stranger = Secret(KEY, clock, clock), Secret(OTHER, clock, clock)
    for _ in range(100):
        with pytest.raises(ValueError):
            key.verify([b"1"], "x", stranger.sign([b"1"], "x"))
    assert not key._used
    for _ in range(2000):
        clock.now += 1
        key.verify([b"1"], "x", key.sign([b"1"], "x"))
    assert len(key._used) <= WINDOW_S + LATE_S + 2


# ---- the file ----


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    authentication.secret.cache_clear()
    yield
    authentication.secret.cache_clear()


@pytest.fixture
def with_secret(no_secret: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Secret:
    path = tmp_path / "secret"
    path.write_bytes(KEY + b"\n")
    monkeypatch.setenv(VARIABLE, str(path))
    found = authentication.secret()
    assert found is not None
    return found


def test_without_a_file_nothing_is_signed(no_secret: None) -> None:
    assert authentication.secret() is None
    signing = conn.CommonKVManager._connect.__globals__["_signing"]
    assert signing("a socket", "tcp://a:1") == "a socket"


@pytest.mark.parametrize("content, told", [(b"short\n", "at least 16"), (None, "cannot be read")])
def test_a_file_without_a_secret_is_refused(no_secret, monkeypatch, tmp_path, content, told) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(ValueError, match=f"{VARIABLE}.*{told}"):
        authentication.secret()


# ---- ZMQ ----


def test_a_socket_gives_only_what_is_signed_for_it(caplog: pytest.LogCaptureFixture) -> None:
    context, endpoint = zmq.Context.instance(), f"tcp://127.0.0.1:{free_ports(1)[0]}"
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        pull.bind(endpoint)
        push.connect(endpoint)
        inbox = VerifyingSocket(pull, endpoint, Secret(KEY))
        good = SigningSocket(push, endpoint, Secret(KEY))
        tag = Secret(KEY).sign([b"again"], f"zmq {endpoint}")
        with caplog.at_level(logging.ERROR):
            push.send_multipart([b""])
            push.send_multipart([b"1", b"2"])
            SigningSocket(push, endpoint, Secret(OTHER)).send_multipart([b"1"])
            SigningSocket(push, "tcp://elsewhere:1", Secret(KEY)).send_multipart([b"1"])
            push.send_multipart([b"again", tag])
            push.send_multipart([b"again", tag])
            good.send_multipart([b"1", memoryview(b"2")], flags=zmq.NOBLOCK)
            assert inbox.recv_multipart() == [b"again"]
            assert inbox.recv_multipart() == [b"1", b"2"]
        told = [record.message for record in caplog.records]
        assert len(told) == 1 and VARIABLE in told[0], "a stranger does not fill the log"
        assert inbox.type == zmq.PULL, "everything else is the socket's own"
    finally:
        pull.close(0)
        push.close(0)


def test_what_a_socket_brings_late_is_read() -> None:
    """Its receiver stood still, or the way was cut, for longer than clocks may differ."""
    context, endpoint, clock = zmq.Context.instance(), f"tcp://127.0.0.1:{free_ports(1)[0]}", Clock()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        pull.bind(endpoint)
        push.connect(endpoint)
        key = Secret(KEY, clock, clock)
        SigningSocket(push, endpoint, key).send_multipart([b"the end"])
        clock.now += 5 * WINDOW_S
        assert pull.poll(5000)
        assert VerifyingSocket(pull, endpoint, key).recv_multipart(flags=zmq.NOBLOCK) == [b"the end"]
    finally:
        pull.close(0)
        push.close(0)


# ---- HTTP ----


@pytest.fixture
def bootstrap() -> Iterator[str]:
    """The address of a bootstrap server of our own."""
    (port,) = free_ports(1)
    server = conn.CommonKVBootstrapServer("127.0.0.1", port)
    until(lambda: _up(port), "the bootstrap server answers")
    yield f"http://127.0.0.1:{port}"
    loop = server._loop
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    server.close()


def _up(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
    except requests.RequestException:
        return False


REGISTRATION = {
    "attn_tp_size": 1,
    "attn_tp_rank": 0,
    "attn_cp_size": 1,
    "attn_cp_rank": 0,
    "attn_dp_size": 1,
    "attn_dp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "system_dp_size": 1,
    "system_dp_rank": 0,
    "rank_ip": "127.0.0.1",
    "rank_port": 5,
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "load_balance_method": "follow_bootstrap_room",
}
RANK = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"


def test_a_bootstrap_server_with_a_secret_serves_those_who_have_it(with_secret: Secret, bootstrap: str) -> None:
    stranger = requests.put(f"{bootstrap}/route", json={**REGISTRATION, "rank_port": 666}, timeout=30)
    assert stranger.status_code == 401 and VARIABLE in stranger.text
    signed = conn.requests
    assert signed.put(f"{bootstrap}/route", json=REGISTRATION, timeout=30).status_code == 200
    assert signed.get(f"{bootstrap}/route?{RANK}", timeout=30).json()["rank_port"] == 5
    assert signed.get(f"{bootstrap}{DECODE_PREFIX_ROUTE}", timeout=30).json()["version"] == 0
    assert signed.post(f"{bootstrap}/query_dp_ranks", json={"bootstrap_rooms": [1]}, timeout=30).json() == {}
    # An answer that is an error of aiohttp's own is signed as well.
    assert signed.get(f"{bootstrap}/nowhere", timeout=30).status_code == 404
    assert requests.get(f"{bootstrap}/route?{RANK}", timeout=30).status_code == 401
    assert requests.get(f"{bootstrap}/health", timeout=30).status_code == 200


def test_a_request_to_a_bootstrap_server_is_good_once_and_as_it_is(with_secret: Secret, bootstrap: str) -> None:
    sent = requests.Request("PUT", f"{bootstrap}/route", json=REGISTRATION, auth=authentication._Signed())
    with requests.Session() as session:
        prepared = session.prepare_request(sent)
        assert session.send(prepared).status_code == 200
        prepared.hooks["response"].clear()
        assert session.send(prepared).status_code == 401
        other = session.prepare_request(sent)
        other.hooks["response"].clear()
        other.body = other.body.replace(b'"rank_port": 5', b'"rank_port": 6')
        assert session.send(other).status_code == 401


def test_an_answer_without_the_secret_is_not_believed(no_secret, bootstrap, monkeypatch, tmp_path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(KEY)
    monkeypatch.setenv(VARIABLE, str(path))
    authentication.secret.cache_clear()
    with pytest.raises(requests.RequestException, match=VARIABLE):
        conn.requests.get(f"{bootstrap}{DECODE_PREFIX_ROUTE}", timeout=30)


def test_what_workers_tell_each_other_is_signed_and_so_are_the_answers(with_secret, bootstrap, monkeypatch) -> None:
    monkeypatch.setattr(peer_calls, "_listeners", {TOLD_ROUTE: lambda rooms: None})
    addr = bootstrap.removeprefix("http://")
    assert requests.post(f"{bootstrap}{TOLD_ROUTE}", json={"room": 5}, timeout=30).status_code == 401
    tell(addr, TOLD_ROUTE, [5]).result(30)


def test_a_worker_without_the_secret_is_not_told(no_secret, bootstrap, monkeypatch, tmp_path) -> None:
    """What it answers may be anybody's."""
    path = tmp_path / "secret"
    path.write_bytes(KEY)
    monkeypatch.setenv(VARIABLE, str(path))
    authentication.secret.cache_clear()
    monkeypatch.setattr(peer_calls, "AGAIN_S", 0.0)
    monkeypatch.setattr(peer_calls, "_listeners", {TOLD_ROUTE: lambda rooms: None})
    with pytest.raises(Unanswered, match=VARIABLE):
        tell(bootstrap.removeprefix("http://"), TOLD_ROUTE, [5]).result(30)


def test_a_body_that_cannot_be_read_is_a_bad_request(with_secret: Secret, bootstrap: str, caplog) -> None:
    for route in peer_calls.FIELDS:
        headers = {"Content-Encoding": "gzip"}
        reply = requests.post(f"{bootstrap}{route}", data=b'{"room": 5}', headers=headers, timeout=20)
        assert reply.status_code == 400 and "the body of the request cannot be read" in reply.text
    assert "Traceback" not in caplog.text


def test_a_request_over_the_wire_with_a_secret(with_secret: Secret, make_wire, backend: str) -> None:
    """What strangers say, to either worker, is read by nobody: decode would fail the room by this, prefill a room."""
    wire = make_wire()
    request = wire.request(7).bootstrap()
    for rank in (*wire.prefill, *wire.decode):
        push(rank).send_multipart([b"7", b"%d" % KVPoll.Failed, b"0"])
        if backend == "nixl":
            push(rank).send_multipart(nixl_world.message(nixl_world.BAD, "nobody"))
    told = wire.prefill[0].manager.server_socket
    while hasattr(told, "socket"):
        told = told.socket
    until(lambda: told._told_at > 0, "it has come, and been ignored")
    request.send().finish()
    request.assert_landed()
    assert not wire.prefill[0].manager.rooms.refused
