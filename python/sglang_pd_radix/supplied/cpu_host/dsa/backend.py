"""The attention backend ``nsa``: of each new token to the tokens that the indexer selects."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..dp_attention import PADDED_SEQ_LEN
from .kernels import BLOCK, index_scores, load, select, sparse_attention


class Step:
    """The new tokens of a batch: of each its request's slots in the pool and the number of tokens that it sees.

    The indexer asks for it by the methods of the engine's metadata.
    """

    def __init__(self, batch: Any) -> None:
        self._table = batch.req_to_token_pool.req_to_token
        rows, ends = batch.req_pool_indices.long(), batch.seq_lens.long()
        news = torch.ones_like(ends) if batch.forward_mode.is_decode_or_idle() else batch.extend_seq_lens.long()
        self._requests = list(zip(rows.tolist(), ends.tolist(), news.tolist(), strict=True))
        self._row_of = rows.repeat_interleave(news)
        # How far a token is from the first one behind its request's.
        behind = news.cumsum(0).repeat_interleave(news) - torch.arange(len(self._row_of))
        self._lens = ends.repeat_interleave(news) - behind + 1

    def get_seqlens_expanded(self) -> torch.Tensor:
        """How many tokens each new token sees, itself among them."""
        return self._lens

    def topk_transform(self, logits: torch.Tensor, topk: int) -> torch.Tensor:
        """The slots of all that each new token sees, int64 (tokens, topk), where those are ``topk`` at most."""
        places = torch.arange(topk)
        slots = self._table[self._row_of, :topk].long()
        if slots.shape[1] < topk:
            slots = torch.nn.functional.pad(slots, (0, topk - slots.shape[1]), value=-1)
        return slots.masked_fill(places >= self._lens.unsqueeze(1), -1)

    def index(
        self, q: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, page_size: int, topk: int
    ) -> torch.Tensor:
        """The slots that each new token attends to, int64 (tokens, topk), -1 for none. q, weights: `index_scores`."""
        found, at = torch.full((len(q), topk), -1), 0
        for row, end, new in self._requests:
            slots = self._table[row, :end].long()
            keys, scales = load(pages, slots, page_size)
            step = max(1, BLOCK // (end * q.shape[1]))
            for a in range(at, at + new, step):
                part = slice(a, min(a + step, at + new))
                chosen = select(index_scores(q[part], weights[part], keys, scales), self._lens[part], topk)
                found[part] = slots[chosen.clamp(min=0)].masked_fill(chosen < 0, -1)
            at += new
        return found


class TorchSparseAttnBackend(AttentionBackend):
    """The tokens that the indexer names, for prompts and decode steps alike."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return PADDED_SEQ_LEN

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.step = Step(forward_batch)

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Step:
        return self.step

    def support_triton(self) -> bool:
        return False

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, torch.cat([k, k_rope], -1), k)
        latents = pool.get_key_buffer(layer.layer_id)
        query = torch.cat([q, q_rope], -1)
        out = sparse_attention(query, latents, topk_indices, layer.v_head_dim, layer.scaling)
        return out.view(len(q), -1)

    forward_decode = forward_extend
