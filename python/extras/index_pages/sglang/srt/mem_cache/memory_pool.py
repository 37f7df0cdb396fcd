"""KV pool with index keys: a retracted request saves and restores both.

Upstream: none is known for a retraction.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache import memory_pool as engine

__all__ = ["NSATokenToKVPool"]


class NSATokenToKVPool(engine.NSATokenToKVPool):
    """Adds index keys to the copies in host memory; the engine restores KV next to another request's index keys."""

    def get_cpu_copy(self, indices: torch.Tensor) -> list[list[torch.Tensor]]:
        """Copy the slots ``indices`` (int64) to host memory.

        Returns for each layer its KV, then for each layer its index keys with scales (tokens, 132), uint8, all in
        pieces of ``cpu_offloading_chunk_size`` tokens.
        """
        pieces = indices.split(self.cpu_offloading_chunk_size)
        index = [
            [self._read(buffer, piece).to("cpu", non_blocking=True) for piece in pieces]
            for buffer in self.index_k_with_scale_buffer
        ]
        # Waits for these copies too.
        return super().get_cpu_copy(indices) + index

    def load_cpu_copy(self, kv_cache_cpu: list[list[torch.Tensor]], indices: torch.Tensor) -> None:
        """Write what `get_cpu_copy` returned to the slots ``indices``."""
        super().load_cpu_copy(kv_cache_cpu[: self.layer_num], indices)
        pieces = indices.split(self.cpu_offloading_chunk_size)
        for buffer, saved in zip(self.index_k_with_scale_buffer, kv_cache_cpu[self.layer_num :], strict=True):
            for piece, rows in zip(pieces, saved, strict=True):
                self._write(buffer, piece, rows.to(buffer.device))
        torch.cuda.synchronize()

    def _parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of an index buffer: keys (pages, page_size, head_dim), scales (pages, page_size, 4 per block), uint8.

        A page has the keys of all its tokens, then their scales.
        """
        keys = self.page_size * self.index_head_dim
        return [part.unflatten(1, (self.page_size, -1)) for part in (buffer[:, :keys], buffer[:, keys:])]

    def _read(self, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        page, token = slots // self.page_size, slots % self.page_size
        return torch.cat([part[page, token] for part in self._parts(buffer)], dim=1)

    def _write(self, buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        page, token = slots // self.page_size, slots % self.page_size
        parts = self._parts(buffer)
        for part, columns in zip(parts, rows.split([part.shape[2] for part in parts], dim=1), strict=True):
            part[page, token] = columns
