"""The engine's file backend, with files that are whole or not there.

The engine writes a file in place: a worker that is killed leaves a part of one under its name for ever, and who reads
while another writes gets a part. Here a file is written beside and renamed, and says how long its page is and the
checksum of it. Checked are length and checksum (CRC-32) of each page that is read: that finds files cut short and bits
that have changed, not somebody who means harm. Whoever may write to the directory decides what the model reads.

Upstream: none is known.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import struct
import threading
import time
import uuid
import zlib
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

__all__ = ["PageFiles", "directory"]

logger = logging.getLogger(__name__)

# Mark, length and checksum of the page that follows.
_HEADER = struct.Struct("<4sIQ")
_MARK = b"PDR1"
# What a worker that was killed has left half written or half removed is removed when it is as old.
LEFT_S = 3600.0
# In the name of a folder that is being removed.
_GONE = ".gone-"
# Errors that one file may have alone: a bad sector, another's rights.
_OF_A_FILE = {errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ESTALE, errno.EBADMSG, errno.EUCLEAN}
# When so many files in a row have one, it is the storage's. Names of files that could not be removed.
MOST_IN_A_ROW, MOST_UNREADABLE = 3, 4096


def directory() -> Path:
    """The engine's directory for files."""
    # The engine's default, which its class does not say apart.
    from sglang.srt.environ import envs

    return Path(envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or "/tmp/hicache")


class PageFiles(HiCacheFile):
    """Pages of one rank, each in a file. Any number of processes may read and write the same folder.

    Pages are uint8 tensors of ``page_bytes``. What a method raises is an OSError; a file that is not there, cannot be
    read, or is not what was written, is none.
    """

    def __init__(self, folder: str, page_bytes: int):
        """folder: below the engine's directory. Raises OSError if it can neither be found nor made."""
        root = directory()
        # Not by the engine, which fails where two workers begin at once.
        root.mkdir(parents=True, exist_ok=True)
        super().__init__(
            HiCacheStorageConfig(
                tp_rank=0,
                tp_size=1,
                pp_rank=0,
                pp_size=1,
                is_mla_model=True,
                enable_storage_metrics=False,
                is_page_first_layout=False,
                model_name=None,
            )
        )
        self.folder, self.page_bytes = root / folder, page_bytes
        self.file_path = str(self.folder)
        self._parts, self._id_file = self.folder / "parts", self.folder / "id"
        # Files that could not be read, or were not what had been written.
        self.corrupt = 0
        # Names of those that could not be read since one was; and of those that are no pages, and could not be removed.
        self._in_a_row: set[str] = set()
        self._unreadable: set[str] = set()
        self._make()
        # What the folder was called when this was last looked at.
        self._known = self._id()

    def _make(self) -> None:
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            if not self._id_file.exists():
                # Of two that make it at once, the last one gives its name.
                part = self._parts / uuid.uuid4().hex
                part.write_text(uuid.uuid4().hex)
                os.replace(part, self._id_file)
        except OSError:
            # Of a directory that may only be read, a worker reads what others have put there.
            if not self.folder.is_dir():
                raise

    def _id(self) -> str | None:
        """What the folder is called, another name whenever it is made anew; None if it has none."""
        try:
            return self._id_file.read_text()
        except OSError:
            return None

    def was_cleared(self) -> bool:
        """Whether somebody else has cleared the folder since this was last asked, or may have."""
        known, self._known = self._known, self._id()
        return self._known != known

    def remove_left(self) -> None:
        """Remove what others have left half written, or half removed."""
        for part in _old(self._parts, ""):
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        # While somebody removes it, such a folder changes.
        for gone in _old(self.folder.parent, f"{self.folder.name}{_GONE}"):
            _remove_folder(gone)

    def _path(self, key: str) -> str:
        return f"{self.file_path}/{key}.bin"

    def exists(self, key: str) -> bool:
        """Whether there is a file as long as it has to be, and not one that could not be read."""
        try:
            return key not in self._unreadable and os.stat(self._path(key)).st_size == _HEADER.size + self.page_bytes
        except FileNotFoundError:
            return False

    def note_use(self, key: str) -> None:
        """Have it count as used now, for who removes what is old: what stays in host memory is not read again."""
        with contextlib.suppress(OSError):
            os.utime(self._path(key))

    def get(self, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> torch.Tensor | None:
        """Read a page into ``target_location``; None if there is none. A file that is no page is removed."""
        if key in self._unreadable:
            return None
        page = memoryview(target_location.numpy())
        header = bytearray(_HEADER.size)
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                read = file.readinto(header) + file.readinto(page)
                longer = file.read(1)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno not in _OF_A_FILE or self._fails(key):
                raise
            self._remove(key, str(e.strerror))
            return None
        self._in_a_row.clear()
        mark, checksum, length = _HEADER.unpack(header)
        whole = read == _HEADER.size + self.page_bytes and not longer and length == self.page_bytes
        if whole and mark == _MARK and checksum == zlib.crc32(page):
            return target_location
        self._remove(key, "changed or cut short")
        return None

    def _fails(self, key: str) -> bool:
        """Whether, with ``key``, so many files in a row cannot be read that it is not theirs."""
        if len(self._in_a_row) < MOST_IN_A_ROW:
            self._in_a_row.add(key)
        return len(self._in_a_row) >= MOST_IN_A_ROW

    def _remove(self, key: str, why: str) -> None:
        """Remove a file that is no page, or it would never be written again."""
        self.corrupt += 1
        if self.corrupt == 1:
            logger.warning(
                "%s is not what was written (%s): such files are removed, and counted from now on.", key, why
            )
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            pass
        except OSError:
            if len(self._unreadable) >= MOST_UNREADABLE:
                self._unreadable.clear()
            self._unreadable.add(key)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write a page. Where the folder has gone, also since the write began, it is made anew."""
        page = memoryview(value.numpy())
        try:
            self._write(key, page)
        except FileNotFoundError:
            self._make()
            self._write(key, page)
        self._unreadable.discard(key)
        return True

    def _write(self, key: str, page: memoryview) -> None:
        # Processes in several containers may have one number.
        part = self._parts / uuid.uuid4().hex
        try:
            with open(part, "wb", buffering=0) as file:
                for data in (_HEADER.pack(_MARK, zlib.crc32(page), self.page_bytes), page):
                    left = memoryview(data)
                    while left:
                        # On a disk that is about to be full, a part is written first.
                        left = left[file.write(left) :]
            os.replace(part, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def clear(self) -> bool:
        """Remove all pages of this rank, also those of other workers with the same model."""
        gone = self.folder.with_name(f"{self.folder.name}{_GONE}{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            # At once for who reads, however many there are.
            os.rename(self.folder, gone)
        self._unreadable.clear()
        with contextlib.suppress(OSError):
            # All is gone, whatever this says: another worker, or a DP rank with the same folder, may clear it too. Who
            # writes next makes it.
            self._make()
        self._known = self._id()
        _remove_folder(gone)
        return True


def _old(folder: Path, prefix: str) -> list[Path]:
    """What is in ``folder`` under such names and has not changed for long."""
    old = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            # Another worker may have renamed or removed it meanwhile.
            with contextlib.suppress(OSError):
                if path.name.startswith(prefix) and time.time() - path.stat().st_mtime > LEFT_S:
                    old.append(path)
    return old


def _remove_folder(folder: Path) -> None:
    """In a thread, however much is in it."""
    threading.Thread(target=shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, daemon=True).start()
