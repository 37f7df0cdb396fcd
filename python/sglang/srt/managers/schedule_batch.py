"""Requests and batches of a decode worker with the decode tree.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); the resume #29471
(open).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req", "ScheduleBatch", "keep_extra_key", "load_saved"]


def _tail(chunks: list, start: int, size: int) -> list:
    """Drop the first ``start`` tokens of one layer's offloaded KV, in chunks of ``size`` tokens.

    chunks: tensors (tokens, ...) or [k, v] pairs of them, as ``KVCache.get_cpu_copy`` returns them.
    """
    if isinstance(chunks[0], torch.Tensor):
        return list(torch.cat(chunks)[start:].split(size))
    columns = [
        torch.cat([chunk[i] for chunk in chunks])[start:].split(size) for i in range(len(chunks[0]))
    ]
    return [list(parts) for parts in zip(*columns, strict=True)]


def load_saved(loader: Any, pool: Any, saved: list, table: torch.Tensor, start: int) -> None:
    """Load what ``pool`` saved, from token ``start`` on, into the slots of ``table``."""
    if start:
        saved = [_tail(layer, start, pool.cpu_offloading_chunk_size) for layer in saved]
    loader.load_cpu_copy(saved, table)


def keep_extra_key(message: Any) -> None:
    """Pass the ``extra_key`` of ``message`` on to its `Req` with the sampling parameters."""
    message.sampling_params.extra_key = message.extra_key


class Req(engine.Req):
    """A request, with its decode prefix once the decode tree has admitted it."""

    # Tokens that the decode tree held at its last admission; None if no decode tree admitted it.
    decode_prefix_len: int | None = None
    # The same at its first admission: prefill sends the rest, and nothing after a resume.
    transfer_prefix_len: int | None = None
    # Tokens of its prompt that a tier held at admission; 0 if no more than the tree.
    host_prefix_len: int = 0
    # Tokens of its prompt that decode computes; 0 if prefill computes all.
    computed_here: int = 0
    # Planned tokens of KV at its end, in whole pages; 0 until first computed.
    kv_at_length: int = 0
    # The part of cached_tokens that prefill held; None if no decode tree admitted it.
    prefill_cached_tokens: int | None = None
    # Its last req_to_token slot, once freed.
    freed_row: int | None = None
    # Generation of the tree when its KV was computed; None before admission.
    kv_generation: int | None = None

    def __init__(self, *args, extra_key=None, **kwargs):
        """Sets ``extra_key``, which the engine's scheduler drops; see `keep_extra_key`."""
        sampling_params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[3]
        extra_key = extra_key or getattr(sampling_params, "extra_key", None)
        super().__init__(*args, extra_key=extra_key, **kwargs)

    @property
    def held_len(self) -> int:
        """Tokens of its prompt that decode held at admission, in the tree or a tier."""
        return max(self.decode_prefix_len or 0, self.host_prefix_len)

    def init_next_round_input(self, tree_cache=None, cow_mamba: bool | None = None) -> None:
        """Keeps the engine from matching an admitted request again for its prebuilt batch.

        A longer match would move ``last_node``, whose lock the request holds, and
        ``cache_protected_len``; at its end the wrong range would be freed.
        """
        if self.decode_prefix_len is not None:
            tree_cache = None
        super().init_next_round_input(tree_cache, cow_mamba)

    def reset_for_retract(self) -> None:
        """Also resets ``cache_protected_len``: a resume matches again."""
        super().reset_for_retract()
        self.cache_protected_len = 0

    def restore_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator, start: int) -> None:
        """Load the offloaded KV from token ``start`` on; the tree holds the tokens before."""
        end = self.seqlen - 1
        if start < end:
            table = req_to_token_pool.req_to_token[self.req_pool_idx, start:end]
            pool = token_to_kv_pool_allocator.get_kvcache()
            load_saved(token_to_kv_pool_allocator, pool, self.kv_cache_cpu, table, start)
        del self.kv_cache_cpu

    def forget_saved_kv(self) -> None:
        """Drop the offloaded KV of a request that will not resume."""
        self.kv_cache_cpu: Any = None


class ScheduleBatch(engine.ScheduleBatch):
    """A batch that knows the slots that its step writes."""

    def slots_written(self, at: list[int]) -> np.ndarray:
        """Slots (int64) that the launched step writes for its requests at indices ``at``."""
        # Index on the host: a GPU would first copy the indices to the device.
        return self.out_cache_loc.cpu().numpy()[at]

    def states_written(self, at: list[int], page_size: int) -> set[int]:
        """As `slots_written`, for what requests have besides KV, see `StateKind.indices`."""
        return set()

    def prepare_for_prebuilt(self) -> None:
        """With the decode tree, skips the engine's copy of the prompts: no step runs this batch."""
        reqs = [req for req in self.reqs if req.decode_prefix_len is not None]
        whole = [(req.fill_ids, req.extend_input_len) for req in reqs]
        for req in reqs:
            req.fill_ids, req.extend_input_len = req.fill_ids[-1:], 1
        try:
            super().prepare_for_prebuilt()
        finally:
            for req, (fill_ids, extend_input_len) in zip(reqs, whole, strict=True):
                req.fill_ids, req.extend_input_len = fill_ids, extend_input_len
