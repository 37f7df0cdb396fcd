"""The connection of one engine process to a PegaFlow server, and its recovery.

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
    """Pages since the start, for `get_internal_state`. lost: number of connection losses."""

    saved: int = 0
    saves_failed: int = 0
    asked: int = 0
    hits: int = 0
    loaded: int = 0
    loads_failed: int = 0
    lost: int = 0


class Connection:
    """Registers the KV pool; logs once when the server is lost.

    ``up`` is False while the server is lost. ``registering`` is held during a registration, and by callers that must
    not overlap one. ``registrations`` counts them. ``last_probe``: time of the last check of the server.
    """

    def __init__(self, endpoint: str, instance_id: str, namespace: str, layout: KVLayout, retry_s: float) -> None:
        """Registers the pool. retry_s: seconds between attempts to reach a lost server, for the log."""
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
        """Stop using the server; running calls end as usual."""
        self.stopped = True
        self.up = False

    def _register(self) -> None:
        """Have the server map the KV pool and watch for the end of this process."""
        layout = self.layout
        count = len(layout.names)
        try:
            # An earlier registration would conflict.
            self.client.unregister_context(self.instance_id)
        except Exception:
            pass
        self.client.start_session_watcher(self.instance_id, self.namespace, 1, 1)
        ok, message = self.client.register_context_batch(
            self.instance_id,
            self.namespace,
            0,  # Each rank registers as an instance of its own: tp_rank, pp_rank, tp_size, world_size.
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
            raise ValueError(f"PegaFlow at {self.url} rejected the KV pool: {message}")
        # Loads of earlier registrations have failed.
        self.registrations += 1

    def lost(self, reason: object) -> None:
        """The server is lost: hand nothing to it until a probe succeeds."""
        if self.up:
            self.up = False
            self.counters.lost += 1
            logger.warning(
                "PegaFlow at %s is lost: %s. Requests continue without it; retried every %g s.",
                self.url,
                reason,
                self._retry_s,
            )

    def _not_back(self, reason: object) -> None:
        """Log why registration failed; the same reason only once, since it may be permanent."""
        level = logging.DEBUG if str(reason) == self._told else logging.INFO
        self._told = str(reason)
        logger.log(level, "PegaFlow at %s has not registered the KV pool yet: %s", self.url, reason)

    def probe(self) -> bool:
        """Check the server and the registration, and register again if necessary. Returns whether it is usable."""
        with self.registering:
            self.last_probe = time.monotonic()
            try:
                # A query of a lost server counts as a miss, so its health is checked first.
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
        """Register again after a call failed with ``error``, so that the server drops all work of the old one."""
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
        """Page numbers of ``slots``, after all launched steps have ended.

        A launched step may still write a page to be saved. It may also write one slot of a freed page that is to be
        loaded into, if the page's request ended while the next step was running.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        page = self.layout.page_size
        return (slots[::page] // page).tolist()

    def leave(self) -> None:
        """Unregister the pool."""
        try:
            self.client.unregister_context(self.instance_id)
        except Exception as error:
            logger.debug("PegaFlow at %s: %s", self.url, error)
