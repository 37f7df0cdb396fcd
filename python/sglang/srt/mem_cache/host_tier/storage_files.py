"""Storage backend ``file``: a directory, in which files are whole or not there.

The engine's backend of that name writes a file in place: a worker that is killed leaves a part of one under its name
for ever, and who reads while another writes gets a part. Here a file is written beside and renamed, and says how long
its page is and the checksum of its name and it. Checked are length and checksum (CRC-32) of each page that is read:
that finds files cut short, bits that have changed and another page's file, not somebody who means harm. Whoever may
write to the directory decides what the model reads.

Upstream: none is known.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.host_tier.storage_backend import HEADER, PageStorage, is_whole, seal

__all__ = ["OPTIONS", "PageFiles", "made_in", "open_storage", "read"]

# What `--hicache-storage-backend-extra-config` may have for it.
OPTIONS: tuple[str, ...] = ()
DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
# What a worker that was killed has left half written or half removed is removed when it is as old.
LEFT_S = 3600.0
# In the name of a folder that is being removed.
_GONE = ".gone-"
# Errors that one file may have alone: a bad sector, another's rights.
_OF_A_FILE = {errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ESTALE, errno.EBADMSG, errno.EUCLEAN}
# When so many files in a row have one, it is the storage's. Names of files that could not be removed.
MOST_IN_A_ROW, MOST_UNREADABLE = 3, 4096


def read(given: Mapping[str, Any]) -> None:
    """There are no options of its own."""


def open_storage(folder: str, page_bytes: int, options: None, tp_size: int) -> PageFiles:
    """Pages in ``folder``. Raises ValueError."""
    # The engine's default, which its class does not say apart.
    return made_in("file", DIRECTORY, "/tmp/hicache", lambda root: PageFiles(root / folder, page_bytes))


def made_in(backend: str, variable: str, default: str, make: Callable[[Path], PageFiles]) -> PageFiles:
    """What ``make`` makes in the directory that ``variable`` names. Raises ValueError if that cannot be used."""
    root = Path(os.environ.get(variable) or default)
    try:
        return make(root)
    except OSError as e:
        raise ValueError(
            f"--hicache-storage-backend {backend} cannot use {root}: {e}. Make it, or name another directory with "
            f"{variable}."
        ) from e


class PageFiles(PageStorage):
    """Pages of one rank, each in a file. Any number of processes may read and write the same folder."""

    def __init__(self, folder: Path | str, page_bytes: int):
        """Raises OSError if the folder can neither be found nor made."""
        super().__init__(str(folder), page_bytes)
        self.folder = Path(folder)
        self._parts, self._id_file = self.folder / "parts", self.folder / "id"
        # Names of files that could not be read since one was; and of those that are no pages, and could not be removed.
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
        return f"{self.folder}/{key}.bin"

    def exists(self, key: str) -> bool:
        """Whether there is a file as long as it has to be, and not one that could not be read."""
        try:
            return key not in self._unreadable and os.stat(self._path(key)).st_size == HEADER.size + self.page_bytes
        except FileNotFoundError:
            return False

    def note_use(self, key: str) -> None:
        """Have it count as used now, for who removes what is old: what stays in host memory is not read again."""
        with contextlib.suppress(OSError):
            os.utime(self._path(key))

    def get(self, key: str, page: torch.Tensor) -> torch.Tensor | None:
        """Read a page into ``page``; None if there is none. A file that is no page is removed."""
        if key in self._unreadable:
            return None
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                header = self._read(file, page)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno not in _OF_A_FILE or self._fails(key):
                raise
            self._remove(key, str(e.strerror))
            return None
        self._in_a_row.clear()
        if header is not None and is_whole(key, header, memoryview(page.numpy())):
            return page
        self._remove(key, "changed or cut short")
        return None

    def _read(self, file: io.FileIO, page: torch.Tensor) -> bytes | None:
        """Read what is in a file into ``page``; returns what stands in front of it, None if it has another length."""
        header = bytearray(HEADER.size)
        for data in (header, memoryview(page.numpy())):
            left = memoryview(data)
            while left:
                # A file system over a network may give a part of it at a time.
                read = file.readinto(left)
                if not read:
                    return None
                left = left[read:]
        return None if file.read(1) else bytes(header)

    def _write(self, file: io.FileIO, header: bytes, page: torch.Tensor) -> None:
        """Write a page into an empty file."""
        for data in (header, memoryview(page.numpy())):
            left = memoryview(data)
            while left:
                # On a disk that is about to be full, a part is written first.
                left = left[file.write(left) :]

    def _fails(self, key: str) -> bool:
        """Whether, with ``key``, so many files in a row cannot be read that it is not theirs."""
        if len(self._in_a_row) < MOST_IN_A_ROW:
            self._in_a_row.add(key)
        return len(self._in_a_row) >= MOST_IN_A_ROW

    def _remove(self, key: str, why: str) -> None:
        """Remove a file that is no page, or it would never be written again."""
        self._count_corrupt(key, why)
        try:
            os.unlink(self._path(key))
        except FileNotFoundError:
            pass
        except OSError:
            if len(self._unreadable) >= MOST_UNREADABLE:
                self._unreadable.clear()
            self._unreadable.add(key)

    def set(self, key: str, value: torch.Tensor) -> bool:
        """Write a page. Where the folder has gone, also since the write began, it is made anew."""
        try:
            self._put(key, value)
        except FileNotFoundError:
            self._make()
            self._put(key, value)
        self._unreadable.discard(key)
        return True

    def _put(self, key: str, page: torch.Tensor) -> None:
        # Processes in several containers may have one number.
        part = self._parts / uuid.uuid4().hex
        try:
            with open(part, "wb", buffering=0) as file:
                self._write(file, seal(key, memoryview(page.numpy())), page)
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
