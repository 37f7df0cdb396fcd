"""Two hosts on one machine: rates, messages, and, as root, real namespaces with a wire that is slow, cut and gone."""

from __future__ import annotations

import ipaddress
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import netns
from sglang_pd_radix.tools.bench import deploy, link, workload
from sglang_pd_radix.tools.cluster import Cluster
from sglang_pd_radix.tools.netns import Host, TwoHosts

# ---- rates ----


@pytest.mark.parametrize(
    "text, bits",
    [("100mbit", 100e6), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("64kbit", 64e3), ("1000000", 1e6), ("900000bit", 9e5)],
)
def test_a_rate_is_read_as_tc_writes_it(text, bits):
    assert netns.bits_per_s(text) == bits


@pytest.mark.parametrize("text", ["fast", "100mbps", "-1mbit", "", "1e3mbit", "1 000mbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(PdRadixError, match="is not a rate: write a number with kbit, mbit or gbit"):
        netns.bits_per_s(text)


@pytest.mark.parametrize("text", ["1kbit", "200gbit", "0mbit"])
def test_a_rate_out_of_bounds_is_refused(text):
    with pytest.raises(PdRadixError, match="from 64 kbit/s to 100 Gbit/s"):
        netns.bits_per_s(text)


def test_rates_of_the_option():
    rates = link.parse_rates("auto:0.25, 100mbit,auto:4")
    assert [(r.text, r.bits_per_s, r.times_prefill) for r in rates] == [
        ("auto:0.25", None, 0.25),
        ("100mbit", 1e8, None),
        ("auto:4", None, 4.0),
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("auto", "write auto:N"),
        ("auto:", "write auto:N"),
        ("auto:x", "write auto:N"),
        ("auto:nan", "write auto:N"),
        ("auto:0", "write auto:N"),
        ("auto:-1", "write auto:N"),
        ("100mbit,", "'' is not a rate"),
        ("slow", "'slow' is not a rate"),
    ],
)
def test_a_wrong_rate_of_the_option_is_named(text, said):
    with pytest.raises(PdRadixError, match=f"--link .*{said}"):
        link.parse_rates(text)


def test_an_auto_rate_takes_so_many_times_the_prefill():
    prompt = link.Prompt(512, 0.010, 131072)
    (rate,) = (prompt.rate(r) for r in link.parse_rates("auto:1"))
    # 128 KiB in 10 ms, in frames of which 1448 of 1514 bytes are payload
    assert rate == pytest.approx(131072 * 8 / 0.010 * 1514 / 1448)
    for times in (0.25, 1, 4):
        assert prompt.times_prefill(prompt.rate(link.Rate("", times_prefill=times))) == pytest.approx(times)
    assert prompt.rate(link.Rate("5mbit", 5e6)) == 5e6
    with pytest.raises(PdRadixError, match="auto:4 would be 0.0209 kbit/s"):
        link.Prompt(1, 100.0, 1000).rate(link.Rate("auto:4", times_prefill=4))


def test_the_mean_prompt_of_a_chat_has_its_history():
    tokens = workload.Tokens(range(400, 1900), 0)
    chat = workload.Chat(clients=2, turns=3, document=10, question=4, answer=2).make("c", tokens)
    assert link.mean_prompt(chat) == round((10 + 16 + 22) / 3)
    groups = workload.Groups(prefixes=3, shared=28, suffix=4)
    groups.check("b")
    assert link.mean_prompt(groups.make("b", tokens)) == 32


def crossing(sent_mib: float, crossed_mib: float, requests: int, state_mib: float = 0.0) -> list[str]:
    """The problems of a run in which so many MiB were counted and crossed."""
    counted = {"sent_bytes": sent_mib * 2**20, "state_bytes": state_mib * 2**20, "sent_runs": requests}
    return link.problems({**counted, "link_bytes": crossed_mib * 2**20, "requests": requests})


def test_kv_that_did_not_cross_the_link_is_a_problem():
    assert link.problems({"sent_bytes": 100}) == []
    assert crossing(100, 100, 1) == []
    (problem,) = crossing(3, 1, 1)
    assert problem.startswith("3.0 MiB of KV was sent and 1.0 MiB crossed the link")
    (problem,) = crossing(3, 4, 1, state_mib=2)
    assert problem.startswith("5.0 MiB of KV was sent and 4.0 MiB crossed the link")


def test_a_run_that_sent_nothing_is_a_problem():
    """Of prompts that nobody had before, something has to cross; both figures were 0, and nothing was said."""
    for crossed in (0.0, 0.01):
        (problem,) = crossing(0, crossed, 20)
        assert problem.startswith("no KV was counted as sent for 20 requests")


@pytest.mark.parametrize(
    "sent, crossed, requests",
    # Published runs: (b) off and on, (c) off and on, the most that either backend took.
    [(20.0, 21.6, 160), (2.5, 3.2, 160), (6.8, 7.3, 48), (1.3, 1.6, 48)],
)
def test_frames_and_handshakes_are_no_problem(sent, crossed, requests):
    assert crossing(sent, crossed, requests) == []


@pytest.mark.parametrize(
    "sent, crossed, requests",
    # All that the flag-off side of the demo sends, of which what is sent with it on was counted; and the like for (b).
    [(84, 371, 20), (2.5, 20.5, 160), (20.0, 40.1, 160)],
)
def test_bytes_that_nobody_counted_are_a_problem(sent, crossed, requests):
    (problem,) = crossing(sent, crossed, requests)
    assert problem.startswith(f"{crossed:.1f} MiB crossed the link and {sent:.1f} MiB of KV was counted as sent")
    assert f"16 KiB for the handshake of each of {requests} requests" in problem
    assert crossing(sent, crossed, requests, state_mib=crossed - sent - 0.1) == []


# ---- addresses, commands, messages ----


def test_a_free_network_touches_no_other():
    taken = ["10.0.0.0/9", "192.0.2.7", "10.200.0.0/16"]
    for seed in range(50):
        found = netns.free_network(taken, random.Random(seed))
        assert found.num_addresses == 16 and not found.overlaps(ipaddress.IPv4Network("10.0.0.0/9"))
    assert netns.free_network(["10.0.0.0/8"]).subnet_of(ipaddress.IPv4Network("198.18.0.0/15"))
    with pytest.raises(PdRadixError, match="no free addresses for two hosts in 10.0.0.0/8 or 198.18.0.0/15"):
        netns.free_network(["10.0.0.0/8", "198.18.0.0/15"])


@pytest.mark.parametrize("cpu, transports", [(True, "tcp,self"), (False, "tcp,self,cuda_copy")])
def test_a_worker_is_told_its_address_and_to_use_nothing_but_the_wire(monkeypatch, cpu, transports):
    monkeypatch.setattr(netns.cpu_host, "active", lambda: cpu)
    host = Host("pd-radix-1-2-0-decode", "10.9.8.2")
    assert host.command("python", "-V")[-5:] == ["netns", "exec", "pd-radix-1-2-0-decode", "python", "-V"]
    given = host.environment({"no_proxy": "localhost", "UCX_TLS": "rc"})
    assert given["SGLANG_HOST_IP"] == "10.9.8.2"
    assert given["UCX_TLS"] == transports and given["UCX_NET_DEVICES"] == netns.WIRE
    assert given["no_proxy"] == given["NO_PROXY"] == "localhost,10.9.8.1,10.9.8.2"


def test_a_cluster_puts_each_role_on_its_host(tmp_path, monkeypatch):
    hosts = {"prefill": Host("pd-radix-1-2-0-prefill", "10.9.8.1"), "decode": Host("pd-radix-1-2-0-decode", "10.9.8.2")}
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
    assert "10.9.8.2" in router.env["no_proxy"]


def test_without_hosts_a_cluster_is_as_it_was(tmp_path):
    for process in Cluster("m", env={"UCX_TLS": "all"}, log_dir=tmp_path).plan():
        assert process.command[0] == sys.executable and process.url.startswith("http://127.0.0.1:")
        assert process.env["UCX_TLS"] == "all"
        assert {name: process.env.get(name) for name in ("SGLANG_HOST_IP", "UCX_NET_DEVICES")} == {
            name: os.environ.get(name) for name in ("SGLANG_HOST_IP", "UCX_NET_DEVICES")
        }


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


def test_a_benchmark_over_a_link_has_both_sides_on_one_host(tmp_path):
    hosts = TwoHosts()
    hosts.prefill, hosts.decode = Host("pd-radix-1-2-0-prefill", "10.9.8.1"), Host("pd-radix-1-2-0-decode", "10.9.8.2")
    made = deploy.Deployment("m", deploy.Shape(500, 20), [], "nixl", tmp_path, hosts=hosts)
    places = {p.name: p.url.split("/")[2].split(":")[0] for p in made.cluster.plan()}
    assert places == {
        "prefill-0": "10.9.8.1",
        "decode-0": "10.9.8.2",
        "decode-1": "10.9.8.2",
        "router-off": "127.0.0.1",
        "router-on": "127.0.0.1",
    }


def test_who_is_not_root_is_told_so(monkeypatch, tmp_path, capsys):
    from sglang_pd_radix.tools import cli

    monkeypatch.delenv("SGLANG_PD_RADIX", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PdRadixError, match="takes root. Way out: run it as root, with sudo"):
        TwoHosts().start()
    assert cli.main(["bench", "--out", str(tmp_path), "--link", "1mbit"]) == 1
    error = capsys.readouterr().err
    assert "--link: making network namespaces takes root" in error and len(error.splitlines()) == 1


def test_a_machine_without_the_commands_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns, "_TOOL_PATH", "/nowhere")
    with pytest.raises(PdRadixError, match="no command ip and no tc. Way out: .* apt-get install iproute2"):
        TwoHosts().start()


