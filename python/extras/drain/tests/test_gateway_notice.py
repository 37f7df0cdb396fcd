"""A worker that shuts down has its gateways let go of it, and of nobody else."""

from __future__ import annotations

import logging
from threading import Timer
from types import SimpleNamespace

import pytest
from sglang.srt.managers import gateway_notice
from test_top import workers

from sglang_pd_radix import hosts

PORT = 30001


@pytest.fixture
def gateway(monkeypatch):
    """One that knows a decode worker here and some others; ``let_go`` are those that it was told to let go of."""
    monkeypatch.setattr(gateway_notice, "LEAVE_S", 60.0)
    with workers(1) as (gateway,):
        listed = [
            {"id": "here", "url": f"http://127.0.0.1:{PORT}", "worker_type": "decode", "is_healthy": True},
            {"id": "prefill", "url": f"http://127.0.0.1:{PORT}", "worker_type": "prefill", "is_healthy": True},
            {"id": "port", "url": f"http://127.0.0.1:{PORT + 1}", "worker_type": "decode", "is_healthy": True},
            {"id": "host", "url": f"http://192.0.2.7:{PORT}", "worker_type": "decode", "is_healthy": True},
        ]
        gateway.answers["/workers"], gateway.let_go = {"workers": listed}, []

        def let_go(path: str) -> int:
            gateway.let_go.append(path)
            Timer(0.2, listed[0].update, [{"status": "draining"}]).start()
            return 202

        gateway.on_delete = let_go
        gateway.url = f"http://{gateway.address}"
        yield gateway


def test_it_is_let_go_of_and_nobody_else(gateway, caplog):
    with caplog.at_level(logging.INFO):
        gateway_notice.leave_all([gateway.url], "decode", "127.0.0.1", PORT)
    assert gateway.let_go == ["/workers/here"] and "no longer sends requests" in caplog.text
    assert gateway.answers["/workers"]["workers"][0]["status"] == "draining"


def test_all_of_its_ranks_are_let_go_of(gateway):
    """With --dp-aware a gateway has each DP rank as a worker: the digits behind the last @ are its number."""
    listed = gateway.answers["/workers"]["workers"]
    for rank, one in enumerate(listed):
        one["url"] += f"@{rank}"
    listed.append({"id": "more", "url": f"http://localhost:{PORT}@1", "worker_type": "decode"})

    def let_go(path: str) -> int:
        gateway.let_go.append(path)
        for one in listed:
            if path == f"/workers/{one['id']}":
                one["status"] = "draining"
        return 202

    gateway.on_delete = let_go
    gateway_notice.leave(gateway.url, "decode", PORT, {"127.0.0.1"})
    assert gateway.let_go == ["/workers/here", "/workers/more"]


def test_a_gateway_that_does_not(gateway, caplog, monkeypatch):
    """Whatever it does, the others are told."""
    monkeypatch.setattr(gateway_notice, "LEAVE_S", 0.5)
    silent = "http://127.0.0.1:9"
    gateway.on_delete = lambda path: 202
    gateway_notice.leave_all([silent, gateway.url], "decode", "127.0.0.1", PORT)
    assert f"Gateway {silent} did not remove this worker: ConnectionError" in caplog.text
    assert "it still uses this worker after 0.5 s" in caplog.text
    gateway.on_delete = lambda path: 500
    gateway_notice.leave_all([gateway.url], "decode", "127.0.0.1", PORT)
    assert "HTTPError" in caplog.text


@pytest.mark.parametrize("of_tools, of_worker", [("the key", None), (" the key\n", "another"), ("", "the key")])
def test_a_gateway_that_asks_for_a_key(gateway, monkeypatch, of_tools, of_worker):
    monkeypatch.setenv("SGLANG_PD_RADIX_API_KEY", of_tools)
    gateway.key = "the key"
    key = gateway_notice.key_for(SimpleNamespace(api_key=of_worker))
    gateway_notice.leave_all([gateway.url], "decode", "127.0.0.1", PORT, key)
    assert gateway.let_go == ["/workers/here"]


def test_a_gateway_behind_a_forwarded_port_loses_no_neighbour(gateway, monkeypatch):
    """Of docker, ssh or kubectl: its address is this host's, and its loopback addresses are those of another one."""
    own = {"id": "own", "url": f"http://192.0.2.9:{PORT}", "worker_type": "decode", "status": "draining"}
    gateway.answers["/workers"]["workers"].append(own)
    monkeypatch.setattr(gateway_notice, "own_addresses", lambda host: {"127.0.0.1", "192.0.2.9"})
    gateway_notice.leave_all([gateway.url], "decode", "0.0.0.0", PORT)
    assert gateway.let_go == ["/workers/own"]


