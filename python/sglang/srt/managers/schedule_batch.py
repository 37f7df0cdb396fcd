"""Requests that decode has already given their KV.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from sglang.srt.managers import schedule_batch as engine

__all__ = ["Req"]


def _tail(chunks: list, start: int, size: int) -> list:
    """Cut the first ``start`` tokens off one layer's offloaded KV and chunk the rest by ``size`` tokens again.

    chunks: tensors of shape (tokens, ...), or [k, v] pairs of them, as ``KVCache.get_cpu_copy`` returns per layer.
    """
    if isinstance(chunks[0], torch.Tensor):
        return list(torch.cat(chunks)[start:].split(size))
    columns = [torch.cat([chunk[i] for chunk in chunks])[start:].split(size) for i in range(len(chunks[0]))]
    return [list(parts) for parts in zip(*columns, strict=True)]


class Req(engine.Req):
    """A request that knows whether decode has admitted it with a prefix of its own."""

    # Tokens that the decode tree held when it last admitted the request; None where no decode tree did.
    decode_prefix_len: int | None = None
    # The same at its first admission, when prefill was asked for the rest; a resume asks prefill for nothing.
    transfer_prefix_len: int | None = None
    # Of cached_tokens, what prefill held; None where no decode tree admitted the request.
    prefill_cached_tokens: int | None = None
    # Its KV slots as the engine wants them when the prebuilt batch is made, from commit until then.
    committed_indices: torch.Tensor | None = None
    # The tree's generation when this request's KV was computed; None before admission.
    kv_generation: int | None = None
    # The state of a retracted request of a hybrid model, in host memory.
    state_cpu: list[torch.Tensor] | None = None
    # The key of the message from which the next request is made; see Scheduler.handle_generate_request.
    incoming_extra_key: ClassVar[str | None] = None

    def __init__(self, *args, extra_key: str | None = None, **kwargs):
        """Adds the key of the message that the request comes from, which the engine's scheduler does not pass on."""
        super().__init__(*args, extra_key=extra_key or Req.incoming_extra_key, **kwargs)

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
        self.committed_indices = None

    def offload_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator) -> None:
        """Adds the state that layers without KV have of the request; the engine loses it."""
        super().offload_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)
        if self.mamba_pool_idx is not None:
            self.state_cpu = req_to_token_pool.mamba_pool.get_cpu_copy(self.mamba_pool_idx)

    def load_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator) -> None:
        """Adds the state."""
        super().load_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)
        self._load_state(req_to_token_pool)

    def _load_state(self, req_to_token_pool) -> None:
        if self.state_cpu is not None:
            req_to_token_pool.mamba_pool.load_cpu_copy(self.state_cpu, self.mamba_pool_idx)
            self.state_cpu = None

    def restore_kv_cache(self, req_to_token_pool, token_to_kv_pool_allocator, start: int) -> None:
        """Load the state and the offloaded KV of the tokens from ``start`` on; the tree holds those before it."""
        end = self.seqlen - 1
        if start < end:
            pool = token_to_kv_pool_allocator.get_kvcache()
            table = req_to_token_pool.req_to_token[self.req_pool_idx, start:end]
            size = pool.cpu_offloading_chunk_size
            kv_cache_cpu = self.kv_cache_cpu
            if start:
                kv_cache_cpu = [_tail(layer, start, size) for layer in kv_cache_cpu]
            token_to_kv_pool_allocator.load_cpu_copy(kv_cache_cpu, table)
        del self.kv_cache_cpu
        self._load_state(req_to_token_pool)
