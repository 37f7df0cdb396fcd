"""Two hosts on one machine: two network namespaces, and between them a wire whose rate is limited and that can be cut.

    with TwoHosts() as hosts:
        hosts.set_rate(bits_per_s("100mbit"))
        Cluster(model, hosts={"prefill": hosts.prefill, "decode": hosts.decode}, ...)

Between two processes of one host bytes are free, and nothing is ever late or lost. Here what prefill and decode send
each other goes over one veth pair (``wire``), limited by a token bucket filter in both directions. A host has one
address, that of the wire. Its peer can reach it over the wire alone; the machine's own namespace, where router and load
generator are, has a route to the same address over another veth pair that is not limited. Nothing is forwarded, and no
address but those of the two namespaces is used.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host

from .process_group import start_time

WIRE = "wire"
_ASIDE = "aside"  # the other end of a host's way to the machine's own namespace
# Of the names of namespaces: who made them, so that what a killed owner left can be told from what is in use.
_PREFIX = "pd-radix"
_NAME = re.compile(_PREFIX + r"-(\d+)-(\d+)-(\d+)-(prefill|decode)")
_count = itertools.count()

LEAST_RATE, MOST_RATE = 64e3, 100e9  # bits per second; below, the handshake's own messages take seconds
_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# A full Ethernet frame, and what TCP carries in it (bytes).
FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
# What may pass at once after a pause: a timer that comes late on a busy machine must not cost rate. Seconds, bytes.
BURST_S, LEAST_BURST = 0.005, 4096
# What may wait for the wire: about what a switch's port holds. Seconds, bytes.
QUEUE_S, LEAST_QUEUE = 0.1, 65536
# Nobody on the wire has it, so that a frame sent to it is lost without a word to the sender.
_NOBODY = "02:00:00:00:00:01"
# The first is for private networks; the second is for tests of networks, where a private one covers all of the first.
_RANGES = (ipaddress.IPv4Network("10.0.0.0/8"), ipaddress.IPv4Network("198.18.0.0/15"))
_TOOL_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # not every root shell has the latter


def bits_per_s(text: str) -> float:
    """A rate as tc writes it (``64kbit``, ``100mbit``, ``2.5gbit``), in bits per second. Raises PdRadixError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS:
        # tc's own "mbps" is megabytes per second, and nearly everybody else's is megabits.
        raise PdRadixError(f"{text!r} is not a rate: write a number with kbit, mbit or gbit, such as 100mbit")
    rate = float(match[1]) * _UNITS[match[2]]
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise PdRadixError(f"{text!r}: a rate is from {rate_text(LEAST_RATE)} to {rate_text(MOST_RATE)}")
    return rate


def rate_text(rate: float) -> str:
    """Bits per second for people: ``52.4 Mbit/s``."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate / 1e3:.3g} kbit/s"


def trouble() -> tuple[str, str] | None:
    """What keeps namespaces from being made here and the way out of it; None if nothing that can be told beforehand."""
    if os.geteuid() != 0:
        return "making network namespaces takes root", "run it as root, with sudo for instance"
    missing = [name for name in ("ip", "tc") if not shutil.which(name, path=_TOOL_PATH)]
    if missing:
        return f"there is no command {' and no '.join(missing)}", "on Debian or Ubuntu: apt-get install iproute2"
    return None


# What the kernel's answers mean.
_CAUSES = (
    (
        ("Operation not permitted", "Permission denied"),
        "this process may not make network namespaces",
        "in a container, start it with --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN and without seccomp",
    ),
    (("Read-only file system",), "/run is read-only", "in a container, mount a tmpfs at /run/netns"),
    (("qdisc kind is unknown", "qdisc not found"), "this kernel has no token bucket filter", "modprobe sch_tbf"),
    (("Unknown device type", "type is unknown"), "this kernel has no veth devices", "modprobe veth"),
)


def _tool(name: str, *arguments: str) -> str:
    """Standard output of ``ip`` or ``tc``. Raises PdRadixError with the cause and the way out."""
    command = [shutil.which(name, path=_TOOL_PATH) or name, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PdRadixError(f"cannot make two hosts of this machine: {error}") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    for signs, cause, way_out in _CAUSES:
        if any(sign in said for sign in signs):
            raise PdRadixError(f"cannot make two hosts of this machine: {cause} ({said}). Way out: {way_out}")
    raise PdRadixError(f"cannot make two hosts of this machine: {name} {' '.join(arguments)}: {said}")


def free_network(taken: Iterable[str], choice: random.Random | None = None) -> ipaddress.IPv4Network:
    """16 addresses that touch none of the networks ``taken`` ("10.1.0.0/16", "192.0.2.7"). Raises PdRadixError."""
    choice = choice or random.Random(os.urandom(8))
    used = [ipaddress.IPv4Network(text, strict=False) for text in taken]
    for whole in _RANGES:
        for _ in range(64):
            start = int(whole.network_address) + 16 * choice.randrange(whole.num_addresses // 16)
            found = ipaddress.IPv4Network((start, 28))
            if not any(found.overlaps(network) for network in used):
                return found
    raise PdRadixError(
        f"no free addresses for two hosts in {' or '.join(map(str, _RANGES))}: this machine has routes to all of them"
    )


def _taken() -> list[str]:
    """The networks that this namespace has routes to, but for the default route."""
    routes = json.loads(_tool("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    return [route["dst"] for route in routes if route["dst"] != "default"]


def _names() -> list[str]:
    """All namespaces that this module has made, whoever's they are."""
    try:
        return sorted(entry.name for entry in os.scandir("/run/netns") if _NAME.fullmatch(entry.name))
    except OSError:
        return []


