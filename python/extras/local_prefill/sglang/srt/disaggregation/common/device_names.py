"""Names of devices, by which prefill and decode find out whether they share one.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

__all__ = ["own_device"]

# The kernel's id of this boot, equal in all containers of a host.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_device() -> str | None:
    """A digest of host and UUID of this process's GPU; None without a GPU.

    For the scheduler thread: other threads have the first device as current one.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    if uuid is None:
        return None
    try:
        host = _BOOT_ID.read_text().strip()
    except OSError:
        host = ""
    return hashlib.blake2b(f"{host}/{uuid}".encode(), digest_size=8).hexdigest()
