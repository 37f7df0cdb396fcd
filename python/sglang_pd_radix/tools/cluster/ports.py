"""Free ports of this machine for servers to start."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from sglang_pd_radix.errors import PdRadixError

from .options import HOST

# Offsets from its port at which an engine with DP attention listens: for its DP ranks' handshake and its own processes.
DP_ATTENTION_OFFSETS = (0, 13, *range(233, 239))
# Mooncake takes random ports of this range, also those of servers that have not bound theirs yet.
MOONCAKE_PORTS = range(15000, 17001)


def free_ports(count: int, host: str = HOST, taken: Collection[int] = (), offsets: Sequence[int] = (0,)) -> list[int]:
    """``count`` different ports without a listener, not in ``taken``.

    offsets: further ports of a server, relative to its port; these are free and unshared too.

    They are below the ephemeral range and not in `MOONCAKE_PORTS`: a server binds its port many seconds later.
    """
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = 32768
    candidates = range(10000, first_ephemeral) if first_ephemeral > 11000 else range(10000, 65536)
    found: list[int] = []
    reserved = {*taken, *MOONCAKE_PORTS}
    for port in random.Random(os.urandom(8)).sample(candidates, min(len(candidates), 50 * count + 200)):
        if len(found) == count:
            break
        places = {port + offset for offset in offsets}
        if places & reserved or max(places) >= candidates.stop or not all(_is_free(host, place) for place in places):
            continue
        reserved |= places
        found.append(port)
    if len(found) < count:
        raise PdRadixError(f"found only {len(found)} of {count} free ports on {host}: close some listening programs")
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
