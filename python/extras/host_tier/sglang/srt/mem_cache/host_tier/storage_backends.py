"""The engine's storages (`HiCacheStorage`) as they are used below decode's host memory: each page says which it is.

A page is one value, with a header in front of it: its length, the digest of its whole name (namespace, rank and page),
and a checksum of its bytes. Whatever a storage returns is compared with that, so what was cut short, has changed, or is
another page's counts as not there. It is removed, or it would never be written again.

Upstream: none is known; the engine's pages are bytes of KV alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import struct
import threading
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

__all__ = ["HEADER", "PageStorage", "PagesInFiles", "PagesInMooncake", "open_storage"]

logger = logging.getLogger(__name__)

# Mark, checksum of the page that follows, its length, and the digest of what it is called.
HEADER = struct.Struct("<4sIQ32s")
_MARK = b"PDR2"
# The engine's default, which its class does not say apart.
_DIRECTORY = "/tmp/hicache"
# Mooncake's codes: there is no such object, or somebody is writing it; it is longer than was asked for; the store is
# full.
_MISSING, _LONGER, _NO_SPACE = (-704, -703), -600, -200
# Seconds before each try to write to a Mooncake store. One that is full refuses, and then evicts what nobody has asked
# for lately: of 60 pages all found room within 44 ms.
ROOM_S = (0.0, 0.025, 0.05)


class PageStorage(ABC):
    """Pages of one rank, by name. Any number of threads and processes may use the same.

    Pages are uint8 tensors of ``page_bytes``; names are hexadecimal.
    """

    def __init__(self, folder: str, page_bytes: int):
        """folder: the namespace and the rank, the same for all workers that share pages."""
        self.folder, self.page_bytes = folder, page_bytes
        self._of_thread = threading.local()
        # Pages that were not what had been written.
        self.corrupt = 0

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is a page of that name."""

    def get(self, key: str, page: torch.Tensor) -> torch.Tensor | None:
        """Read a page into ``page``, and return that; None if there is none."""
        room = self._room()
        if not self._read(key, room):
            return None
        found = room[HEADER.size :]
        if bytes(room[: HEADER.size].numpy()) == self._header(key, found):
            return page.copy_(found)
        self.corrupt += 1
        if self.corrupt == 1:
            logger.warning("%s is corrupt and was removed. Further ones are counted, not logged.", key)
        self._remove(key)
        return None

    def set(self, key: str, page: torch.Tensor) -> bool:
        """Write a page. False where the storage has not taken it."""
        room = self._room()
        room[: HEADER.size] = torch.frombuffer(bytearray(self._header(key, page)), dtype=torch.uint8)
        room[HEADER.size :] = page
        return self._write(key, room)

    def _header(self, key: str, page: torch.Tensor) -> bytes:
        name = hashlib.sha256(f"{self.folder}/{key}".encode()).digest()
        return HEADER.pack(_MARK, zlib.crc32(memoryview(page.numpy())), page.numel(), name)

    def _room(self) -> torch.Tensor:
        """Room for a header and a page, of this thread; without a header in it."""
        room: torch.Tensor | None = getattr(self._of_thread, "room", None)
        if room is None:
            room = self._of_thread.room = torch.zeros(HEADER.size + self.page_bytes, dtype=torch.uint8)
            self._register(room)
        room[: HEADER.size] = 0
        return room

    def _register(self, room: torch.Tensor) -> None:
        """Have the storage know memory that it reads and writes; nothing, where it need not."""
        return None

    @abstractmethod
    def _read(self, key: str, room: torch.Tensor) -> bool:
        """Read what is there into ``room``; whether anything is."""

    @abstractmethod
    def _write(self, key: str, room: torch.Tensor) -> bool:
        """Write ``room``; whether it is there now."""

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Remove what is there."""


class _WholeFiles(HiCacheFile):
    """The engine's files, in a folder of one rank's. Each is written beside and renamed.

    The engine's writes in place, and nothing where there is a file: a worker that is killed, or a full disk, would
    leave a part of a page under its name for ever.
    """

    def __init__(self, folder: Path):
        """Raises OSError where it can neither be found nor made."""
        self.file_path, self.config_suffix = str(folder), ""
        folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: Any = None, *_: Any) -> bool:
        """Raises OSError."""
        path = self._get_component_path(key)
        part = f"{path}.{uuid.uuid4().hex}.part"
        try:
            os.makedirs(self.file_path, exist_ok=True)
            with open(part, "wb") as file:
                file.write(memoryview(value.numpy()))
            os.replace(part, path)
            return True
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)


class PagesInFiles(PageStorage):
    """Pages in files below a directory that the workers share."""

    def __init__(self, root: Path, folder: str, page_bytes: int):
        """Raises OSError."""
        super().__init__(folder, page_bytes)
        self.path = root / folder
        self.place, self._files = str(self.path), _WholeFiles(self.path)

    def exists(self, key: str) -> bool:
        return bool(self._files.exists(key))

    def _read(self, key: str, room: torch.Tensor) -> bool:
        # What is longer than a page is none, and so is what has gone meanwhile.
        path = self._files._get_component_path(key)
        try:
            size = os.stat(path).st_size
            return size != room.numel() or self._files.get(key, room) is not None
        except FileNotFoundError:
            return False

    def _write(self, key: str, room: torch.Tensor) -> bool:
        return self._files.set(key, room)

    def _remove(self, key: str) -> None:
        # Another reader may have been faster.
        Path(self._files._get_component_path(key)).unlink(missing_ok=True)


class PagesInMooncake(PageStorage):
    """Pages in a Mooncake store, to which the engine's `MooncakeStore` connects. Each is one object.

    Of the engine's own calls all errors are a page that is not there; the library's say which they are.
    """

    def __init__(self, folder: str, page_bytes: int, options: Mapping[str, Any], tp_size: int):
        """options: the engine's, of the extra config; where it says nothing its file's or variables count."""
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        super().__init__(folder, page_bytes)
        engines = MooncakeStore(
            HiCacheStorageConfig(0, tp_size, 0, 1, True, False, True, None, extra_config=dict(options))
        )
        self.place, self._store = f"{engines.config.master_server_address}/{folder}", engines.store
        # Kept for ever, as what is registered.
        self._rooms: list[torch.Tensor] = []

    def _register(self, room: torch.Tensor) -> None:
        self._done(self._store.register_buffer(room.data_ptr(), room.numel()), "registers no memory")
        self._rooms.append(room)

    @staticmethod
    def _done(code: int, what: str) -> None:
        if code < 0:
            raise OSError(errno.EIO, f"Mooncake {what}: code {code}")

    def _name(self, key: str) -> str:
        return f"{self.folder}/{key}"

    def exists(self, key: str) -> bool:
        code = self._store.is_exist(self._name(key))
        self._done(code, "does not say what it has")
        return bool(code == 1)

    def _read(self, key: str, room: torch.Tensor) -> bool:
        length = self._store.get_into(self._name(key), room.data_ptr(), room.numel())
        if length in _MISSING:
            return False
        if length != _LONGER:
            self._done(length, "reads no page")
        if length != room.numel():
            room[: HEADER.size] = 0
        return True

    def _write(self, key: str, room: torch.Tensor) -> bool:
        for wait_s in ROOM_S:
            time.sleep(wait_s)
            code = self._store.put_from(self._name(key), room.data_ptr(), room.numel())
            if code != _NO_SPACE:
                self._done(code, "writes no page")
                return True
        return False

    def _remove(self, key: str) -> None:
        self._store.remove(self._name(key), True)


def open_storage(
    name: str, folder: str, page_bytes: int, options: Mapping[str, Any], tp_size: int
) -> PagesInFiles | PagesInMooncake:
    """The storage called ``name``. Raises ValueError.

    options: the extra config, without what decode reads itself. tp_size: ranks that share what a worker gives to it.
    """
    try:
        if name == "mooncake":
            return PagesInMooncake(folder, page_bytes, options, tp_size)
        root = Path(envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or _DIRECTORY)
        return PagesInFiles(root, folder, page_bytes)
    except Exception as e:
        raise ValueError(f"--hicache-storage-backend {name} does not start: {e}") from e
