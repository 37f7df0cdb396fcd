"""The engine's storages (`HiCacheStorage`) below decode's host memory, with a header in front of each page.

The header has the page's length, a digest of its full name (namespace, rank and page) and a checksum of its bytes. A
page that does not match, because it was truncated, changed or belongs to another name, counts as missing and is
removed; otherwise it would never be written again.

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

# Magic, checksum of the page, its length, digest of its full name.
HEADER = struct.Struct("<4sIQ32s")
_MARK = b"PDR2"
# The engine's default; the engine has no constant for it.
_DIRECTORY = "/tmp/hicache"
# Mooncake's codes: no such object, or it is being written; longer than requested; the store is full.
_MISSING, _LONGER, _NO_SPACE = (-704, -703), -600, -200
# Seconds before each attempt to write to a Mooncake store. A full one refuses, and then evicts objects not read
# lately: after 44 ms there was space for each of 60 pages.
ROOM_S = (0.0, 0.025, 0.05)


class PageStorage(ABC):
    """Pages of one rank, by name. Threads and processes may share a storage.

    Pages are uint8 tensors of ``page_bytes``; names are hexadecimal.
    """

    def __init__(self, folder: str, page_bytes: int):
        """folder: the namespace and the rank, the same for all workers that share pages."""
        self.folder, self.page_bytes = folder, page_bytes
        self._of_thread = threading.local()
        # Pages that failed the comparison with their header.
        self.corrupt = 0

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the page is stored."""

    def get(self, key: str, page: torch.Tensor) -> torch.Tensor | None:
        """Read a page into ``page`` and return it; None if it is not stored."""
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
        """Write a page. False if the storage refused it."""
        room = self._room()
        room[: HEADER.size] = torch.frombuffer(bytearray(self._header(key, page)), dtype=torch.uint8)
        room[HEADER.size :] = page
        return self._write(key, room)

    def _header(self, key: str, page: torch.Tensor) -> bytes:
        name = hashlib.sha256(f"{self.folder}/{key}".encode()).digest()
        return HEADER.pack(_MARK, zlib.crc32(memoryview(page.numpy())), page.numel(), name)

    def _room(self) -> torch.Tensor:
        """This thread's buffer for a header and a page; the header is zeroed."""
        room: torch.Tensor | None = getattr(self._of_thread, "room", None)
        if room is None:
            room = self._of_thread.room = torch.zeros(HEADER.size + self.page_bytes, dtype=torch.uint8)
            self._register(room)
        room[: HEADER.size] = 0
        return room

    def _register(self, room: torch.Tensor) -> None:
        """Register memory that the storage reads and writes, if it requires that."""
        return None

    @abstractmethod
    def _read(self, key: str, room: torch.Tensor) -> bool:
        """Read the stored object into ``room``; returns whether there is one."""

    @abstractmethod
    def _write(self, key: str, room: torch.Tensor) -> bool:
        """Write ``room``; returns whether it is stored now."""

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Remove the stored object."""


class _WholeFiles(HiCacheFile):
    """The engine's files, in a folder of one rank. Each is written to a temporary file and renamed.

    The engine writes in place, and skips a file that exists: a killed worker or a full disk would leave a partial
    page under its name.
    """

    def __init__(self, folder: Path):
        """Raises OSError if the folder can be neither found nor created."""
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
        # A longer object is corrupt. A missing one may just have been removed.
        path = self._files._get_component_path(key)
        try:
            size = os.stat(path).st_size
            return size != room.numel() or self._files.get(key, room) is not None
        except FileNotFoundError:
            return False

    def _write(self, key: str, room: torch.Tensor) -> bool:
        return self._files.set(key, room)

    def _remove(self, key: str) -> None:
        # Another reader may have removed it already.
        Path(self._files._get_component_path(key)).unlink(missing_ok=True)


class PagesInMooncake(PageStorage):
    """Pages in a Mooncake store, to which the engine's `MooncakeStore` connects. Each is one object.

    The engine's calls report every error as a missing page; the library's calls return a code.
    """

    def __init__(self, folder: str, page_bytes: int, options: Mapping[str, Any], tp_size: int):
        """options: the engine's extra config; for those not given, the engine reads its file or variables."""
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        super().__init__(folder, page_bytes)
        config = HiCacheStorageConfig(0, tp_size, 0, 1, True, False, True, None, extra_config=dict(options))
        try:
            engines = MooncakeStore(config)
        except AssertionError as e:
            # Of its warm-up, without a text.
            raise OSError(
                "a test page could not be written and read. No worker contributes memory (global_segment_size), or the "
                "master still offers that of a killed worker, for its --client_ttl (10 s): start again after that"
            ) from e
        self.place, self._store = f"{engines.config.master_server_address}/{folder}", engines.store
        # Buffers are kept because they are registered.
        self._rooms: list[torch.Tensor] = []

    def _register(self, room: torch.Tensor) -> None:
        self._done(self._store.register_buffer(room.data_ptr(), room.numel()), "cannot register memory")
        self._rooms.append(room)

    @staticmethod
    def _done(code: int, what: str) -> None:
        if code < 0:
            raise OSError(errno.EIO, f"Mooncake {what}: code {code}")

    def _name(self, key: str) -> str:
        return f"{self.folder}/{key}"

    def exists(self, key: str) -> bool:
        code = self._store.is_exist(self._name(key))
        self._done(code, "cannot look up a page")
        return bool(code == 1)

    def _read(self, key: str, room: torch.Tensor) -> bool:
        length = self._store.get_into(self._name(key), room.data_ptr(), room.numel())
        if length in _MISSING:
            return False
        if length != _LONGER:
            self._done(length, "cannot read a page")
        if length != room.numel():
            room[: HEADER.size] = 0
        return True

    def _write(self, key: str, room: torch.Tensor) -> bool:
        for wait_s in ROOM_S:
            time.sleep(wait_s)
            code = self._store.put_from(self._name(key), room.data_ptr(), room.numel())
            if code != _NO_SPACE:
                self._done(code, "cannot write a page")
                return True
        return False

    def _remove(self, key: str) -> None:
        self._store.remove(self._name(key), True)


def open_storage(
    name: str, folder: str, page_bytes: int, options: Mapping[str, Any], tp_size: int
) -> PagesInFiles | PagesInMooncake:
    """The storage called ``name``. Raises ValueError.

    options: the extra config without decode's own options. tp_size: ranks that share the memory a worker contributes.
    """
    try:
        if name == "mooncake":
            return PagesInMooncake(folder, page_bytes, options, tp_size)
        root = Path(envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or _DIRECTORY)
        return PagesInFiles(root, folder, page_bytes)
    except Exception as e:
        raise ValueError(f"--hicache-storage-backend {name} does not start: {e}") from e
