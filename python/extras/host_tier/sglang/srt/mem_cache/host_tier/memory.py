"""KV in host memory, and copies between it and the KV pool on the device.

The host pools are the engine's. Copies run on a stream of their own, after all work queued on the device: a step that
writes to a page precedes its copy, in both directions.

Upstream: none is known that copies what has left a decode tree back beside a transfer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
)
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, MLATokenToKVPoolHost, NSATokenToKVPoolHost

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["Copy", "HostMemory", "check_pool", "host_pool", "kv_pool_of"]

# The engine's device pools and their host pools. A subclass of these may keep more than KV, so types match exactly.
_HOST_POOLS: dict[type, type] = {
    MHATokenToKVPool: MHATokenToKVPoolHost,
    MLATokenToKVPool: MLATokenToKVPoolHost,
    NSATokenToKVPool: NSATokenToKVPoolHost,
}


def kv_pool_of(kvcache: Any) -> Any:
    """The pool of full-attention layers; in a model with linear attention it is a part of ``kvcache``."""
    return kvcache.full_kv_pool if isinstance(kvcache, HybridLinearKVPool) else kvcache


def check_pool(pool: Any) -> None:
    """Raise ValueError if ``pool`` on the device has no host pool."""
    if type(pool) not in _HOST_POOLS:
        raise ValueError(
            f"--enable-hierarchical-cache is not verified on decode for {type(pool).__name__}. Start this decode "
            "worker without it."
        )


def host_pool(pool: Any, args: ServerArgs, page_size: int, size: int = 0) -> Any:
    """The engine's host pool for ``pool``, sized by its options, or for at least ``size`` tokens.

    pool: has passed `check_pool`.
    """
    made = _HOST_POOLS[type(pool)]
    if size:
        return made(pool, size / pool.size, 0, page_size, args.hicache_mem_layout)
    return made(pool, args.hicache_ratio, args.hicache_size, page_size, args.hicache_mem_layout)


class Copy:
    """A running copy. It keeps its slot tensors alive until it has ended."""

    def __init__(self, event: Any = None, places: tuple[torch.Tensor, ...] = ()):
        """event: recorded at its end on the device; None if it has ended."""
        self._event, self._places = event, places

    def done(self) -> bool:
        if self._event is not None and self._event.query():
            self._event, self._places = None, ()
        return self._event is None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event, self._places = None, ()


class HostMemory:
    """KV of one rank in host memory, by slot."""

    def __init__(self, pools: Sequence[tuple[Any, Any]], io_backend: str, forward_stream: Callable[[], Any]):
        """pools: pairs of the engine's device and host pool, for the model and its draft.

        forward_stream: of the model's steps; None on a CPU host.
        """
        self.pools, self._io_backend, self._forward_stream = pools, io_backend, forward_stream
        device = pools[0][0].device
        self._module = None if device == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream()

    def save(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Copy:
        """Copy KV to host memory. Slots: int64, whole pages, equally many on host and device."""
        host_slots, device_slots = self._places(host_slots, device_slots)
        with self._copying():
            for device_pool, pool in self.pools:
                pool.backup_from_device_all_layer(device_pool, host_slots, device_slots, self._io_backend)
        return self._begun(host_slots, device_slots)

    def load(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Copy:
        """Copy KV back to the device. Slots: as for `save`."""
        host_slots, device_slots = self._places(host_slots, device_slots)
        with self._copying():
            for device_pool, pool in self.pools:
                for layer in range(pool.layer_num):
                    pool.load_to_device_per_layer(device_pool, host_slots, device_slots, layer, self._io_backend)
        return self._begun(host_slots, device_slots)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _places(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots as the engine's copies expect them: kernels on the device, others on the CPU and sorted."""
        if self._io_backend == "kernel":
            return host_slots.to(device_slots.device, non_blocking=True), device_slots
        host_slots, order = host_slots.sort()
        return host_slots, device_slots.cpu().index_select(0, order)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        if self._module is None:
            yield
            return
        before = [self._module.current_stream(), self._forward_stream()]
        try:
            with self._module.stream(self._stream):
                for stream in before:
                    if stream is not None:
                        self._stream.wait_stream(stream)
                yield
        except Exception:
            # The copy may have started, and its slots are freed now.
            self.wait()
            raise

    def _begun(self, *places: torch.Tensor) -> Copy:
        if self._module is None:
            return Copy()
        event = self._module.Event()
        event.record(self._stream)
        return Copy(event, places)
