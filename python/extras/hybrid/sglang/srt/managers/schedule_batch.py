"""State of a retracted request beside KV, and the slots that a step writes to.

Upstream: none is known for a retraction, nor for what a prefill writes.
"""

from __future__ import annotations

import torch
from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req", "ScheduleBatch"]


class Req(engine.Req):
    """A request whose state or window is saved with its KV."""

    # In host memory while it is retracted.
    state_cpu: list[torch.Tensor] | None = None
    window_cpu: list | None = None

    def offload_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator) -> None:
        """Adds the state, which the engine loses.

        With the decode tree, of sliding-window layers only the window is saved: the engine's copy of all tokens cannot
        leave out the part that the tree holds.
        """
        windows = getattr(token_to_kv_pool_allocator, "window_slots", None)
        if windows is not None:
            table = req_to_token_pool.req_to_token[self.req_pool_idx, : self.seqlen - 1]
            self.kv_cache_cpu, self.window_cpu = windows.save(table)
            return
        super().offload_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)
        if self.mamba_pool_idx is not None:
            self.state_cpu = req_to_token_pool.mamba_pool.get_cpu_copy(self.mamba_pool_idx)

    def load_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator) -> None:
        """Adds the state."""
        super().load_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)
        self._load_state(req_to_token_pool)

    def restore_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator, start: int) -> None:
        """Adds state and window."""
        windows = getattr(token_to_kv_pool_allocator, "window_slots", None)
        if windows is not None:
            windows.load(self.window_cpu, req_to_token_pool.req_to_token[self.req_pool_idx, : self.seqlen - 1])
            self.window_cpu, token_to_kv_pool_allocator = None, token_to_kv_pool_allocator.full_attn_allocator
        super().restore_kv_cache(req_to_token_pool, token_to_kv_pool_allocator, start)
        self._load_state(req_to_token_pool)

    def _load_state(self, req_to_token_pool) -> None:
        if self.state_cpu is not None:
            req_to_token_pool.mamba_pool.load_cpu_copy(self.state_cpu, self.mamba_pool_idx)
            self.state_cpu = None

    def forget_saved_kv(self) -> None:
        """Adds both."""
        super().forget_saved_kv()
        self.state_cpu = self.window_cpu = None


class ScheduleBatch(engine.ScheduleBatch):
    """Knows the states and windows that a step writes to."""

    # Window-pool slots that the step writes to, as of its launch.
    window_cache_loc: torch.Tensor | None = None

    def prepare_for_decode(self) -> None:
        """Keeps the written slots: the mapping loses them when a request ends before its step."""
        super().prepare_for_decode()
        windows = getattr(self.tree_cache, "windows", None)
        self.window_cache_loc = None if windows is None else windows.of(self.out_cache_loc)

    def copy(self) -> ScheduleBatch:
        """Copies the written slots."""
        batch = super().copy()
        batch.window_cache_loc = self.window_cache_loc
        return batch

    def states_written(self, at: list[int], page_size: int) -> set[int]:
        """State slots, or window-pool pages."""
        if self.window_cache_loc is not None:
            written = self.window_cache_loc // page_size
        elif hasattr(self.req_to_token_pool, "get_mamba_indices"):
            # These req_to_token slots have not been reused yet.
            written = self.req_to_token_pool.get_mamba_indices(self.req_pool_indices)
        else:
            return super().states_written(at, page_size)
        # Copied as a whole: indexing on the device would first copy the indices there.
        return set(written.cpu().numpy()[at].tolist())

    def check_decode_mem(self, selected_indices: list[int] | None = None) -> bool:
        """Frees window slots before a request is retracted; the engine does so only now and then."""
        enough = super().check_decode_mem(selected_indices)
        if enough or getattr(self.tree_cache, "windows", None) is None:
            return enough
        self.free_behind_windows()
        return super().check_decode_mem(selected_indices)

    def free_behind_windows(self) -> None:
        """Free window slots that no step attends to again, the one in flight included."""
        for req in self.reqs:
            if not req.finished() and req.req_pool_idx is not None:
                self._evict_swa(req, req.seqlen - 1)
