"""The storage backends as tests make them and look into them. A kind is a text, which other processes can be told.

``file``, or what `mooncake_master.Master.kind` says.
"""

from __future__ import annotations

import copy
import hashlib
import re
from pathlib import Path
from typing import Any

from mooncake_master import HOST, keys
from sglang.srt.mem_cache.host_tier.storage_backends import PagesInFiles, PagesInMooncake, PageStorage

KINDS = ["file", "mooncake"]
SEGMENT = 64 * 1024**2
_CLIENTS: dict[str, PagesInMooncake] = {}


def opened(kind: str, folder: Path | str, page_bytes: int) -> PageStorage:
    """A storage of one worker."""
    name, *master = kind.split()
    if name == "file":
        return PagesInFiles(Path(folder).parent, Path(folder).name, page_bytes)
    # To start and to close a client takes seconds: all of this process have one.
    if master[0] not in _CLIENTS:
        _CLIENTS[master[0]] = client(master[0], page_bytes)
    one = copy.copy(_CLIENTS[master[0]])
    PageStorage.__init__(one, hashlib.sha256(str(folder).encode()).hexdigest(), page_bytes)
    return one


def client(address: str, page_bytes: int, given: int = SEGMENT, folder: str = "unit") -> PagesInMooncake:
    """A client of the store of a master, to which it gives so many bytes."""
    options = {
        "master_server_address": address,
        "local_hostname": HOST,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": given,
    }
    return PagesInMooncake(folder, page_bytes, options, 1)


def close_clients() -> None:
    """Of this process."""
    while _CLIENTS:
        _CLIENTS.popitem()[1]._store.close()


class Inside:
    """What is in a storage, by the names of pages."""

    def __init__(self, kind: str, storage: Any):
        self._storage, self._master = storage, kind.split()[1:]

    def names(self) -> list[str]:
        if not self._master:
            return sorted(path.stem for path in self._storage.path.glob("*.bin"))
        name = re.compile(re.escape(self._storage.folder) + "/([0-9a-f]+)")
        return sorted(match[1] for key in keys(int(self._master[1])) if (match := name.fullmatch(key)))

    def data(self, name: str) -> bytes:
        """Header and page."""
        return self._store.get(self._key(name)) if self._master else self._path(name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """In the place of what is there."""
        if self._master:
            self.lose(name)
            assert self._store.put(self._key(name), data) == 0
        else:
            self._path(name).write_bytes(data)

    def lose(self, name: str) -> None:
        if self._master:
            assert self._store.remove(self._key(name), True) == 0
        else:
            self._path(name).unlink()

    @property
    def _store(self) -> Any:
        return self._storage._store

    def _key(self, name: str) -> str:
        return self._storage._name(name)

    def _path(self, name: str) -> Path:
        return self._storage.path / f"{name}.bin"
