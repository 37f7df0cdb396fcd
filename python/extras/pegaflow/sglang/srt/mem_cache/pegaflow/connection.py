"""The connection of one engine process to a PegaFlow server, and its way back when the server was lost.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.pegaflow import memory
from sglang.srt.mem_cache.pegaflow.checks import server_url
from sglang.srt.mem_cache.pegaflow.memory import KVLayout

logger = logging.getLogger(__name__)

__all__ = ["Connection", "Counters"]


@dataclass
class Counters:
    """What has been done, in pages, for `get_internal_state`; ``lost``: how often the server was."""

    saved: int = 0
    saves_failed: int = 0
    asked: int = 0
    hits: int = 0
    loaded: int = 0
    loads_failed: int = 0
    lost: int = 0


class Connection:
    """Registers the KV pool; when the server is lost, says so once.

    ``up`` is False while it is lost. ``registering`` is held while the pool is registered, and by who must not see that
    happen; ``registrations`` counts how often it was. ``last_probe``: when the server was last looked at.
    """

    def __init__(self, endpoint: str, instance_id: str, namespace: str, layout: KVLayout, retry_s: float) -> None:
        """Registers the pool. retry_s: how often a lost server is tried again, by who probes."""
        from pegaflow import EngineRpcClient

        self.url = server_url(endpoint)
        self.instance_id, self.namespace, self.layout = instance_id, namespace, layout
        self.device = next(iter(layout.buffers.values())).device
        self.device_id = memory.device_id(self.device)
        self.counters = Counters()
        self.up = self.stopped = False
        self.client = EngineRpcClient(self.url)
        self.registering = threading.Lock()
        self.registrations = 0
        self.last_probe = 0.0
        self._retry_s = retry_s
        self._told = ""
        self._register()
        self.up = True

    def stop(self) -> None:
        """Use it no more; what is under way ends as it would."""
        self.stopped = True
        self.up = False

    def _register(self) -> None:
        """Have the server map the KV pool, and watch that this process lives."""
        layout = self.layout
        count = len(layout.names)
        try:
            # What is left of an earlier registration would be in the way.
            self.client.unregister_context(self.instance_id)
        except Exception:
            pass
        self.client.start_session_watcher(self.instance_id, self.namespace, 1, 1)
        ok, message = self.client.register_context_batch(
            self.instance_id,
            self.namespace,
            0,  # To the server each rank is an instance of its own: tp_rank, pp_rank, tp_size, world_size.
            0,
            1,
            1,
            self.device_id,
            layout.names,
            [memory.wrapper_bytes(buffer) for buffer in layout.buffers.values()],
            layout.num_pages,
            layout.page_bytes,
            [0] * count,
            [1] * count,
            "direct",
            False,
        )
        if not ok:
            raise ValueError(f"PegaFlow at {self.url} did not take the KV pool: {message}")
        # What was being loaded under an earlier one has failed.
        self.registrations += 1

    def lost(self, reason: object) -> None:
        """The server does not do as it should: nothing more is handed to it until it does."""
        if self.up:
            self.up = False
            self.counters.lost += 1
            logger.warning(
                "PegaFlow at %s is lost: %s. Requests go on without it; it is tried again every %g s.",
                self.url,
                reason,
                self._retry_s,
            )

    def _not_back(self, reason: object) -> None:
        """A server may be there and not take the pool, for good: that is told once."""
        level = logging.DEBUG if str(reason) == self._told else logging.INFO
        self._told = str(reason)
        logger.log(level, "PegaFlow at %s has not registered the KV pool yet: %s", self.url, reason)

    def probe(self) -> bool:
        """Whether the server is there and has the pool mapped; registers anew where it has not."""
        with self.registering:
            self.last_probe = time.monotonic()
            try:
                # A query of a server that is gone counts as a miss, so its health is asked first.
                self.client.health()
            except Exception as error:
                self.lost(error)
                return False
            try:
                self.client.query_prefetch(self.instance_id, [], self.instance_id)
            except Exception as error:
                self.lost(error)
                try:
                    self._register()
                except Exception as error:
                    self._not_back(error)
                    return False
            if not self.up and not self.stopped:
                self.up = True
                logger.info("PegaFlow at %s is back.", self.url)
            return True

    def renew(self, error: Exception) -> bool:
        """After a call that failed with ``error``: register anew, so that the server drops whatever it was doing."""
        with self.registering:
            self.lost(error)
            try:
                self.client.health()
                self._register()
            except Exception as reason:
                self._not_back(reason)
                return False
            if not self.stopped:
                self.up = True
                logger.info("PegaFlow at %s is back.", self.url)
            return self.up

    def pages(self, slots: torch.Tensor) -> list[int]:
        """Pages that the server may now read or write: when no step that has been launched uses them any more.

        What is saved may be what such a step writes. What is loaded to may be a page of a request that ended while the
        step after its last was under way, which still writes one slot of it.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        page = self.layout.page_size
        return (slots[::page] // page).tolist()

    def leave(self) -> None:
        """Take the pool back from the server."""
        try:
            self.client.unregister_context(self.instance_id)
        except Exception as error:
            logger.debug("PegaFlow at %s: %s", self.url, error)
