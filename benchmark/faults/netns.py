"""Two hosts on one machine: two network namespaces, and between them a wire that can be slowed and cut.

    with TwoHosts() as hosts:
        Cluster(model, hosts={"prefill": hosts.prefill, "decode": hosts.decode}, ...)
        hosts.cut()

Between two processes of one host nothing is ever late or lost. Here what prefill and decode send each other goes over
one veth pair (``wire``). A host has one address, that of the wire. Its peer can reach it over the wire alone; the
machine's own namespace, where the router and the clients are, has a route to the same address over another veth pair.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host
from sglang_pd_radix.tools.cluster.plan import unproxied

WIRE = "wire"
_ASIDE = "aside"  # the other end of a host's way to the machine's own namespace
_count = itertools.count()
# What may pass a slowed wire at once, and for how long anything may wait for it.
BURST, WAITS = "16kb", "100ms"
# Nobody on the wire has it, so that a frame sent to it is lost without a word to the sender.
_NOBODY = "02:00:00:00:00:01"
_RANGE = ipaddress.IPv4Network("198.18.0.0/15")  # for tests of networks
_TOOL_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # not every root shell has the latter


def _program(name: str) -> str:
    return shutil.which(name, path=_TOOL_PATH) or name


def _tool(name: str, *arguments: str) -> str:
    """Standard output of ``ip`` or ``tc``. Raises PdRadixError, for one who is not root too."""
    try:
        done = subprocess.run([_program(name), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PdRadixError(f"cannot make two hosts of this machine: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PdRadixError(f"cannot make two hosts of this machine: {name} {' '.join(arguments)}: {said}")
    return done.stdout


def _free_network() -> ipaddress.IPv4Network:
    """16 addresses that this namespace has no route to, but for the default route. Raises PdRadixError."""
    routes = json.loads(_tool("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    used = [ipaddress.IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]
    for _ in range(64):
        start = int(_RANGE.network_address) + 16 * random.SystemRandom().randrange(_RANGE.num_addresses // 16)
        found = ipaddress.IPv4Network((start, 28))
        if not any(found.overlaps(network) for network in used):
            return found
    raise PdRadixError(f"no free addresses for two hosts in {_RANGE}: this machine has routes to all of them")


@dataclass(frozen=True)
class Host:
    """One of the two: the ``namespace``, its ``address``, and ``device``, the machine's end of its way to it."""

    namespace: str
    address: str
    device: str

    def command(self, *argv: str) -> list[str]:
        """``argv`` as a command that runs on this host. The process keeps its pid: nothing stays in between."""
        return [_program("ip"), "netns", "exec", self.namespace, *argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What a worker on this host needs to be found over the wire, and to use nothing else."""
        return {
            "SGLANG_HOST_IP": self.address,  # what it announces: the engine's own guess is any address of the machine
            # Two namespaces still share memory, and UCX would rather move KV through that.
            "UCX_TLS": "tcp,self" if cpu_host.active() else "tcp,self,cuda_copy",
            "UCX_NET_DEVICES": WIRE,
            "MC_FORCE_TCP": "1",
            # The machine's name stands for an address that is not one of this host's.
            "GLOO_SOCKET_IFNAME": "lo",
            **self.unproxied(environ),
        }

    def unproxied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Whatever proxy ``environ`` names, it has no business between two hosts of one machine."""
        network = ipaddress.IPv4Network((self.address, 30), strict=False)
        return unproxied(environ, [*map(str, network.hosts())])  # of this host and of its peer


@dataclass
class TwoHosts:
    """``prefill`` and ``decode``, joined by the wire, from `start` to `stop` (or ``with``).

    Nothing of it is left after `stop`, nor when the owner is killed. Before `stop`, end what runs on the hosts: a
    namespace lives on with its last process.
    """

    prefill: Host = field(init=False)
    decode: Host = field(init=False)
    _guard: subprocess.Popen[bytes] | None = field(init=False, default=None, repr=False)

    def __enter__(self) -> TwoHosts:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Make both hosts and the wire, without a limit. Raises PdRadixError, and leaves nothing behind then."""
        owner = f"{os.getpid()}-{next(_count)}"
        network = _free_network()
        # The name of a device has at most 15 characters.
        self.prefill, self.decode = (
            Host(f"pd-radix-{owner}-{role}", str(network[number]), f"pdr{owner}{role[0]}")
            for number, role in ((1, "prefill"), (2, "decode"))
        )
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
                here, there = network[5 + 4 * i], network[6 + 4 * i]
                _tool("ip", "link", "add", host.device, "type", "veth", "peer", "name", _ASIDE, "netns", host.namespace)
                self._ip(host, "address", "add", f"{there}/30", "dev", _ASIDE)
                self._ip(host, "link", "set", _ASIDE, "up")
                _tool("ip", "address", "add", f"{here}/30", "dev", host.device)
                _tool("ip", "link", "set", host.device, "up")
                _tool("ip", "route", "add", f"{host.address}/32", "via", str(there), "dev", host.device)
            self.restore()
        except BaseException:
            self.stop()
            raise

    def _start_guard(self) -> None:
        """A process that removes the namespaces when this one is gone: it waits for the end of a pipe.

        Devices first: the kernel takes its time with a namespace's own, and does nothing before its last process is
        gone.
        """
        ip = _program("ip")
        remove = "; ".join(
            f"{ip} link del {host.device}; {ip} -n {host.namespace} link del {WIRE}; {ip} netns del {host.namespace}"
            for host in self._hosts
        )
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

    @property
    def _hosts(self) -> tuple[Host, Host]:
        return self.prefill, self.decode

    @staticmethod
    def _ip(host: Host, *arguments: str) -> str:
        return _tool("ip", "-n", host.namespace, *arguments)

    def set_rate(self, rate: str | None) -> None:
        """Limit the wire to ``rate``, as tc writes it, in each direction; None: no limit."""
        limit = ["tbf", "rate", rate, "burst", BURST, "latency", WAITS] if rate else ["pfifo_fast"]
        for host in self._hosts:
            _tool("tc", "-n", host.namespace, "qdisc", "replace", "dev", WIRE, "root", *limit)

    def cut(self) -> None:
        """Let everything that is sent over the wire be lost, without a word to the sender, until `restore`."""
        self._point((_NOBODY, _NOBODY))

    def restore(self) -> None:
        """Let the wire carry again; what was sent meanwhile stays lost."""
        self._point((self._mac(self.prefill), self._mac(self.decode)))

    def _point(self, macs: tuple[str, str]) -> None:
        """Say whose frames each host's packets for the other one go into. Never left to ARP, which takes time."""
        for host, peer, mac in ((self.decode, self.prefill, macs[0]), (self.prefill, self.decode, macs[1])):
            self._ip(host, "neighbor", "replace", peer.address, "lladdr", mac, "dev", WIRE, "nud", "permanent")

    def _mac(self, host: Host) -> str:
        return str(json.loads(self._ip(host, "-j", "link", "show", "dev", WIRE))[0]["address"])
