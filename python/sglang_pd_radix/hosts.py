"""Which addresses are this host's."""

from __future__ import annotations

import ipaddress

import psutil


def is_loopback(address: str) -> bool:
    """Whether an IP address means whichever host it is used on. Raises ValueError for what is no address."""
    known = ipaddress.ip_address(address.partition("%")[0])
    return known.is_loopback or known.is_unspecified


def host_addresses() -> set[str]:
    """What the network interfaces of this host have, MAC addresses too; of IPv6 with the scope where there is one."""
    return {one.address for found in psutil.net_if_addrs().values() for one in found}
