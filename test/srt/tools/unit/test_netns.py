"""How servers of a deployment reach each other: without a proxy on one machine, over a wire between two made hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from faults import netns
from faults.netns import Host, TwoHosts

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import Cluster


@pytest.mark.parametrize(
    "given, direct",
    [
        ({}, "127.0.0.1,::1,localhost"),
        ({"no_proxy": "a.b,localhost", "NO_PROXY": "c.d"}, "a.b,localhost,c.d,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_a_proxy_is_not_asked_for_what_is_on_this_machine(tmp_path, monkeypatch, given, direct):
    """A worker's own warm-up was, and the worker ended."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "http_proxy": "http://10.9.9.9:3128"}.items():
        monkeypatch.setenv(name, value)
    plan = Cluster("m", log_dir=tmp_path, pegaflow=[], decode_env={"X": "1"}).plan()
    assert {(process.env["no_proxy"], process.env["NO_PROXY"]) for process in plan} == {(direct, direct)}
    assert {process.env["http_proxy"] for process in plan} == {"http://10.9.9.9:3128"}


def test_a_cluster_puts_each_role_on_its_host(tmp_path, monkeypatch):
    hosts = {role: Host(f"pd-radix-1-0-{role}", f"198.18.0.{i}", "") for i, role in enumerate(("prefill", "decode"), 1)}
    monkeypatch.setattr(netns.cpu_host, "active", lambda: True)
    made = Cluster("m", env={"UCX_TLS": "all", "SGLANG_HOST_IP": "7.7.7.7"}, hosts=hosts, log_dir=tmp_path)
    prefill, decode, router = made.plan()
    for process, host in ((prefill, hosts["prefill"]), (decode, hosts["decode"])):
        assert process.url.startswith(f"http://{host.address}:")
        assert process.command[1:4] == ["netns", "exec", host.namespace]
        assert process.command[process.command.index("--host") + 1] == host.address
        assert process.env["SGLANG_HOST_IP"] == host.address and process.env["UCX_TLS"] == "tcp,self"
    assert router.command[0] == sys.executable and router.url.startswith("http://127.0.0.1:")
    assert {prefill.url, decode.url} <= set(router.command)
    assert "198.18.0.2" in router.env["no_proxy"]


# ---- real ones ----

# Answers what it gets.
SINK = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    while data := peer.recv(1 << 16):
        if data == b"?":
            peer.sendall(b"!")
    peer.close()
"""
# For every line, the seconds to wait for "!": says whether it came. With a "+" it asks first.
ASKER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=5)
for line in sys.stdin:
    peer.settimeout(float(line))
    if line.startswith("+"):
        peer.sendall(b"?")
    try:
        print(peer.recv(1).decode() or "closed", flush=True)
    except TimeoutError:
        print("nothing", flush=True)
"""
# Sends so many bytes, and says in how many seconds all of them had come.
SOURCE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=5) as peer:
    began = time.perf_counter()
    peer.settimeout(60)
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print(time.perf_counter() - began)
"""
# Makes two hosts, says their names, and waits to be killed.
OWNER = """
import time
from faults.netns import TwoHosts
hosts = TwoHosts()
hosts.start()
for host in (hosts.prefill, hosts.decode):
    print(host.namespace, host.address, host.device, flush=True)
time.sleep(600)
"""


def left_of(hosts: list[Host]) -> list[str]:
    """What is still there of ``hosts``: namespaces, devices, routes."""
    names = [host.namespace for host in hosts if os.path.exists(f"/run/netns/{host.namespace}")]
    devices = [host.device for host in hosts if host.device in os.listdir("/sys/class/net")]
    return names + devices + [host.address for host in hosts if host.address in netns._tool("ip", "route")]


@pytest.fixture
def hosts():
    made = TwoHosts()
    try:
        made.start()
    except PdRadixError as error:
        pytest.skip(str(error))
    both = [made.prefill, made.decode]
    assert len(left_of(both)) == 6
    yield made
    made.stop()
    assert left_of(both) == []
    made.stop()


@pytest.fixture
def sink(hosts):
    command = hosts.decode.command(sys.executable, "-S", "-c", SINK, hosts.decode.address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "listening\n"
        yield
        process.kill()


def test_a_cut_wire_loses_everything_without_a_word_until_it_is_restored(hosts, sink):
    command = hosts.prefill.command(sys.executable, "-S", "-c", ASKER, hosts.decode.address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdin and asker.stdout

        def ask(line: str) -> str:
            asker.stdin.write(line + "\n")
            asker.stdin.flush()
            return asker.stdout.readline().strip()

        assert ask("+5") == "!"
        hosts.cut()
        assert ask("+0.5") == "nothing"
        with socket.create_connection((hosts.decode.address, 5000), timeout=5):
            pass  # the machine itself is not cut off from either host
        hosts.restore()
        assert ask("10") == "!"  # TCP has kept it
        assert ask("+5") == "!"
        asker.stdin.close()


def test_a_slowed_wire_is_slow_until_it_is_not(hosts, sink):
    def seconds(count: int) -> float:
        command = hosts.prefill.command(sys.executable, "-S", "-c", SOURCE, hosts.decode.address, str(count))
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    hosts.set_rate("2mbit")
    assert seconds(250_000) > 0.8
    hosts.set_rate(None)
    assert seconds(2_500_000) < 5


def test_nothing_is_left_of_an_owner_that_was_killed(hosts):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout
        both = [Host(*owner.stdout.readline().split()) for _ in range(2)]
        assert len(left_of(both)) == 6
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while left_of(both) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_of(both) == []