@pytest.mark.parametrize(
    "said, cause",
    [
        (
            "mount --make-shared /run/netns failed: Operation not permitted",
            "in a container, start it with --privileged",
        ),
        ("Error: Specified qdisc kind is unknown.", "modprobe sch_tbf"),
        ("Error: Unknown device type.", "modprobe veth"),
        ("RTNETLINK answers: File exists", "ip netns add x: RTNETLINK answers: File exists"),
    ],
)
def test_what_the_kernel_refuses_is_explained(monkeypatch, tmp_path, said, cause):
    command = tmp_path / "ip"
    command.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 2\n")
    command.chmod(0o755)
    monkeypatch.setattr(netns, "_TOOL_PATH", str(tmp_path))
    with pytest.raises(PdRadixError) as error:
        netns._tool("ip", "netns", "add", "x")
    assert cause in str(error.value) and len(str(error.value).splitlines()) == 1


# ---- real ones ----

# Answers what it gets; says how many bytes came, and in how many seconds from the first of them.
SINK = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    started, count = None, 0
    while data := peer.recv(1 << 16):
        started, count = started or time.perf_counter(), count + len(data)
        if data == b"?":
            peer.sendall(b"!")
    print(count, time.perf_counter() - started, flush=True)
    peer.close()
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=5) as peer:
    peer.settimeout(60)
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
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
# Makes two hosts, says their names, and waits to be killed.
OWNER = """
import os, signal, sys, time
from sglang_pd_radix.tools.netns import TwoHosts
hosts = TwoHosts()
hosts.start()
if sys.argv[1] == "unguarded":
    os.kill(hosts._guard.pid, signal.SIGKILL)
print(hosts.prefill.namespace, hosts.decode.namespace, hosts.decode.address, flush=True)
time.sleep(600)
"""


