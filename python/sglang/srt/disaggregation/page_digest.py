"""Digests of transferred KV pages: whether what lies in decode's pool is what lay in prefill's.

A transport reports that it has written, not what has arrived. With `--disaggregation-decode-verify-pages` decode asks
for a digest of the delta with it, and compares before the request is committed.

The digest of a KV head is multilinear hashing (Carter and Wegman 1981; Lemire and Kaser 2014) modulo 2^64 over its bits
as 32-bit words: the sum of word × weight. A weight is a product of three odd numbers: of the word within the head, of
the token within the delta, and of the layer's K or V buffer. So a single wrong word is always found, and an arbitrary
difference but for a chance of about 2^-32; and digests of chunks add up, whatever the chunks and page sizes. Each head
has its own, so that workers of different TP sizes, which hold different heads, can compare. It finds faults, not
forgers: the weights are public.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

__all__ = ["PageDigests"]

# Tokens of a delta that are looked at in one go: bounds the memory for products, 8 bytes for 4 of KV.
TOKENS = 1024
# Of a message; more heads than any model has.
MOST_HEADS = 4096
# Which of the three factors of a weight.
WORD, TOKEN, BUFFER = 0, 1, 2


def _odd(which: int, first: int, number: int) -> torch.Tensor:
    """``number`` odd 64-bit weights from index ``first`` on: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = np.arange(first, first + number, dtype=np.uint64) + np.uint64(which << 48) + np.uint64(1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _words(buffer: torch.Tensor) -> torch.Tensor:
    """A KV buffer, [slots, heads, dim] or [slots, dim], as [slots, heads, words] of integers over the same memory."""
    heads = buffer.shape[1] if buffer.dim() == 3 else 1
    raw = buffer.view(torch.uint8).view(buffer.shape[0], heads, -1)
    return raw.view(torch.int32) if raw.shape[-1] % 4 == 0 else raw


class PageDigests:
    """Digests of pages of one rank's KV pool.

    pool: the target model's, plain MHA or MLA. first_head: number of this rank's first KV head among those of all
    attention-TP ranks. Raises ValueError for a pool whose KV is not all in such buffers.
    """

    def __init__(self, pool, first_head: int = 0):
        if type(pool) is MHATokenToKVPool:
            buffers = [*pool.k_buffer, *pool.v_buffer]
        elif type(pool) is MLATokenToKVPool:
            buffers = list(pool.kv_buffer)
        else:
            raise ValueError(
                f"pages of a {type(pool).__name__} have no digest, only those of plain MHA and MLA pools. "
                "Start decode without --disaggregation-decode-verify-pages."
            )
        self.page_size = pool.page_size
        self.first_head = first_head
        self.num_heads = _words(buffers[0]).shape[1]
        self._buffers = [_words(buffer) for buffer in buffers]
        device = buffers[0].device
        self._of_word = {n: _odd(WORD, 0, n).to(device) for n in {words.shape[-1] for words in self._buffers}}
        self._of_buffer = _odd(BUFFER, 0, len(buffers)).tolist()

    @classmethod
    def of_rank(cls, pool, tp_rank: int, tp_size: int, total_heads: int) -> PageDigests:
        """Those of one attention-TP rank; with fewer KV heads than ranks, several have the same head."""
        return cls(pool, 0 if isinstance(pool, MLATokenToKVPool) else tp_rank * total_heads // tp_size)

    def of(self, pages: npt.NDArray[np.int32], first_page: int = 0) -> torch.Tensor:
        """Digests of the heads, int64 [num_heads] on the pool's device.

        pages: page numbers in the pool, of which the first is page ``first_page`` of the delta.
        """
        first = self._buffers[0]
        total = torch.zeros(self.num_heads, dtype=torch.int64, device=first.device)
        slots = (pages[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)).reshape(-1)
        for start in range(0, len(slots), TOKENS):
            part = torch.from_numpy(slots[start : start + TOKENS]).to(first.device)
            of_token = _odd(TOKEN, first_page * self.page_size + start, len(part)).to(first.device)[:, None]
            for words, of_buffer in zip(self._buffers, self._of_buffer, strict=True):
                rows = words[part].to(torch.int64).mul_(self._of_word[words.shape[-1]])
                total += (rows.sum(-1) * of_token).sum(0) * of_buffer
        return total

    def claim(self, digests: torch.Tensor) -> str:
        """What prefill tells of its heads: the number of the first, a colon, and 16 hexadecimal digits of each."""
        return f"{self.first_head}:" + "".join(f"{value & (1 << 64) - 1:016x}" for value in digests.tolist())

    def difference(self, pages: npt.NDArray[np.int32], claims: Iterable[str]) -> str | None:
        """What is wrong with ``pages``, which hold a whole delta, by the claims of all who wrote them; None if nothing.

        Waits for the device.
        """
        told: dict[int, set[int]] = {}
        try:
            for claim in claims:
                for head, digest in _read(claim).items():
                    told.setdefault(head, set()).add(digest)
        except ValueError as e:
            return f"the digest that prefill sent cannot be read: {e}"
        own = [value & (1 << 64) - 1 for value in self.of(pages).tolist()]
        for head, digest in enumerate(own, self.first_head):
            if head not in told:
                return f"prefill sent no digest of KV head {head}"
            if told[head] != {digest}:
                return f"what has arrived of KV head {head} is not what prefill sent (digest of {len(pages)} pages)"
        return None


def _read(claim: str) -> dict[int, int]:
    """Digests by head. Raises ValueError for what is no claim."""
    first, colon, digits = claim.partition(":")
    if not colon or not first.isdecimal() or len(digits) % 16 or len(digits) > 16 * MOST_HEADS:
        raise ValueError(f"{claim[:40]!r}")
    return {int(first) + n: int(digits[16 * n : 16 * (n + 1)], 16) for n in range(len(digits) // 16)}
