"""What a storage does with pages of KV, whichever it is, and how a page that comes from it is known to be whole.

Upstream: none is known.
"""

from __future__ import annotations

import logging
import struct
import zlib
from abc import ABC, abstractmethod
from typing import Any

import torch

__all__ = ["EXTRA_CONFIG", "HEADER", "PageStorage", "Room", "is_whole", "seal"]

logger = logging.getLogger(__name__)

# The option with which a storage's own are given.
EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
# Mark, checksum of the name and the page that follows, and its length.
HEADER = struct.Struct("<4sIQ")
_MARK = b"PDR1"


def seal(key: str, page: memoryview) -> bytes:
    """What is stored in front of a page. key: what it is called where it is stored."""
    return HEADER.pack(_MARK, _checksum(key, page), len(page))


def is_whole(key: str, header: bytes, page: memoryview) -> bool:
    """Whether ``page`` is what ``header`` was written for, under the name ``key``: another's page may be whole too."""
    mark, checksum, length = HEADER.unpack(header)
    return mark == _MARK and length == len(page) and checksum == _checksum(key, page)


def _checksum(key: str, page: memoryview) -> int:
    return zlib.crc32(page, zlib.crc32(key.encode()))


class Room:
    """Room for a page with its header, which a library reads and writes as one piece."""

    def __init__(self, page_bytes: int):
        self.bytes = torch.zeros(HEADER.size + page_bytes, dtype=torch.uint8)
        self._header, self._page = self.bytes[: HEADER.size], self.bytes[HEADER.size :]

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def size(self) -> int:
        """Bytes of header and page."""
        return self.bytes.numel()

    @property
    def header(self) -> bytes:
        return self._header.numpy().tobytes()

    def put(self, header: bytes, page: torch.Tensor) -> None:
        """Put a page there, uint8, and what stands in front of it."""
        self._header.numpy()[:] = memoryview(header)
        self._page.copy_(page)

    def copy_to(self, page: torch.Tensor) -> None:
        """Copy the page that is there to ``page``."""
        page.copy_(self._page)


class PageStorage(ABC):
    """Pages of one rank in a storage, by name. Any number of threads and processes may use the same at once.

    Pages are uint8 tensors of ``page_bytes``; names are hexadecimal. A page is there whole or not at all: one that is
    not what was written counts as not there, and is removed, or it would never be written again. What a method raises
    is an OSError.
    """

    def __init__(self, place: str, page_bytes: int):
        """place: where it is, in messages."""
        self.place, self.page_bytes = place, page_bytes
        # Pages that were not what had been written, or could not be read while others could.
        self.corrupt = 0

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is a page of that name."""

    @abstractmethod
    def get(self, key: str, page: torch.Tensor) -> torch.Tensor | None:
        """Read a page into ``page``, and return that; None if there is none."""

    @abstractmethod
    def set(self, key: str, value: Any) -> bool:
        """Write a page. False: it has no room for one now, which is no error of its."""

    @abstractmethod
    def clear(self) -> bool:
        """Remove all pages of this rank, also those of other workers with the same model."""

    @abstractmethod
    def was_cleared(self) -> bool:
        """Whether somebody else has cleared it since this was last asked, or may have."""

    def note_use(self, key: str) -> None:
        """Have a page that is there count as used now. Nothing, where `exists` does that."""
        return None

    def remove_left(self) -> None:
        """Remove what others have left half written, or half removed. Nothing, where that cannot be."""
        return None

    def _count_corrupt(self, key: str, why: str) -> None:
        """A page is about to be removed."""
        self.corrupt += 1
        if self.corrupt == 1:
            logger.warning(
                "%s is not what was written (%s): such pages are removed, and counted from now on.", key, why
            )
