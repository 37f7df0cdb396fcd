"""Whether a peer's process has ended: its host then refuses connections to its port.

No answer proves nothing: the network may be cut, or the process hung.

Upstream: none is known.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

Endpoint = tuple[str, int]
# An address family and a socket address; for IPv6 with scope, which link-local addresses need.
Address = tuple[int, tuple[Any, ...]]

# Seconds to wait for answers in one look at any number of peers: longer than a round trip around the world.
ANSWER_S = 0.2
# Seconds between the two looks that have to agree.
AGAIN_S = 0.075


def host_and_port(addr: str) -> Endpoint:
    """Parses an address in the engine's format."""
    parsed = NetworkAddress.parse(addr)
    return parsed.host, parsed.port


def is_address(host: str) -> bool:
    """Whether it is numeric, so that it needs no DNS."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(endpoint: Endpoint, flags: int = 0) -> set[Address]:
    try:
        found = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, OverflowError, ValueError) as e:
        logger.debug("%s:%s cannot be checked: %s", *endpoint, e)
        return set()
    return {(family, at) for family, _, _, _, at in found if 0 < endpoint[1] < 65536}


def _refused(addresses: Iterable[Address]) -> set[Address]:
    """Those that refuse connections. All are tried at once."""
    poller = select.poll()
    asked: dict[int, tuple[Address, socket.socket]] = {}
    refused: set[Address] = set()
    try:
        for family, at in addresses:
            probe = socket.socket(family, socket.SOCK_STREAM)
            asked[probe.fileno()] = (family, at), probe
            probe.setblocking(False)
            if probe.connect_ex(at) == errno.ECONNREFUSED:
                refused.add((family, at))
            else:
                poller.register(probe, select.POLLOUT)
        waiting, deadline = len(asked) - len(refused), time.monotonic() + ANSWER_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                waiting -= 1
                address, probe = asked[fd]
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                    refused.add(address)
    finally:
        for _, probe in asked.values():
            probe.close()
    return refused


def refusing(endpoints: Iterable[Endpoint]) -> set[Endpoint]:
    """The ``endpoints``, by numeric address, that refuse connections."""
    addresses = {endpoint: _addresses(endpoint, socket.AI_NUMERICHOST) for endpoint in endpoints}
    refused = _refused({address for found in addresses.values() for address in found})
    return {endpoint for endpoint, found in addresses.items() if found & refused}


def gone(endpoints: Iterable[Endpoint]) -> set[Endpoint]:
    """The ``endpoints``, by numeric address, that refuse connections twice."""
    found = refusing(endpoints)
    if found:
        time.sleep(AGAIN_S)
        found = refusing(found)
    return found


def nothing_listens(host: str, port: int) -> bool:
    """Whether all addresses of the host refuse connections to ``port``. Blocks: for threads that may wait."""
    addresses = _addresses((host, port))
    return bool(addresses) and _refused(addresses) == addresses
