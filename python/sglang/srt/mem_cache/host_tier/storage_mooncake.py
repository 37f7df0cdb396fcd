"""Storage backend ``mooncake``: a Mooncake store, memory that its clients give to all of them, by way of a master.

Each page is one object, header and page, which the master shows to others when all of it has been written. The master
evicts what has not been asked for lately; a client that ends takes what its memory has with it. Of an object that is
removed or evicted while it is read, the checksum tells: also where all of its place has been given to another page by
then, of any rank or model, since the checksum begins with the object's name.

The store's calls for pages block without the interpreter's lock, its start and its end with it. So the master is looked
for before the start, and nothing ends it but the process.

Upstream: none is known.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.host_tier.checks import Taken
from sglang.srt.mem_cache.host_tier.storage_backend import EXTRA_CONFIG, PageStorage, Room, is_whole, seal

__all__ = ["OPTIONS", "MooncakeOptions", "PagesInMooncake", "memory", "open_storage", "read"]

logger = logging.getLogger(__name__)

_BACKEND = "--hicache-storage-backend mooncake"
_NOT_HERE = ("standalone_storage", "client_server_address")
# Mooncake's codes: there is no such object, or somebody is writing it; it is longer than was asked for; the store is
# full.
_MISSING, _LONGER, _NO_SPACE = (-704, -703), -600, -200
# Bytes that the store has besides, for calls that are not used here: the engine's figure.
_LOCAL_BUFFER = 16 * 1024**2
# How the size of what is given to the store is told, in messages.
_SIZE_OPTION = "global_segment_size (MOONCAKE_GLOBAL_SEGMENT_SIZE)"
# Less than that, and more than nothing, it does not take: bytes.
LEAST_SEGMENT = 16 * 1024**2
# What no number of bytes is, for the store either.
_NO_SIZE = 1 << 63
CONNECT_S = 3.0
# Seconds before each further try to write where the store was full. When it has refused something, the master evicts
# what nobody has asked for in the last 10 s (its --default_kv_lease_ttl), and looks every 10 ms: of 60 pages 59 found
# room within 26 ms, all within 44. More tries are more lines of the library's in the log.
ROOM_S = (0.025, 0.05)
# When one has found none all the same, others are tried once each for so long, or until one of them finds room: all
# that waits to be written, and who clears it, waits for each try.
FULL_S = 1.0


class MooncakeOptions(NamedTuple):
    """How to reach the store, with the engine's names.

    global_segment_size: bytes that this worker gives to the store, over all its ranks. extra_backend_tag: in front of
    each name; who has another shares nothing.
    """

    master_server_address: str
    local_hostname: str
    metadata_server: str
    protocol: str
    device_name: str
    global_segment_size: int
    extra_backend_tag: str = ""


OPTIONS = (*MooncakeOptions._fields, *_NOT_HERE)


def read(given: Mapping[str, Any]) -> MooncakeOptions:
    """The options of the extra config, of the engine's file or of its variables: the first that says anything of them.

    Raises ValueError; also where Mooncake is not installed, or nobody listens where the master should be.
    """
    found, source = _source(given)
    for name in _NOT_HERE:
        if found.get(name):
            raise ValueError(
                f"{source} has {name}: that has Mooncake allocate the host memory of the engine's hierarchical cache, "
                "which decode's tier does itself. Leave it out, and give master_server_address (MOONCAKE_MASTER)."
            )
    tag = given.get("extra_backend_tag")
    texts = {**found, "extra_backend_tag": "" if tag is None else tag}
    for name in MooncakeOptions._fields:
        if name != "global_segment_size" and not isinstance(texts[name], str):
            # The tag is the extra config's alone.
            place = EXTRA_CONFIG if name == "extra_backend_tag" else source
            raise ValueError(f"{place} has {name} {texts[name]!r}: give a text.")
    if texts["device_name"].strip().startswith("{"):
        raise ValueError(f"{source} has device_name {texts['device_name']}: give one for all ranks, or leave it out.")
    if not re.fullmatch(r"[A-Za-z0-9_-]*", texts["extra_backend_tag"]):
        # In a name of a page all else becomes a dash.
        raise ValueError(f"{EXTRA_CONFIG} has extra_backend_tag {tag!r}: give ASCII letters, digits, _ and - alone.")
    texts["global_segment_size"] = _size(texts["global_segment_size"], source)
    options = MooncakeOptions(**{name: texts[name] for name in MooncakeOptions._fields})
    _load()
    _look_for_master(options.master_server_address, source)
    return options


def _source(given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What the first source that says anything says, with the engine's defaults; and what it is called."""
    variables = {
        "master_server_address": envs.MOONCAKE_MASTER,
        "local_hostname": envs.MOONCAKE_LOCAL_HOSTNAME,
        "metadata_server": envs.MOONCAKE_TE_META_DATA_SERVER,
        "protocol": envs.MOONCAKE_PROTOCOL,
        "device_name": envs.MOONCAKE_DEVICE,
        "global_segment_size": envs.MOONCAKE_GLOBAL_SEGMENT_SIZE,
        "standalone_storage": envs.MOONCAKE_STANDALONE_STORAGE,
        "client_server_address": envs.MOONCAKE_CLIENT,
    }
    defaults = {name: variable.default for name, variable in variables.items()}
    own = {name: value for name, value in given.items() if name in variables and value is not None}
    path = envs.SGLANG_HICACHE_MOONCAKE_CONFIG_PATH.get()
    if own:
        found, source = {**defaults, **own}, EXTRA_CONFIG
        where = f"master_server_address there, beside {', '.join(own)}"
    elif path:
        try:
            read_from = json.loads(Path(path).read_text(encoding="utf-8"))
            found = {**defaults, **{name: value for name, value in read_from.items() if name in variables}}
        except Exception as e:
            raise ValueError(f"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH {path!r} cannot be read: {e}.") from e
        source, where = path, "master_server_address there"
    else:
        found, source = {name: variable.get() for name, variable in variables.items()}, "The environment"
        where = f"MOONCAKE_MASTER, or as master_server_address in {EXTRA_CONFIG}"
        if not envs.MOONCAKE_LOCAL_HOSTNAME.is_set():
            # An older name of it, which the engine still takes.
            found["local_hostname"] = os.environ.get("LOCAL_HOSTNAME") or found["local_hostname"]
    if not found["master_server_address"] and not found["client_server_address"]:
        raise ValueError(
            f"{_BACKEND} needs the address of a mooncake_master, and {source} has none. Give it as HOST:PORT in "
            f"{where}."
        )
    return found, source


