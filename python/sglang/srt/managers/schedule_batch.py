"""Requests that decode has already given their KV.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); the resume #29471 (open).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req", "ScheduleBatch", "keep_extra_key", "load_saved"]


def _tail(chunks: list, start: int, size: int) -> list:
    """Cut the first ``start`` tokens off one layer's offloaded KV and chunk the rest by ``size`` tokens again.

    chunks: tensors of shape (tokens, ...), or [k, v] pairs of them, as ``KVCache.get_cpu_copy`` returns per layer.
    """
    if isinstance(chunks[0], torch.Tensor):
        return list(torch.cat(chunks)[start:].split(size))
    columns = [torch.cat([chunk[i] for chunk in chunks])[start:].split(size) for i in range(len(chunks[0]))]
    return [list(parts) for parts in zip(*columns, strict=True)]


def load_saved(loader: Any, pool: Any, saved: list, table: torch.Tensor, start: int) -> None:
    """Have ``loader`` load what ``pool`` saved into the slots of ``table``, leaving out the first ``start`` tokens."""
    if start:
        saved = [_tail(layer, start, pool.cpu_offloading_chunk_size) for layer in saved]
    loader.load_cpu_copy(saved, table)


def keep_extra_key(message: Any) -> None:
    """Have the request that is made of ``message`` get its ``extra_key``: its sampling parameters bring it along."""
    message.sampling_params.extra_key = message.extra_key


class Req(engine.Req):
    """A request that knows whether decode has admitted it with a prefix of its own."""

    # Tokens that the decode tree held when it last admitted the request; None where no decode tree did.
    decode_prefix_len: int | None = None
    # The same at its first admission, when prefill was asked for the rest; a resume asks prefill for nothing.
    transfer_prefix_len: int | None = None
    # Tokens of its prompt that a tier had when it was admitted; 0: no more than the tree.
    host_prefix_len: int = 0
    # Tokens of its prompt that decode computes itself; 0 where prefill does.
    computed_here: int = 0
    # Tokens of KV, in whole pages, that it will have in the end, as far as is planned for; 0 until that is asked for.
    kv_at_length: int = 0
    # Of cached_tokens, what prefill held; None where no decode tree admitted the request.
    prefill_cached_tokens: int | None = None
    # The row that it had last, when that has been freed.
    freed_row: int | None = None
    # The tree's generation when this request's KV was computed; None before admission.
    kv_generation: int | None = None

    def __init__(self, rid, origin_input_text, origin_input_ids, sampling_params, *args, extra_key=None, **kwargs):
        """Adds the ``extra_key`` of the message, which the engine's scheduler drops; see `keep_extra_key`."""
        extra_key = extra_key or getattr(sampling_params, "extra_key", None)
        super().__init__(
            rid, origin_input_text, origin_input_ids, sampling_params, *args, extra_key=extra_key, **kwargs
        )

    @property
    def held_len(self) -> int:
        """Tokens of its prompt that decode held when it was admitted, in its pool or in a tier."""
        return max(self.decode_prefix_len or 0, self.host_prefix_len)

    def init_next_round_input(self, tree_cache=None, cow_mamba: bool | None = None) -> None:
        """Keeps the engine from matching an admitted request again when its prebuilt batch is made.

        The node it holds is locked; a newer, longer match would move ``last_node`` and ``cache_protected_len`` and the
        wrong range would be freed at finish.
        """
        if self.decode_prefix_len is not None:
            tree_cache = None
        super().init_next_round_input(tree_cache, cow_mamba)

    def reset_for_retract(self) -> None:
        """Adds what admission set, since a resume matches anew."""
        super().reset_for_retract()
        self.cache_protected_len = 0

    def restore_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator, start: int) -> None:
        """Load the offloaded KV of the tokens from ``start`` on; the tree holds those before it."""
        end = self.seqlen - 1
        if start < end:
            table = req_to_token_pool.req_to_token[self.req_pool_idx, start:end]
            pool = token_to_kv_pool_allocator.get_kvcache()
            load_saved(token_to_kv_pool_allocator, pool, self.kv_cache_cpu, table, start)
        del self.kv_cache_cpu

    def forget_saved_kv(self) -> None:
        """It does not come back."""
        self.kv_cache_cpu: Any = None


class ScheduleBatch(engine.ScheduleBatch):
    """A batch of which it is known where a step writes."""

    def slots_written(self, at: list[int]) -> np.ndarray:
        """The slots, int64, that a step, since it was launched, writes to for its requests at these places."""
        # Copied to the host as a whole: on a device, indices would first be copied there.
        return self.out_cache_loc.cpu().numpy()[at]

    def states_written(self, at: list[int], page_size: int) -> set[int]:
        """The same of what these have beside KV, see `StateKind.indices`."""
        return set()

    def check_decode_mem(self, selected_indices: list[int] | None = None) -> bool:
        """What is being copied to host memory is let go before a request is retracted. With the decode tree only."""
        enough = super().check_decode_mem(selected_indices)
        tier = getattr(self.tree_cache, "tier", None)
        if not enough and tier is not None and tier.release_device():
            enough = super().check_decode_mem(selected_indices)
        return enough

    def prepare_for_prebuilt(self) -> None:
        """With the decode tree, leaves prompts out, which the engine flattens and copies: no step runs this batch."""
        reqs = [req for req in self.reqs if req.decode_prefix_len is not None]
        whole = [(req.fill_ids, req.extend_input_len) for req in reqs]
        for req in reqs:
            req.fill_ids, req.extend_input_len = req.fill_ids[-1:], 1
        try:
            super().prepare_for_prebuilt()
        finally:
            for req, (fill_ids, extend_input_len) in zip(reqs, whole, strict=True):
                req.fill_ids, req.extend_input_len = fill_ids, extend_input_len