def left_of(hosts: list[Host]) -> list[str]:
    """What is still there of ``hosts``: namespaces, devices, routes."""
    names = [host.namespace for host in hosts if host.namespace in netns._names()]
    devices = [netns._device(host.namespace) for host in hosts]
    return names + [d for d in devices if d in os.listdir("/sys/class/net")] + [
        host.address for host in hosts if host.address in netns._tool("ip", "route")
    ]  # fmt: skip


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
        yield process.stdout
        process.kill()


def send(hosts, count: int) -> None:
    command = hosts.prefill.command(sys.executable, "-S", "-c", SOURCE, hosts.decode.address, str(count))
    subprocess.run(command, check=True, timeout=60)


def test_the_wire_has_the_rate_that_was_set(hosts, sink):
    for rate in (2e6, 50e6):
        hosts.set_rate(rate)
        # Of what was set; a second each. A busy machine makes one of them slow, and a wrong rate all of them.
        parts: list[float] = []
        while not parts or (parts[-1] <= 0.7 and len(parts) < 10):
            before, count = hosts.carried(), round(rate / 8)
            send(hosts, count)
            got, seconds = map(float, sink.readline().split())
            assert got == count
            parts.append(8 * count / seconds * netns.FRAME_BYTES / netns.FRAME_PAYLOAD_BYTES / rate)
            assert count <= hosts.carried().to_decode - before.to_decode < 1.1 * count
            assert 0 < hosts.carried().to_prefill - before.to_prefill < 0.1 * count
        # Faster than it can be would mean another way.
        assert 0.7 < max(parts) < 1.15, parts
    hosts.set_rate(None)
    send(hosts, 4_000_000)
    got, seconds = map(float, sink.readline().split())
    assert 8 * got / seconds > 2 * 50e6


def test_this_side_reaches_both_beside_the_wire(hosts, sink):
    hosts.set_rate(netns.LEAST_RATE)
    before = hosts.carried()
    with socket.create_connection((hosts.decode.address, 5000), timeout=5) as peer:
        peer.sendall(bytes(1_000_000))
    got, seconds = map(float, sink.readline().split())
    assert got == 1_000_000 and seconds < 5
    assert hosts.carried().to_decode - before.to_decode < 10_000


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


def test_it_ends_without_its_guard_too(hosts):
    hosts._guard.kill()
    hosts._guard.wait()
    hosts.stop()
    assert left_of([hosts.prefill, hosts.decode]) == []


def kill_owner(*arguments: str) -> list[Host]:
    command = [sys.executable, "-c", OWNER, *arguments]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    prefill, decode, address = owner.stdout.readline().split()
    both = [Host(prefill, address), Host(decode, address)]
    assert left_of(both)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    return both


def test_nothing_is_left_of_an_owner_that_was_killed(hosts):
    both = kill_owner("guarded")
    deadline = time.monotonic() + 10
    while left_of(both) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_of(both) == []


def test_what_even_the_guard_left_goes_with_the_next_start(hosts):
    both = kill_owner("unguarded")
    assert len(left_of(both)) == 6
    assert {host.namespace for host in both} <= set(netns.remove_stale())
    assert left_of(both) == [] and hosts.prefill.namespace in netns._names()
