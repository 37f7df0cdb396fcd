"""Attention of one step in torch: pieces of KV in blocks of similar ones, and their merge by log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Block:
    """``count`` pieces of at most ``length`` tokens, each with ``width`` queries, that one call attends to."""

    count: int
    width: int
    length: int
    #: Which query, by position in the batch; [count * width]. Where a piece has fewer, one is repeated.
    queries: torch.Tensor
    #: Numbers of the pool's pages, [count * length / page]; or, if the slots of the only piece are a run, the first.
    pages: torch.Tensor | int
    #: 0, and -inf behind the end of a piece; float32 [count, 1, 1, length]. None if all are of full length.
    mask: torch.Tensor | None
    #: Places within the block that come with a page and are nobody's yet; None where there are none.
    unwritten: torch.Tensor | None
    #: Where the results begin among the partial results.
    first: int


@dataclass
class Plan:
    """All blocks of a step, and how a request's result is made of ``partials`` results.

    sources: [requests, most pieces], the results of each, requests of most pieces first; filled up with ``partials``,
    which stands for none. inverse: the row of each request there. counts: how many requests have a 1st, 2nd, ... piece.
    """

    blocks: list[Block]
    partials: int
    inverse: torch.Tensor
    sources: torch.Tensor
    counts: list[int]


class Workspace:
    """Memory that is kept between calls: fresh pages of the system cost more than what is computed in them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, good until this name is asked for again."""
        size = 1
        for extent in shape:
            size *= extent
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._held[name, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    page_size: int,
    scale: float,
    workspace: Workspace,
) -> torch.Tensor:
    """Attention of one query per request to its KV; [requests, heads, value dim].

    query: [requests, heads, dim]. keys, values: the pool's, [slots, KV heads, dim or value dim]; of values that are the
    head of the keys (MLA) only the keys are read.
    """
    requests, heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    latent = values.data_ptr() == keys.data_ptr()
    parts = workspace.get("parts", (plan.partials, heads, value_dim), torch.float32)
    weights = workspace.get("weights", (plan.partials + 1, heads), torch.float32)
    weights[plan.partials] = float("-inf")
    for block in plan.blocks:
        shape = (block.count, block.width, kv_heads, heads // kv_heads)
        # The queries of a piece, and those that share a KV head, are rows of one product.
        q = (
            query.index_select(0, block.queries)
            .view(*shape, dim)
            .transpose(1, 2)
            .reshape(block.count, kv_heads, -1, dim)
        )
        k = _gather(keys, block, page_size, workspace, "keys")
        v = k if latent else _gather(values, block, page_size, workspace, "values")
        # Returns the log-sum-exp beside the result, which the public function of it does not.
        out, lse = _flash(q, k, v, attn_mask=block.mask, scale=scale)
        rows = slice(block.first, block.first + block.count * block.width)
        by_head = (block.count, kv_heads, block.width, heads // kv_heads)
        parts[rows].view(*shape, value_dim).copy_(out[..., :value_dim].unflatten(2, by_head[2:]).transpose(1, 2))
        weights[rows].view(shape).copy_(lse.view(by_head).transpose(1, 2))
    return _merge(parts, weights, plan).to(query.dtype)


def _gather(pool: torch.Tensor, block: Block, page_size: int, workspace: Workspace, name: str) -> torch.Tensor:
    """A block's keys or values, [count, KV heads, length, dim]."""
    heads, dim = pool.shape[1:]
    if isinstance(block.pages, int):
        held = pool[block.pages : block.pages + block.length]
    else:
        held = workspace.get(name, (block.count * block.length, heads, dim), pool.dtype)
        torch.index_select(
            pool.view(-1, page_size, heads, dim), 0, block.pages, out=held.view(-1, page_size, heads, dim)
        )
        if block.unwritten is not None:
            # The mask takes away any number, but not a NaN that an earlier request left there.
            held.index_fill_(0, block.unwritten, 0)
    return held.view(block.count, block.length, heads, dim).transpose(1, 2)


def _merge(parts: torch.Tensor, weights: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Results over parts of the KV to those over all of it: sum of softmax(lse) * result, in float32."""
    first = plan.sources[:, 0]
    if len(plan.counts) == 1:
        return parts.index_select(0, first.index_select(0, plan.inverse))
    share = torch.softmax(weights[plan.sources], dim=1).unsqueeze(-1)
    out = parts.index_select(0, first).mul_(share[:, 0])
    for i, count in enumerate(plan.counts[1:], 1):
        out[:count].addcmul_(parts.index_select(0, plan.sources[:count, i]), share[:count, i])
    return out.index_select(0, plan.inverse)