def _size(value: Any, source: str) -> int:
    """Bytes of ``4gb``, or of a number."""
    match = re.fullmatch(r"\s*(\d{1,18})\s*(gb)?\s*", str(value).lower())
    size = int(match[1]) * (1024**3 if match[2] else 1) if match else _NO_SIZE
    if size >= _NO_SIZE or isinstance(value, bool):
        raise ValueError(f"{source} has global_segment_size {value!r}: give bytes, or gigabytes as 4gb.")
    return size


def _load() -> Any:
    try:
        from mooncake import store
    except ImportError as e:
        raise ValueError(
            f"{_BACKEND} needs Mooncake's store, which cannot be imported: {e}. Install mooncake-transfer-engine, or "
            "mooncake-transfer-engine-non-cuda on a host without CUDA, or take the backend file."
        ) from e
    return store


def _look_for_master(address: str, source: str) -> None:
    """Raises ValueError where nobody listens. The store's start would stand still for a minute and a half first."""
    host, _, port = address.rpartition(":")
    # Of a number above 65535 the system takes what is left of it, and may reach another's server.
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535 or "/" in host:
        raise ValueError(f"{source} has {address!r} as the address of mooncake_master: give HOST:PORT.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as e:
        # Of a host's name that cannot be one, a UnicodeError.
        raise ValueError(
            f"{_BACKEND} reaches no mooncake_master at {address}: {e}. Start one, or name another address in "
            f"MOONCAKE_MASTER or as master_server_address in {EXTRA_CONFIG}."
        ) from e


def memory(options: MooncakeOptions, tp_size: int) -> Taken:
    """What the store takes of each of ``tp_size`` ranks."""
    return Taken(options.global_segment_size // tp_size + _LOCAL_BUFFER, f"{_BACKEND} with {_SIZE_OPTION}")


def open_storage(folder: str, page_bytes: int, options: MooncakeOptions, tp_size: int) -> PagesInMooncake:
    """Pages whose names begin with ``folder``. Raises ValueError."""
    size = options.global_segment_size // tp_size
    if 0 < size < LEAST_SEGMENT:
        raise ValueError(
            f"{_BACKEND}: global_segment_size (MOONCAKE_GLOBAL_SEGMENT_SIZE) is {options.global_segment_size} bytes "
            f"for {tp_size} ranks. Give {LEAST_SEGMENT} for each or more, or 0 to give the store nothing."
        )
    options = options._replace(global_segment_size=size)
    try:
        return PagesInMooncake(folder, page_bytes, options)
    except OSError as e:
        raise ValueError(
            f"{_BACKEND} does not start at {options.master_server_address}: {e}. It is to give "
            f"{options.global_segment_size} bytes of this rank's memory to the store (global_segment_size over the "
            f"ranks), over {options.protocol}, as {options.local_hostname}."
        ) from e


class PagesInMooncake(PageStorage):
    """Pages of one rank in a Mooncake store."""

    def __init__(self, folder: str, page_bytes: int, options: MooncakeOptions):
        """Raises OSError."""
        # In what a regular expression takes for itself: what tells folders apart are the digests in their names.
        tag = f"{options.extra_backend_tag}/" if options.extra_backend_tag else ""
        self._prefix = re.sub(r"[^A-Za-z0-9/_-]", "-", f"{tag}{folder.strip('/')}/")
        super().__init__(f"{options.master_server_address}/{self._prefix}", page_bytes)
        self._of_thread = threading.local()
        # Kept for ever, as what is registered: also of a thread that has ended while something was under way.
        self._rooms: list[Room] = []
        # Until when nobody waits for room; and whether it has been told that there was none.
        self._full_until, self._full_told = 0.0, False
        self._store = _load().MooncakeDistributedStore()
        code = self._store.setup(
            options.local_hostname,
            options.metadata_server,
            options.global_segment_size,
            _LOCAL_BUFFER,
            options.protocol,
            options.device_name,
            options.master_server_address,
        )
        if code:
            raise OSError(errno.EIO, f"Mooncake's code {code}")
        self._put_mark()

    def _put_mark(self) -> bool:
        """Put an object of this worker's beside its pages: what removes all pages removes it, too.

        Returns whether it is there: the store may have no room for it.
        """
        self._mark = f"{self._prefix}worker-{uuid.uuid4().hex}"
        return self._store.put(self._mark, b"1") == 0

    def was_cleared(self) -> bool:
        """Whether somebody else has cleared it since this was last asked, or may have: the master may be a new one.

        One without room even for a mark has not been cleared just now. When a mark can be put again, it may have been.
        """
        code = self._store.is_exist(self._mark)
        self._done(code, "does not say what it has")
        return code == 0 and self._put_mark()

    def _room(self) -> Room:
        """Of this thread, registered."""
        room: Room | None = getattr(self._of_thread, "room", None)
        if room is None:
            room = Room(self.page_bytes)
            self._done(self._store.register_buffer(room.address, room.size), "registers no memory")
            self._rooms.append(room)
            self._of_thread.room = room
        return room

    @staticmethod
    def _done(code: int, what: str) -> None:
        if code < 0:
            raise OSError(errno.EIO, f"Mooncake {what}: code {code}")

    def exists(self, key: str) -> bool:
        """Whether the master has such an object, which it keeps for a while then."""
        code = self._store.is_exist(self._prefix + key)
        self._done(code, "does not say what it has")
        return code == 1

    def get(self, key: str, page: torch.Tensor) -> torch.Tensor | None:
        """Read a page into ``page``; None if there is none. An object that is no page is removed."""
        room = self._room()
        length = self._store.get_into(self._prefix + key, room.address, room.size)
        if length in _MISSING:
            return None
        if length != _LONGER:
            self._done(length, "reads no page")
            room.copy_to(page)
            if length == room.size and is_whole(self._prefix + key, room.header, memoryview(page.numpy())):
                return page
        self._count_corrupt(key, "changed or of another size")
        self._store.remove(self._prefix + key, True)
        return None

    def set(self, key: str, value: torch.Tensor) -> bool:
        """Write a page; nothing is done where there is one of that name. False where the store stays full."""
        room = self._room()
        room.put(seal(self._prefix + key, memoryview(value.numpy())), value)
        waits = ROOM_S if time.monotonic() >= self._full_until else ()
        code = self._store.put_from(self._prefix + key, room.address, room.size)
        for wait_s in waits:
            if code != _NO_SPACE:
                break
            time.sleep(wait_s)
            code = self._store.put_from(self._prefix + key, room.address, room.size)
        if code == _NO_SPACE:
            if waits:
                self._full_until = time.monotonic() + FULL_S
            self._tell_full(room.size)
            return False
        self._full_until = 0.0
        self._done(code, "writes no page")
        return True

    def _tell_full(self, size: int) -> None:
        if not self._full_told:
            self._full_told = True
            logger.warning(
                "The Mooncake store at %s has no room for a page (%d bytes): all that it has was asked for a moment "
                "ago, or no worker gives it as much. Such pages are not written, and counted as no_room from now on. "
                "If they are many, have workers give it more: %s.",
                self.place,
                size,
                _SIZE_OPTION,
            )

    def clear(self) -> bool:
        """Remove all pages of this rank."""
        self._done(self._store.remove_by_regex(f"^{self._prefix}", True), "removes nothing")
        self._put_mark()
        return True
