"""Which device a rank computes on, as prefill and decode compare it: they may share one.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

__all__ = ["own_device"]

# The kernel's number for this boot: containers of one host have the same.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_device() -> str | None:
    """A short name of the GPU of this process, made of its host and its UUID; None without one.

    For the scheduler's thread: other threads of the process have the first device.
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
