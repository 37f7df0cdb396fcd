"""The kernels of the indexer and of the attention, in torch."""

from __future__ import annotations

import torch

#: The largest number that float8_e4m3fn holds.
_FP8_MAX = 448.0
#: What is gathered at once, in numbers.
BLOCK = 2**24


def quantize(x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``act_quant``: x, (.., size), as float8_e4m3fn, and one float32 scale for each ``block_size`` numbers of a row.

    With ``scale_fmt`` the scales are powers of two.
    """
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / _FP8_MAX
    if scale_fmt is not None:
        fraction, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    y = (blocks / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return y.flatten(-2), scale.squeeze(-1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``rotate_activation``: x, (.., size), times Sylvester's Hadamard matrix, with the norm that it had."""
    size, y, half = x.shape[-1], x.float(), 1
    while half < size:
        y = y.unflatten(-1, (-1, 2, half))
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), -2).flatten(-3)
        half *= 2
    return (y * size**-0.5).to(x.dtype)


def _split(pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's index pages as views: keys, uint8 (pages, page_size, 128), and scales, float32 (pages, page_size)."""
    scales = 4 * page_size
    return pages[:, :-scales].unflatten(1, (page_size, -1)), pages[:, -scales:].view(torch.float32)


def store(
    buf: torch.Tensor, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor, page_size: int
) -> None:
    """Write index keys, float8_e4m3fn (tokens, 128), and their scales to the slots ``loc`` of a layer's index pages."""
    keys, scales = _split(buf, page_size)
    keys[loc // page_size, loc % page_size] = index_k.view(torch.uint8)
    scales[loc // page_size, loc % page_size] = index_k_scale.flatten()


def load(pages: torch.Tensor, loc: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The index keys of slots and their scales; as `store` takes them."""
    keys, scales = _split(pages, page_size)
    at = loc // page_size, loc % page_size
    return keys[at].view(torch.float8_e4m3fn), scales[at]


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the indexer says of each token to each query, float32 (queries, tokens).

    q: float8_e4m3fn (queries, heads, 128). weights: (queries, heads). keys, scales: as of `load`. The products of fp8
    are summed up in float64, which holds them exactly: scores do not depend on what else is in a batch.
    """
    products = torch.einsum("qhd,kd->hqk", q.double(), keys.double()).clamp_(min=0)
    by_head = weights.double().t().unsqueeze(2)
    score = products[0] * by_head[0]
    for head in range(1, len(products)):
        score += products[head] * by_head[head]
    return (score * scales).float()


def select(scores: torch.Tensor, lens: torch.Tensor, topk: int) -> torch.Tensor:
    """The positions with the ``topk`` best scores of each query, in rising order, and -1 behind them.

    scores: (queries, tokens). lens: how many of the tokens each query sees. Of equal scores the first count. Returns
    int64 (queries, topk).
    """
    tokens = scores.shape[1]
    seen = torch.arange(tokens) < lens.unsqueeze(1)
    scores = scores.masked_fill(~seen, -torch.inf)
    worst = scores.topk(min(topk, tokens)).values[:, -1:]
    better, equal = scores > worst, scores == worst
    taken = (better | (equal & (equal.cumsum(1) <= topk - better.sum(1, keepdim=True)))) & seen
    places = torch.where(taken, torch.arange(tokens), tokens)
    found = torch.full((len(scores), topk), -1)
    best = places.topk(min(topk, tokens), largest=False, sorted=True).values
    found[:, : best.shape[1]] = best.masked_fill(best == tokens, -1)
    return found


def sparse_attention(
    q: torch.Tensor, latents: torch.Tensor, slots: torch.Tensor, rank: int, scaling: float
) -> torch.Tensor:
    """Attention of each token to the slots of its own.

    q: (tokens, heads, size). latents: the layer's pool, (slots, 1, size), of which the first ``rank`` numbers are the
    value. slots: (tokens, topk), -1 for none. Returns (tokens, heads, rank); zeros for a token
    without slots, and for what fills up the batch behind ``slots``.
    """
    out = q.new_zeros(*q.shape[:2], rank)
    step = max(1, BLOCK // (slots.shape[1] * q.shape[2]))
    for a in range(0, len(slots), step):
        at, part = slots[a : a + step], slice(a, min(a + step, len(slots)))
        kv = latents[at.clamp(min=0), 0].to(q.dtype)
        scores = (q[part] @ kv.transpose(1, 2) * scaling).masked_fill((at < 0).unsqueeze(1), -torch.inf)
        out[part] = scores.softmax(2).nan_to_num_() @ kv[..., :rank]
    return out
