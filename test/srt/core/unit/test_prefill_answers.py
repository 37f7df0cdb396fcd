"""What decode makes of a prefill's answer to whether it understands a decode prefix: a real answer over HTTP."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefill_front import bootstrap_server, peers_of
from sglang.srt.disaggregation.common import conn, prefill_peers
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks, capabilities
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, NotTrusted, PrefillPeers, parse_capabilities
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE, DECODE_PREFIX_VERSION
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer
from sglang.srt.disaggregation.nixl.conn import NixlKVBootstrapServer


def ask(status: int, body: Any) -> tuple[int | None, list[Capabilities]]:
    """The version that decode takes the prefill to have, and what it has noted of it after that."""

    class Bootstrap(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == DECODE_PREFIX_ROUTE
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status if found else 500)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Bootstrap)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = SimpleNamespace(speculative_algorithm=None)
    peers = peers_of(server_args=own)
    try:
        return peers.ask_for_prefix(f"127.0.0.1:{server.server_port}"), list(peers.capabilities.values())
    finally:
        server.shutdown()
        server.server_close()


def test_what_prefill_says_for_extras_is_noted():
    assert parse_capabilities({"version": DECODE_PREFIX_VERSION, "tea": 3}).others["tea"] == 3
    assert "tea" not in parse_capabilities({"version": DECODE_PREFIX_VERSION, "tea": 0}).others
    assert not parse_capabilities({"version": 0, "tea": 1}).others


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"no such route"), (200, {"version": 0}), (200, {"version": DECODE_PREFIX_VERSION + 1})]
)
def test_a_prefill_that_does_not_is_sent_none(status, body):
    """The bare engine, one that has it switched off, and one of a later release."""
    version, [found] = ask(status, body)
    assert version is not None and version != DECODE_PREFIX_VERSION
    assert not found.takes_prefix


def answer_of(cp_size: int) -> dict[str, int | str]:
    """What a prefill of this process says of itself."""
    return capabilities(DECODE_PREFIX_VERSION, cp_size, RegisteredRanks().timeouts())


def test_one_that_is_starting_has_not_answered():
    """What it says is kept for as long as it is there, and before its ranks have registered it knows of nothing."""
    assert ask(503, b"no rank of this prefill has registered yet") == (None, [])
    assert answer_of(1)["version"] == DECODE_PREFIX_VERSION


class Ranks:
    """The TP ranks of a prefill, which register with its bootstrap server as the engine has them."""

    def __init__(self, port: int, count: int) -> None:
        self.port, self.count = port, count

    def register(self, rank: int, bare: bool = False) -> None:
        """bare: by the engine's own function, which says nothing of ours."""
        sizes = {"attn_tp_size": self.count, "attn_cp_size": 1, "attn_dp_size": 1, "pp_size": 1, "system_dp_size": 1}
        places = {"attn_tp_rank": rank, "attn_cp_rank": 0, "attn_dp_rank": 0, "pp_rank": 0, "system_dp_rank": 0}
        own = {"local_ip": "127.0.0.1", "rank_port": 1 + rank, "kv_args": SimpleNamespace(page_size=1)}
        server = {"dist_init_addr": None, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        own["server_args"] = SimpleNamespace(kv_cache_dtype="auto", load_balance_method="auto")
        with pytest.MonkeyPatch.context() as patch:
            if bare:
                patch.setattr(conn, "requests", requests)
            conn.CommonKVManager.register_to_bootstrap(SimpleNamespace(**sizes, **places, **own, **server))

    def answer(self) -> tuple[int, int | None]:
        """The status, and the version that the front says."""
        reply = requests.get(f"http://127.0.0.1:{self.port}{DECODE_PREFIX_ROUTE}", timeout=30)
        return reply.status_code, reply.json()["version"] if reply.ok else None

    def route(self) -> int:
        """The status of the engine's own first question."""
        ranks = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        url = f"http://127.0.0.1:{self.port}/route"
        return requests.get(url, params=dict.fromkeys(ranks, "-1"), timeout=30).status_code


_fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
RANK = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"


def test_whatever_is_asked_of_a_bootstrap_server_it_goes_on():
    """Without a secret everybody is heard; what cannot be meant has no effect."""
    with bootstrap_server() as port:
        bootstrap = f"http://127.0.0.1:{port}"
        Ranks(port, 1).register(0)
        paths = [
            "/route",
            f"/route?{RANK}",
            "/route?prefill_dp_rank=x",
            "/register_dp_rank",
            "/query_dp_ranks",
            "/health",
        ]

        @_fuzz
        @given(
            st.sampled_from(["GET", "PUT", "POST", "DELETE", "PATCH", "X"]),
            st.sampled_from([*paths, DECODE_PREFIX_ROUTE, "/health", "/", "/route/../health", "/%00"]),
            st.binary(max_size=64)
            | _json.map(lambda value: json.dumps(value).encode())
            | st.builds(lambda n: b"[" * n, st.integers(1, 5000)),
        )
        def throw(method: str, path: str, body: bytes) -> None:
            reply = requests.request(method, bootstrap + path, data=body, timeout=30)
            assert reply.status_code in (200, 400, 404, 405, 500)

        throw()
        assert requests.put(f"{bootstrap}/route", data=b"x" * (4 << 20), timeout=30).status_code in (413, 500)
        assert requests.get(f"{bootstrap}/route?{RANK}", timeout=30).json()["rank_port"] == 1


@pytest.mark.parametrize("server", [MooncakeKVBootstrapServer, NixlKVBootstrapServer])
def test_a_front_speaks_for_its_ranks_once_all_have_come(server):
    with bootstrap_server(server=server) as port:
        ranks = Ranks(port, 2)
        assert ranks.answer() == (503, None)
        ranks.register(0)
        assert ranks.answer() == (503, None)
        ranks.register(1)
        assert ranks.answer() == (200, DECODE_PREFIX_VERSION)


def test_a_front_waits_for_all_ranks_however_often_one_comes():
    """The engine counts registrations: one that had come twice stood for one that was still to come, and be bare."""
    with bootstrap_server(server=NixlKVBootstrapServer) as port:
        ranks = Ranks(port, 2)
        ranks.register(0)
        ranks.register(0)
        assert ranks.answer() == (503, None)
        ranks.register(1)
        assert ranks.answer() == (200, DECODE_PREFIX_VERSION)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("bare", [0, 1])
def test_a_prefill_of_which_a_rank_is_the_bare_engine_serves_nothing(monkeypatch, caplog, first, bare):
    """Its ranks waited for each other for ever at the first failed request: the bare one does not say what it knows."""
    last = 1 - first
    with bootstrap_server(server=NixlKVBootstrapServer) as port:
        ranks = Ranks(port, 2)
        ranks.register(first, bare=first == bare)
        ranks.register(last, bare=last == bare)
        assert ranks.answer() == (503, None) and ranks.route() == 503
        why = f"Rank DP0 CP0 TP{last} PP0 at 127.0.0.1:{1 + last} is not taken into this prefill"
        assert requests.get(f"http://127.0.0.1:{port}{DECODE_PREFIX_ROUTE}", timeout=30).text.startswith(why)
        # The front's, and that of the rank, which is the engine's and has it in its text.
        told = [record.getMessage() for record in caplog.records if why in record.getMessage()]
        assert len(told) == 2 and "409" in told[1]
        # Its process is started again with the package as the other one has it.
        ranks.register(last, bare=first == bare)
        assert ranks.answer() == (200, 0 if first == bare else DECODE_PREFIX_VERSION) and ranks.route() == 200


def test_a_prefill_that_is_complete_serves_on_after_a_stray_registration():
    """As of a second prefill at the same port. Decode workers that came later would not have used it any more."""
    with bootstrap_server(server=NixlKVBootstrapServer) as port:
        ranks = Ranks(port, 2)
        for rank in (0, 1):
            ranks.register(rank)
        ranks.register(0, bare=True)
        assert ranks.answer() == (200, 1) and ranks.route() == 200


def test_bare_ranks_alone_serve_and_take_no_prefix(caplog):
    """Each would write the start of the prompt to where its end belongs, and say that it went well."""
    with bootstrap_server(server=NixlKVBootstrapServer) as port:
        ranks = Ranks(port, 2)
        for rank in (0, 1):
            ranks.register(rank, bare=True)
        assert ranks.answer() == (200, 0) and ranks.route() == 200
        told = [one.getMessage() for one in caplog.records if "takes no decode prefix" in one.getMessage()]
        assert "DP0 CP0 TP0 PP0 at 127.0.0.1:1 " in told[0] and "DP0 CP0 TP1 PP0 at 127.0.0.1:2 " in told[1]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("bare", [False, True])
def test_a_front_says_the_time_outs_of_its_ranks(monkeypatch, first, bare):
    """Each has those of its node; the front said its own, and decode gave pages away that a rank still wrote to."""
    with bootstrap_server(server=NixlKVBootstrapServer) as port:
        ranks = Ranks(port, 2)
        for rank in (first, 1 - first):
            for name, seconds in {"WAITING": (30, 300), "BOOTSTRAP": (40, 20)}.items():
                monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{name}_TIMEOUT", str(seconds[rank]))
            ranks.register(rank, bare)
        for name, seconds in {"WAITING": 70, "BOOTSTRAP": 80}.items():
            monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{name}_TIMEOUT", str(seconds))
        answer = requests.get(f"http://127.0.0.1:{port}{DECODE_PREFIX_ROUTE}", timeout=30).json()
        # Ranks that do not say have those of the front, as far as is known.
        assert (answer["waiting_timeout"], answer["bootstrap_timeout"]) == ((70, 80) if bare else (300, 20))


def test_another_secret_is_said_at_once():
    with pytest.raises(NotTrusted, match="not our secret"):
        ask(401, b"not our secret")


@pytest.mark.parametrize(("status", "body"), [(500, b"oops"), (402, b"?"), (200, b"no json"), (200, {}), (200, [])])
def test_an_answer_that_says_nothing_is_asked_for_again(status, body):
    version, found = ask(status, body)
    assert version is None and not found


@pytest.mark.parametrize("named", ["waiting_timeout", "bootstrap_timeout"])
def test_a_prefill_says_for_how_long_it_waits(monkeypatch, named):
    monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{named.upper()}", "30")
    answer = answer_of(1)
    assert answer[named] == 30
    for said, taken in ((30, 30), (None, 0), ("30", 0), (True, 0), (-1, 0), (1.5, 0), ([], 0)):
        assert getattr(ask(200, answer | {named: said})[1][0], named) == taken
    del answer[named]
    assert getattr(ask(200, answer)[1][0], named) == 0


@pytest.mark.parametrize("on_prefill", [False, True])
def test_one_whose_context_parallel_ranks_send_otherwise_is_of_no_use(monkeypatch, on_prefill):
    """No request was served: decode asked one rank of those that all wait, or waited for ranks that send nothing."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", str(int(on_prefill)))
    answer = answer_of(2)
    alone = answer_of(1)
    assert ask(200, answer)[0] == (0 if on_prefill else DECODE_PREFIX_VERSION)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", str(int(not on_prefill)))
    with pytest.raises(ValueError, match="Give both the same SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"):
        ask(200, answer)
    # Without context parallelism, or where it does not say, as before.
    assert ask(200, alone)[0] == DECODE_PREFIX_VERSION
    assert ask(404, b"no such route")[0] == 0


def hold(held: list, work: Any) -> Future:
    """Have the test do ``work`` when it likes."""
    future: Future = Future()
    held.append(lambda: future.set_result(work()))
    return future


def test_a_prefill_is_asked_once_at_a_time_and_not_again_at_once(monkeypatch):
    """Each request that waits for it has it asked in each step."""
    asked = []
    monkeypatch.setattr(prefill_peers, "in_background", lambda work, name: hold(asked, work))
    monkeypatch.setattr(PrefillPeers, "ask_for_prefix", lambda peers, addr: None)
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(prefill_peers, "time", clock)
    peers = peers_of()
    for _ in range(3):
        peers.query("127.0.0.1:1")
    # It is still being asked when it might be asked again.
    clock.now += prefill_peers.ASK_AGAIN_S
    peers.query("127.0.0.1:1")
    assert len(asked) == 1
    # An answer that comes late lets it be asked at once; one that comes soon does not.
    asked.pop()()
    peers.query("127.0.0.1:1")
    asked.pop()()
    peers.query("127.0.0.1:1")
    assert not asked


class Strangers:
    """Prefills whose addresses requests bring, asked by a decode worker on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = SimpleNamespace(monotonic=lambda: self.clock.now, now=1000.0)
        self.answers: set[str] = set()
        self.shakes: set[str] = set()
        self.asked: list[str] = []
        # Questions that are under way.
        self.held: list[Any] = []
        self.holds: set[str] = set()
        monkeypatch.setattr(prefill_peers, "time", self.clock)
        monkeypatch.setattr(prefill_peers, "MOST_ASKED", 8)
        monkeypatch.setattr(prefill_peers, "in_background", self._ask)
        monkeypatch.setattr(PrefillPeers, "ask_for_prefix", self._answer)
        self.peers = peers_of(query_prefill=self._shake)

    def _ask(self, work: Any, name: str) -> Future:
        future = hold(self.held, work)
        if self.asking not in self.holds:
            self.held.pop()()
        return future

    def _answer(self, addr: str) -> int | None:
        self.asked.append(addr)
        if addr in self.answers:
            self.peers.capabilities[addr] = Capabilities(version=DECODE_PREFIX_VERSION)
            return DECODE_PREFIX_VERSION
        if addr.endswith("5"):
            raise ValueError("unusable")
        return None

    def _shake(self, addr: str) -> bool:
        return addr in self.shakes

    def query(self, addr: str) -> None:
        self.asking = addr
        self.peers.query(addr)

    @property
    def books(self) -> dict[str, int]:
        return {name: len(book) for name, book in vars(self.peers).items() if isinstance(book, (dict, set))}


def test_addresses_that_requests_bring_are_not_remembered_for_good(monkeypatch):
    world = Strangers(monkeypatch)
    for port in range(1, 200):
        world.answers.add(f"127.0.0.1:{port}") if port % 3 == 0 else None
        # One that is asked again and again keeps none of the others.
        world.query("127.0.0.2:1")
        world.query(f"127.0.0.1:{port}")
        world.clock.now += prefill_peers.FORGOTTEN_S
    assert max(world.books.values()) <= prefill_peers.MOST_ASKED, world.books
    assert not world.peers.capabilities


def test_an_address_that_a_request_waits_for_is_not_forgotten(monkeypatch):
    """It would be asked in each step, and why it is of no use would be unknown."""
    world = Strangers(monkeypatch)
    since = world.clock.now - 1
    waited_for = [f"127.0.0.1:{port}" for port in range(100, 200)]
    for _ in range(4):
        for addr in waited_for * 2:
            world.query(addr)
        world.clock.now += 2 * prefill_peers.ASK_AGAIN_S
    assert all(world.asked.count(addr) == 4 for addr in waited_for)
    why = {addr: world.peers.why_unreached(addr, since) for addr in waited_for}
    assert all("cannot be used" in why[addr] for addr in waited_for if addr.endswith("5"))


def test_what_a_prefill_can_do_is_known_for_as_long_as_it_is(monkeypatch):
    """The engine asks it no more, so that it would be sent no prefix; and its requests would not hear from it."""
    world = Strangers(monkeypatch)
    world.answers, world.shakes = {"127.0.0.1:1", "127.0.0.1:3"}, {"127.0.0.1:1"}
    for addr in ("127.0.0.1:1", "127.0.0.1:3"):
        world.query(addr)
    assert [*world.peers.capabilities] == ["127.0.0.1:1"]
    for port in range(100, 200):
        world.query(f"127.0.0.1:{port}")
        world.clock.now += prefill_peers.FORGOTTEN_S
    assert world.peers.of("127.0.0.1:1").takes_prefix
    # It is lost, and comes back while requests of before are still being given up.
    world.shakes.clear()
    world.query("127.0.0.1:1")
    assert world.peers.of("127.0.0.1:1").takes_prefix
