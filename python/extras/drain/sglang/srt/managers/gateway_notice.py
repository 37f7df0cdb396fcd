"""Before it shuts down, a worker removes itself from its gateways, so that they send no requests it would refuse.

Upstream: none is known.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import requests
from sglang.srt.utils.network import get_local_ip_auto

from sglang_pd_radix.environment import API_KEY, servers_key
from sglang_pd_radix.hosts import host_addresses, is_loopback

logger = logging.getLogger(__name__)

__all__ = ["VARIABLE", "gateways", "key_for", "leave", "leave_all", "listened_at", "own_addresses"]

VARIABLE = "SGLANG_DISAGGREGATION_GATEWAYS"
# Seconds for an answer of a gateway, and for the removal; seconds between checks of the removal.
ANSWER_S, LEAVE_S, LOOK_S = 3.0, 10.0, 0.1
# A gateway with --dp-aware lists each DP rank as a worker, with this suffix of the address.
_RANK = re.compile(r"@\d+$")


def gateways() -> list[str]:
    """Addresses of the gateways to notify. Raises ValueError for an invalid one."""
    given = [one.strip().rstrip("/") for one in os.environ.get(VARIABLE, "").split(",") if one.strip()]
    for one in given:
        if not _is_url(one):
            raise ValueError(f"{VARIABLE} has {one!r}: give URLs such as http://10.0.0.3:30002, separated by commas.")
    return given


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # An invalid address or port.
        return False


def key_for(args: Any) -> str | None:
    """The key for gateways: the tools' or this worker's own; None if there is none."""
    return servers_key() or args.api_key or None


def own_addresses(host: str) -> set[str]:
    """Addresses of this worker's names, without scopes. host: where its HTTP server listens."""
    names = {host, socket.gethostname()}
    try:
        # SGLANG_HOST_IP, if set.
        names.add(get_local_ip_auto())
    except Exception as e:
        logger.debug("No address of the default route: %s", e)
    return {_bare(address) for name in names for address in _addresses(name)}


def listened_at(host: str) -> set[str]:
    """Addresses of all interfaces, without scopes, if ``host`` is 0.0.0.0 or ::, where the server listens on all.

    Of one IP version: the server's socket at :: accepts IPv6 only.
    """
    versions = {_version(one) for one in _addresses(host) if ipaddress.ip_address(one).is_unspecified}
    try:
        return {one for one in map(_bare, host_addresses()) if _version(one) in versions}
    except OSError as e:
        logger.debug("No addresses of interfaces: %s", e)
        return set()


def _version(address: str) -> int | None:
    """4 or 6; None for a MAC address."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return None


def _bare(address: str) -> str:
    """The address without its scope, which is local to each host."""
    return address.partition("%")[0]


def _addresses(name: str) -> set[str]:
    """Addresses of a name as `host_addresses` writes them: link-local ones with their scope."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), None)
        return {socket.getnameinfo(info[4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0] for info in found}
    except OSError:
        return set()


def _is_here(url: str) -> bool:
    """Whether a gateway is on this host: all addresses of its name belong to this host."""
    own = host_addresses()
    addresses = _addresses(urlsplit(url).hostname or "")
    return bool(addresses) and all(one in own or is_loopback(one) for one in addresses)


def leave_all(urls: Collection[str], role: str, host: str, port: int, key: str | None = None) -> None:
    """Remove this worker from all these gateways; failures are logged.

    key: as in `leave`.
    """
    own, others = own_addresses(host), listened_at(host)
    loopback = {address for address in own | others if is_loopback(address)}

    def leave_one(url: str) -> None:
        try:
            here = _is_here(url)
            # For a gateway on another host, a loopback address is its own, and a private address of an interface may
            # be: docker0 has the same on all hosts.
            near = others if here else {one for one in others if ipaddress.ip_address(one).is_global}
            leave(url, role, port, (own | near) - loopback, loopback if here else (), key)
            logger.info("Shutting down: %s no longer sends requests", url)
        except Exception as e:
            logger.warning("Gateway %s did not remove this worker: %s: %s", url, type(e).__name__, e)

    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        pool.map(leave_one, urls)


def leave(
    gateway: str,
    role: str,
    port: int,
    addresses: Collection[str],
    loopback: Collection[str] = (),
    key: str | None = None,
) -> None:
    """Remove the worker at ``port`` of one of these addresses from a gateway (smg), and wait for that.

    With all its ranks, if the gateway lists ranks. loopback: addresses used only if no worker is listed at the others:
    a port of this host may be forwarded to a gateway whose loopback addresses belong to another host. key: for a
    gateway with --api-key. Raises RuntimeError if the gateway requires another key, does not list such a worker, or
    still uses it after `LEAVE_S` seconds; and the errors of requests.
    """
    with requests.Session() as session:
        # Directly, without a proxy.
        session.trust_env = False
        if key:
            session.headers["Authorization"] = f"Bearer {key}"

        def listed() -> list[dict[str, Any]]:
            return _checked(session.get(f"{gateway}/workers", timeout=ANSWER_S)).json()["workers"]

        def those_at(at: Collection[str], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [one for one in found if one.get("worker_type") == role and _is_at(one["url"], port, at)]

        found = listed()
        at = addresses if those_at(addresses, found) else loopback
        workers = those_at(at, found)
        if not workers:
            tried = ", ".join(sorted({*addresses, *loopback}))
            hosts = tried or "this host (set SGLANG_HOST_IP to its address)"
            raise RuntimeError(f"it lists no {role} worker at port {port} of {hosts}")
        for worker in workers:
            _checked(session.delete(f"{gateway}/workers/{worker['id']}", timeout=ANSWER_S))
        until = time.monotonic() + LEAVE_S
        while any(one.get("is_healthy", True) and one.get("status") != "draining" for one in those_at(at, listed())):
            if time.monotonic() > until:
                raise RuntimeError(f"it still uses this worker after {LEAVE_S:g} s")
            time.sleep(LOOK_S)


def _checked(reply: requests.Response) -> requests.Response:
    if reply.status_code == 401:
        raise RuntimeError(f"HTTP 401: it requires a key: set --api-key or {API_KEY} on this worker")
    reply.raise_for_status()
    return reply


def _is_at(url: str, port: int, addresses: Collection[str]) -> bool:
    parts = urlsplit(_RANK.sub("", url))
    default = 443 if parts.scheme == "https" else 80
    return (parts.port or default) == port and not _addresses(_bare(parts.hostname or "")).isdisjoint(addresses)