def remove_stale() -> list[str]:
    """Remove the namespaces of owners that are gone, with their devices. Returns their names."""
    removed = []
    for name in _names():
        match = _NAME.fullmatch(name)
        if match and start_time(int(match[1])) != match[2]:
            _remove(name)
            removed.append(name)
    return removed


def _remove(namespace: str) -> None:
    for command in _removal(namespace):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)  # somebody else may be at it too


def _device(namespace: str) -> str:
    """This side's end of the way to a host: at most 15 characters, and to be known by the host's name alone."""
    match = _NAME.fullmatch(namespace)
    assert match
    return f"pdr{match[1]}{match[4][0]}{match[3]}"


def _removal(namespace: str) -> list[list[str]]:
    """The commands that remove a namespace. Devices first: the kernel takes its time with a namespace's own, and does
    nothing before its last process is gone."""
    ip = shutil.which("ip", path=_TOOL_PATH) or "ip"
    return [
        [ip, "link", "del", _device(namespace)],
        [ip, "-n", namespace, "link", "del", WIRE],
        [ip, "netns", "del", namespace],
    ]


def unproxied(environ: Mapping[str, str], addresses: Iterable[str]) -> dict[str, str]:
    """What keeps requests to ``addresses`` from a proxy that ``environ`` names, beside those that it keeps already."""
    names = ("no_proxy", "NO_PROXY")
    given = [address for name in names for address in environ.get(name, "").split(",") if address]
    # That one stands for all only where it stands alone.
    direct = ["*"] if "*" in given else [*given, *addresses]
    return dict.fromkeys(names, ",".join(dict.fromkeys(direct)))


