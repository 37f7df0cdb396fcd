"""The storage backends that may be below decode's host memory: their options, and how one is opened.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang.srt.mem_cache.host_tier import storage_files, storage_mooncake, storage_nixl
from sglang.srt.mem_cache.host_tier.checks import NOTHING, Taken
from sglang.srt.mem_cache.host_tier.storage_backend import PageStorage

__all__ = ["BACKENDS", "Backend"]


class Backend(NamedTuple):
    """A storage backend.

    options: what the extra config may have for it. read: checks these, and that its library is there; raises
    ValueError. open: of a folder's name, bytes of a page, what ``read`` returned and the number of ranks, the storage;
    raises ValueError. memory: of what ``read`` returned and the number of ranks, what it takes of each.
    """

    options: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Any]
    open: Callable[[str, int, Any, int], PageStorage]
    memory: Callable[[Any, int], Taken] = lambda options, tp_size: NOTHING


BACKENDS = {
    "file": Backend(storage_files.OPTIONS, storage_files.read, storage_files.open_storage),
    "nixl": Backend(storage_nixl.OPTIONS, storage_nixl.read, storage_nixl.open_storage),
    "mooncake": Backend(
        storage_mooncake.OPTIONS, storage_mooncake.read, storage_mooncake.open_storage, storage_mooncake.memory
    ),
}
