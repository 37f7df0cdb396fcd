"""Storage backend ``nixl``: the files of `storage_files`, read and written by a NIXL agent with its POSIX plugin.

NIXL writes into a file that is there; that it is written beside and renamed, its length and its checksum are as for
``file``. The two have one format and one way to name folders, so they may share a directory.

Each thread has an agent of its own, with memory that is registered once. Several threads that share one see its queue
full now and then, which NIXL writes to the log as an error.

Upstream: none is known.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.host_tier.storage_backend import EXTRA_CONFIG, Room
from sglang.srt.mem_cache.host_tier.storage_files import PageFiles, made_in

__all__ = ["OPTIONS", "PagesThroughNixl", "open_storage", "read"]

PLUGIN = "POSIX"
_PLUGIN_VARIABLE = "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"
DIRECTORY = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
# The plugin's ways to read and write; Linux AIO where none is given.
_QUEUES = ("use_aio", "use_uring", "use_posix_aio")
OPTIONS = ("plugin", *_QUEUES)
_YES, _NO = (True, "true", "True"), (False, "false", "False")
# While a transfer is under way. POSIX reads and writes of cached files have mostly ended when they have been begun.
POLL_S = 0.0001


def read(given: Mapping[str, Any]) -> dict[str, str]:
    """The plugin's parameters, of ``{"plugin": {"posix": {"active": true, ...}}}`` or ``{"use_uring": "true"}``.

    Raises ValueError, also where NIXL is not installed.
    """
    plugins = given.get("plugin")
    own: Any = {name: given[name] for name in _QUEUES if name in given}
    if plugins is None:
        name = os.environ.get(_PLUGIN_VARIABLE) or "auto"
        said = f"{_PLUGIN_VARIABLE} is {name}"
    else:
        if own or not isinstance(plugins, dict) or not all(isinstance(one, dict) for one in plugins.values()):
            raise ValueError(
                f'{EXTRA_CONFIG} has plugin {plugins!r}: give {{"plugin": {{"posix": {{"active": true}}}}}}, with what '
                "is the plugin's inside."
            )
        active = [key for key, one in plugins.items() if one.get("active") in _YES]
        name = active[0] if active else "none"
        own = {key: value for key, value in plugins.get(name, {}).items() if key != "active"}
        said = f"{EXTRA_CONFIG} has {name} as the active plugin"
    if name.upper() not in ("AUTO", PLUGIN):
        raise ValueError(
            f"{said}: of NIXL's plugins only {PLUGIN} has been tried below decode's host memory. Give posix, or leave "
            "it out."
        )
    _load()
    return _queue(own)


def _queue(own: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of the plugin's queue. Raises ValueError."""
    unknown = sorted(set(own) - set(_QUEUES))
    if unknown:
        raise ValueError(f"{EXTRA_CONFIG} has {', '.join(unknown)} for {PLUGIN}; decode knows {', '.join(_QUEUES)}.")
    for name, value in own.items():
        if value not in _YES + _NO:
            raise ValueError(f"{EXTRA_CONFIG} has {name} {value!r}: give true or false.")
    used = [name for name in _QUEUES if own.get(name) in _YES]
    if len(used) > 1:
        raise ValueError(f"{EXTRA_CONFIG} has {' and '.join(used)}: give one of them.")
    return dict.fromkeys(used, "true")


def _load() -> Any:
    try:
        from nixl import _api
    except ImportError as e:
        raise ValueError(
            f"--hicache-storage-backend nixl needs the package nixl, which cannot be imported: {e}. Install it with "
            "pip install nixl, or take the backend file."
        ) from e
    return _api


def open_storage(folder: str, page_bytes: int, options: Mapping[str, str], tp_size: int) -> PageFiles:
    """Pages in ``folder`` through NIXL. Raises ValueError."""
    # The engine's default, which its class does not say apart.
    return made_in(
        "nixl", DIRECTORY, "/tmp/hicache_storage", lambda root: PagesThroughNixl(root / folder, page_bytes, options)
    )


class _Agent:
    """An agent of one thread, and the memory that it reads into and writes from."""

    def __init__(self, page_bytes: int, params: Mapping[str, str]):
        """Raises OSError."""
        api = _load()
        self.room = Room(page_bytes)
        self._name = f"kv-storage-{uuid.uuid4().hex}"
        try:
            self._agent = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(PLUGIN, dict(params))
            place = (self.room.address, self.room.size, 0)
            self._agent.register_memory([(*place, "")], "DRAM")
            self._memory = self._agent.get_xfer_descs([place], "DRAM")
        except Exception as e:
            how = f" with {', '.join(params)}" if params else ""
            raise OSError(errno.ENODEV, f"NIXL's plugin {PLUGIN}{how} does not start: {e}") from e

    def move(self, direction: str, file: int) -> None:
        """Have a whole file and the room's bytes be the same; ``READ`` into the room, or ``WRITE``. Raises OSError."""
        agent = self._agent
        try:
            registered = agent.register_memory([(0, self.room.size, file, "")], "FILE")
            try:
                place = agent.get_xfer_descs([(0, self.room.size, file)], "FILE")
                handle = agent.initialize_xfer(direction, self._memory, place, self._name)
                try:
                    state = agent.transfer(handle)
                    while state == "PROC":
                        time.sleep(POLL_S)
                        state = agent.check_xfer_state(handle)
                finally:
                    agent.release_xfer_handle(handle)
            finally:
                agent.deregister_memory(registered)
        except Exception as e:
            # It says no more than that: which error the system gave is in its own line of the log.
            raise OSError(errno.EIO, f"NIXL ends a {direction} with {e}") from e
        if state != "DONE":
            raise OSError(errno.EIO, f"NIXL ends a {direction} with {state}")


class PagesThroughNixl(PageFiles):
    """Pages of one rank in files. A transfer that hangs hangs its thread, as a read of a file does."""

    def __init__(self, folder: Path | str, page_bytes: int, params: Mapping[str, str]):
        """Raises OSError, also if the plugin does not start."""
        super().__init__(folder, page_bytes)
        self._params, self._of_thread = params, threading.local()
        # At the start, not when the first page comes.
        _Agent(page_bytes, params)

    def _agent(self) -> _Agent:
        agent: _Agent | None = getattr(self._of_thread, "agent", None)
        if agent is None:
            agent = self._of_thread.agent = _Agent(self.page_bytes, self._params)
        return agent

    def _read(self, file: io.FileIO, page: torch.Tensor) -> bytes | None:
        agent = self._agent()
        if os.fstat(file.fileno()).st_size != agent.room.size:
            return None
        agent.move("READ", file.fileno())
        agent.room.copy_to(page)
        return agent.room.header

    def _write(self, file: io.FileIO, header: bytes, page: torch.Tensor) -> None:
        agent = self._agent()
        agent.room.put(header, page)
        agent.move("WRITE", file.fileno())