@dataclass(frozen=True)
class Host:
    """One of the two: the ``namespace``, its ``address``, and the ``device`` that leads to its peer."""

    namespace: str
    address: str
    device: str = WIRE

    def command(self, *argv: str) -> list[str]:
        """``argv`` as a command that runs on this host. The process keeps its pid: nothing stays in between."""
        return [shutil.which("ip", path=_TOOL_PATH) or "ip", "netns", "exec", self.namespace, *argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What a worker on this host needs to be found over the wire, and to use nothing else."""
        return {
            "SGLANG_HOST_IP": self.address,  # what it announces: the engine's own guess is any address of the machine
            # Two namespaces still share memory, and UCX would rather move KV through that.
            "UCX_TLS": "tcp,self" if cpu_host.active() else "tcp,self,cuda_copy",
            "UCX_NET_DEVICES": self.device,
            "MC_FORCE_TCP": "1",
            # The machine's name stands for an address that is not one of this host's.
            "GLOO_SOCKET_IFNAME": "lo",
            **self.unproxied(environ),
        }

    def unproxied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Whatever proxy ``environ`` names, it has no business between two hosts of one machine."""
        network = ipaddress.IPv4Network((self.address, 30), strict=False)
        return unproxied(environ, [*map(str, network.hosts())])  # of this host and of its peer


@dataclass(frozen=True)
class Carried:
    """Bytes that have crossed the wire, headers included, since it was made."""

    to_prefill: int
    to_decode: int


@dataclass
class TwoHosts:
    """``prefill`` and ``decode``, joined by the wire, from `start` to `stop` (or ``with``).

    Nothing of it is left after `stop`, nor when the owner is killed; whatever survives even that goes with the next
    `start` of anybody. Before `stop`, end what runs on the hosts: a namespace lives on with its last process.
    """

    prefill: Host = field(init=False)
    decode: Host = field(init=False)
    rate: float | None = field(init=False, default=None)
    _guard: subprocess.Popen[bytes] | None = field(init=False, default=None, repr=False)

    def __enter__(self) -> TwoHosts:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Make both hosts and the wire, without a limit. Raises PdRadixError, and leaves nothing behind then."""
        found = trouble()
        if found:
            raise PdRadixError(f"cannot make two hosts of this machine: {found[0]}. Way out: {found[1]}")
        remove_stale()
        number, pid = next(_count), os.getpid()
        network = free_network(_taken())
        owner = f"{_PREFIX}-{pid}-{start_time(pid)}-{number}"
        self.prefill = Host(f"{owner}-prefill", str(network[1]))
        self.decode = Host(f"{owner}-decode", str(network[2]))
        self.rate = None
        try:
            self._start_guard()
            for host in self._hosts:
                _tool("ip", "netns", "add", host.namespace)
                self._ip(host, "link", "set", "lo", "up")
            ends = [WIRE, "netns", self.prefill.namespace, "type", "veth", "peer", "name", WIRE]
            _tool("ip", "link", "add", *ends, "netns", self.decode.namespace)
            for i, host in enumerate(self._hosts):
                self._ip(host, "address", "add", f"{host.address}/30", "dev", WIRE)
                self._ip(host, "link", "set", WIRE, "up")
                # A network of four addresses for each: of these, one here and one there.
                here, there, device = network[5 + 4 * i], network[6 + 4 * i], _device(host.namespace)
                _tool("ip", "link", "add", device, "type", "veth", "peer", "name", _ASIDE, "netns", host.namespace)
                self._ip(host, "address", "add", f"{there}/30", "dev", _ASIDE)
                self._ip(host, "link", "set", _ASIDE, "up")
                _tool("ip", "address", "add", f"{here}/30", "dev", device)
                _tool("ip", "link", "set", device, "up")
                _tool("ip", "route", "add", f"{host.address}/32", "via", str(there), "dev", device)
            self.restore()
        except BaseException:
            self.stop()
            raise

    def _start_guard(self) -> None:
        """A process that removes the namespaces when this one is gone: it waits for the end of a pipe."""
        remove = "; ".join(" ".join(command) for host in self._hosts for command in _removal(host.namespace))
        self._guard = subprocess.Popen(
            ["sh", "-c", f"read _; {remove}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Remove the namespaces, and with them all devices and routes. May be called twice."""
        if self._guard and self._guard.stdin:
            # What it does when its owner is killed is what has to be done now.
            self._guard.stdin.close()
            self._guard.wait(timeout=30)
            self._guard = None
            for host in self._hosts:
                if host.namespace in _names():  # somebody has killed it
                    _remove(host.namespace)

    @property
    def _hosts(self) -> tuple[Host, Host]:
        return self.prefill, self.decode

    @staticmethod
    def _ip(host: Host, *arguments: str) -> str:
        return _tool("ip", "-n", host.namespace, *arguments)

    def set_rate(self, rate: float | None) -> None:
        """Limit the wire to ``rate`` bits per second in each direction, frames with their headers; None: no limit."""
        for host in self._hosts:
            device = ["-n", host.namespace, "qdisc", "replace", "dev", WIRE, "root"]
            if rate is None:
                _tool("tc", *device, "pfifo_fast")
                continue
            burst = max(LEAST_BURST, round(BURST_S * rate / 8))
            queue = burst + max(LEAST_QUEUE, round(QUEUE_S * rate / 8))
            _tool("tc", *device, "tbf", "rate", f"{round(rate)}bit", "burst", str(burst), "limit", str(queue))
        self.rate = rate

    def cut(self) -> None:
        """Let everything that is sent over the wire be lost, without a word to the sender, until `restore`."""
        self._point((_NOBODY, _NOBODY))

    def restore(self) -> None:
        """Let the wire carry again; what was sent meanwhile stays lost."""
        self._point((self._link(self.prefill)["address"], self._link(self.decode)["address"]))

    def _point(self, macs: tuple[str, str]) -> None:
        """Say whose frames each host's packets for the other one go into. Never left to ARP, which takes time."""
        for host, peer, mac in ((self.decode, self.prefill, macs[0]), (self.prefill, self.decode, macs[1])):
            self._ip(host, "neighbor", "replace", peer.address, "lladdr", mac, "dev", WIRE, "nud", "permanent")

    def _link(self, host: Host) -> dict[str, Any]:
        link: dict[str, Any] = json.loads(self._ip(host, "-j", "-s", "link", "show", "dev", WIRE))[0]
        return link

    def carried(self) -> Carried:
        """What has arrived at each end so far."""
        return Carried(*(int(self._link(host)["stats64"]["rx"]["bytes"]) for host in self._hosts))