@pytest.mark.parametrize("here", [True, False])
def test_a_loopback_address_is_of_the_host_of_the_gateway(gateway, caplog, monkeypatch, here):
    """Another host's worker would be let go of: /etc/hosts has 127.0.1.1 for the name of many a host."""
    gateway.answers["/workers"]["workers"][0]["url"] = f"http://127.0.1.1:{PORT}"
    monkeypatch.setattr(gateway_notice, "own_addresses", lambda host: {"127.0.1.1", "0.0.0.0", "192.0.2.9"})
    monkeypatch.setattr(gateway_notice, "_is_here", lambda url: here)
    gateway_notice.leave_all([gateway.url], "decode", "192.0.2.9", PORT)
    assert gateway.let_go == (["/workers/here"] if here else [])
    assert (f"it lists no decode worker at port {PORT} of 192.0.2.9" in caplog.text) == (not here)


@pytest.fixture
def interfaces(monkeypatch):
    """Of this host. Neither its name nor its default route leads to them."""
    found = {
        "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
        "eth1": ["10.0.0.6", "9.9.9.6", "fd00::6", "fe80::6%eth1", "02:fc:00:00:00:01"],
        "docker0": ["172.17.0.1"],
    }
    listed = {name: [SimpleNamespace(address=one) for one in addresses] for name, addresses in found.items()}
    monkeypatch.setattr(hosts.psutil, "net_if_addrs", lambda: listed)
    monkeypatch.setattr(gateway_notice, "get_local_ip_auto", lambda: "192.0.2.9")
    monkeypatch.setattr(gateway_notice.socket, "gethostname", lambda: "no-such-host.invalid")


@pytest.mark.parametrize(
    "host, known, found",
    [
        *[("0.0.0.0", known, True) for known in ("127.0.0.1", "localhost", "10.0.0.6", "192.0.2.9", "0.0.0.0")],
        *[("::", known, True) for known in ("[::1]", "[fd00::6]", "[fe80::6]")],
        # Where this worker does not listen another may: a server at :: takes IPv6 only.
        *[("0.0.0.0", "[fd00::6]", False), ("::", "10.0.0.6", False), ("192.0.2.9", "10.0.0.6", False)],
    ],
)
def test_who_listens_at_all_addresses_is_known_by_any(gateway, interfaces, host, known, found):
    gateway.answers["/workers"]["workers"][0]["url"] = f"http://{known}:{PORT}"
    gateway_notice.leave_all([gateway.url], "decode", host, PORT)
    assert gateway.let_go == (["/workers/here"] if found else [])


@pytest.mark.parametrize("own, found", [("192.0.2.9", ["/workers/here"]), ("203.0.113.7", [])])
def test_a_bridge_that_many_hosts_have_leads_to_no_neighbour(gateway, interfaces, monkeypatch, own, found):
    """A container of another host's, by that host's gateway: docker0 has the same address everywhere."""
    monkeypatch.setattr(gateway_notice, "_is_here", lambda url: False)
    listed = gateway.answers["/workers"]["workers"]
    listed[0]["url"], listed[3]["url"] = f"http://{own}:{PORT}", f"http://172.17.0.1:{PORT}"
    gateway_notice.leave_all([gateway.url], "decode", "0.0.0.0", PORT)
    assert gateway.let_go == found


@pytest.mark.parametrize("given", ["10.0.0.3:30002", "ftp://x", "http://", "http://a:1, b", "http://[::", "http://a:b"])
def test_what_is_no_address_is_refused(monkeypatch, given):
    monkeypatch.setenv(gateway_notice.VARIABLE, given)
    with pytest.raises(ValueError, match="SGLANG_DISAGGREGATION_GATEWAYS has .*: give URLs such as"):
        gateway_notice.gateways()


def test_several(monkeypatch):
    monkeypatch.setenv(gateway_notice.VARIABLE, " http://a:1/, https://b ,")
    assert gateway_notice.gateways() == ["http://a:1", "https://b"]
    monkeypatch.delenv(gateway_notice.VARIABLE)
    assert gateway_notice.gateways() == []
