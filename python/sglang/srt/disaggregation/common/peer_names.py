"""What the names of peers stand for, found out by threads: DNS may take seconds to answer, or not answer at all.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang.srt.disaggregation.peer_calls import in_background

logger = logging.getLogger(__name__)

# An address family, and what a socket of it connects to: an address as text, a port that means nothing, and of IPv6 the
# flow and the scope, without which a link-local address leads nowhere.
Address = tuple[int, tuple[Any, ...]]

# Seconds for which an answer of DNS holds: it may take longer than a look waits for it, and who is gone refuses twice.
FRESH_S = 2.0
# Requests name peers: names that are remembered.
MOST_NAMES = 4096


@dataclass
class _Name:
    addresses: list[Address] = field(default_factory=list)
    # Whether it may stand for something else by now.
    doubted: bool = True
    being_asked: bool = False
    learned_at: float = -math.inf


def _resolve(host: str, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    return [(family, at) for family, _, _, _, at in found]


class PeerNames:
    """The addresses of hosts. A name that DNS knows no more stands for what it last did: its worker may be gone, and a
    Kubernetes service forgets the name of a pod that is not ready."""

    def __init__(self) -> None:
        self._answered = threading.Condition()
        self._names: dict[str, _Name] = {}

    def look_up(self, hosts: Iterable[str], wait_s: float) -> dict[str, list[Address]]:
        """Addresses of ``hosts``, all asked for at once; none where DNS has not answered within ``wait_s`` seconds, or
        never knew any."""
        found: dict[str, list[Address]] = {}
        with self._answered:
            if len(self._names) > MOST_NAMES:
                self._names = {host: name for host, name in self._names.items() if name.being_asked}
            names: dict[str, _Name] = {}
            for host in set(hosts):
                try:
                    found[host] = _resolve(host, socket.AI_NUMERICHOST)
                except (OSError, ValueError):
                    names[host] = self._names.setdefault(host, _Name())
                    self._ask(host, names[host])
            self._answered.wait_for(lambda: not any(name.being_asked for name in names.values()), wait_s)
            return found | {host: [] if name.being_asked else name.addresses for host, name in names.items()}

    def doubt(self, hosts: Iterable[str]) -> None:
        """The addresses of ``hosts`` refuse: they may stand for others by now, and are asked for at one of the next
        looks."""
        with self._answered:
            for host in hosts:
                if host in self._names:
                    self._names[host].doubted = True

    def _ask(self, host: str, name: _Name) -> None:
        if name.doubted and not name.being_asked and time.monotonic() - name.learned_at >= FRESH_S:
            name.being_asked = in_background(partial(self._learn, host, name), "resolve-peer") is None

    def _learn(self, host: str, name: _Name) -> None:
        addresses: list[Address] = []
        try:
            addresses = _resolve(host)
        except (OSError, ValueError) as e:
            logger.debug("%s is not known: %s", host, e)
        with self._answered:
            # What DNS knows no more may come back: it is asked for again.
            name.addresses, name.doubted = addresses or name.addresses, not addresses
            name.learned_at = time.monotonic()
            name.being_asked = False
            self._answered.notify_all()
