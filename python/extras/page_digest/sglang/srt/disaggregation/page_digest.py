"""Digests of transferred KV pages, which show whether decode's pool holds what prefill's held.

A transport reports completed writes, not their content. With `--disaggregation-decode-verify-pages` decode requests a
digest of the delta, and compares it before the request is committed.

The digest of a KV head is multilinear hashing (Carter and Wegman 1981; Lemire and Kaser 2014) modulo 2^64 over its bits
as 32-bit words: the sum of word × weight. A weight is the product of three odd numbers: one for the word within the
head, one for the token within the delta, one for the layer's K or V buffer. A single wrong word is always detected; any
other difference is missed with a probability of about 2^-32. Digests of chunks add up, whatever the chunks and page
sizes. Each head has its own digest, so that workers with different TP sizes can compare. A pipeline stage has digests
of its own layers, numbered within the whole model. It detects faults, not forgery: the weights are public.

Upstream: sgl-project/sglang#39500 (merged) has a checksum, which #39729 (open) makes safe to enable.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.common.prefill_peers import Capabilities
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool

__all__ = ["DIGESTS", "PageDigests", "sends_digests"]

# Tokens of a delta hashed at once. Bounds the memory for products: 8 bytes per 4 bytes of KV.
TOKENS = 1024
# Heads in a message, at most; more than any model has.
MOST_HEADS = 4096
# Capabilities of a prefill that sends digests: of all layers, or of each pipeline stage.
DIGESTS = "digests", "stage_digests"
# The three factors of a weight.
WORD, TOKEN, BUFFER = 0, 1, 2


def sends_digests(prefill: Capabilities) -> bool:
    """Whether a prefill sends digests, of all layers or of each pipeline stage."""
    return any(name in prefill.others for name in DIGESTS)


def _odd(which: int, first: int, number: int) -> torch.Tensor:
    """``number`` odd 64-bit weights from index ``first`` on: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = np.arange(first, first + number, dtype=np.uint64) + np.uint64(which << 48) + np.uint64(1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _words(buffer: torch.Tensor) -> torch.Tensor:
    """A view of a KV buffer, [slots, heads, dim] or [slots, dim], as integers [slots, heads, words]."""
    heads = buffer.shape[1] if buffer.dim() == 3 else 1
    raw = buffer.view(torch.uint8).view(buffer.shape[0], heads, -1)
    return raw.view(torch.int32) if raw.shape[-1] % 4 == 0 else raw


class PageDigests:
    """Digests of pages of one rank's KV pool.

    pool: the target model's, plain MHA, MLA or NSA. first_head: this rank's first KV head among those of all
    attention-TP ranks. num_layers: of all pipeline stages, None without stages. Raises ValueError for another pool.
    """

    def __init__(self, pool, first_head: int = 0, num_layers: int | None = None):
        if type(pool) is MHATokenToKVPool:
            of_layers = [[k, v] for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
        elif type(pool) is MLATokenToKVPool:
            of_layers = [[buffer] for buffer in pool.kv_buffer]
        elif type(pool) is NSATokenToKVPool:
            # A row of index keys is a page; viewed as one row per token.
            index = [part.view(-1, part.shape[1] // pool.page_size) for part in pool.index_k_with_scale_buffer]
            of_layers = [list(buffers) for buffers in zip(pool.kv_buffer, index, strict=True)]
        else:
            raise ValueError(
                f"pages of a {type(pool).__name__} have no digest. Supported: plain MHA, MLA and NSA pools. "
                "Start decode without --disaggregation-decode-verify-pages."
            )
        self.page_size = pool.page_size
        self.first_head = first_head
        self.num_layers = num_layers or len(of_layers)
        self.first_layer = 0 if num_layers is None else pool.start_layer
        # Per layer of this stage: K and V, or latents and index keys.
        self._layers = [[_words(buffer) for buffer in buffers] for buffers in of_layers]
        first = self._layers[0][0]
        self.num_heads = first.shape[1]
        self._device = first.device
        widths = {words.shape[-1] for buffers in self._layers for words in buffers}
        self._of_word = {n: _odd(WORD, 0, n).to(first.device) for n in widths}
        # K of all layers of the model, then V.
        self._of_buffer = _odd(BUFFER, 0, self.num_layers * len(of_layers[0])).tolist()

    @classmethod
    def of_rank(cls, pool, tp_rank: int, tp_size: int, total_heads: int, num_layers: int | None = None) -> PageDigests:
        """Digests of one attention-TP rank; with fewer KV heads than ranks, several ranks hold the same head."""
        return cls(pool, 0 if isinstance(pool, MLATokenToKVPool) else tp_rank * total_heads // tp_size, num_layers)

    @property
    def layers(self) -> tuple[int, int]:
        """First layer of the model in this pool, and the one after its last."""
        return self.first_layer, self.first_layer + len(self._layers)

    def of(
        self, pages: npt.NDArray[np.int32], first_page: int = 0, layers: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Digests of the heads, int64 [num_heads] on the pool's device.

        pages: page numbers in the pool; the first is page ``first_page`` of the delta. layers: the first and the one
        after the last, numbered in the model; None for all layers of this stage.
        """
        total = torch.zeros(self.num_heads, dtype=torch.int64, device=self._device)
        slots = (pages[:, None].astype(np.int64) * self.page_size + np.arange(self.page_size)).reshape(-1)
        for start in range(0, len(slots), TOKENS):
            part = torch.from_numpy(slots[start : start + TOKENS]).to(self._device)
            of_token = _odd(TOKEN, first_page * self.page_size + start, len(part)).to(self._device)[:, None]
            for layer in range(*(layers or self.layers)):
                for kind, words in enumerate(self._layers[layer - self.first_layer]):
                    rows = words[part].to(torch.int64).mul_(self._of_word[words.shape[-1]])
                    of_buffer = self._of_buffer[kind * self.num_layers + layer]
                    total += (rows.sum(-1) * of_token).sum(0) * of_buffer
        return total

    def claim(self, digests: torch.Tensor) -> str:
        """Prefill's message: the number of its first head, a colon, and 16 hexadecimal digits per head.

        A pipeline stage adds a colon, its first layer, a hyphen, and the one after its last.
        """
        claim = f"{self.first_head}:" + "".join(f"{value & (1 << 64) - 1:016x}" for value in digests.tolist())
        return claim if len(self._layers) == self.num_layers else f"{claim}:{self.layers[0]}-{self.layers[1]}"

    def difference(self, pages: npt.NDArray[np.int32], claims: Iterable[str]) -> str | None:
        """Compare ``pages``, which hold a whole delta, with the claims of all writers; None if equal, else the fault.

        Waits for the device.
        """
        # By layers and head.
        told: dict[tuple[int, int], dict[int, set[int]]] = {}
        try:
            for claim in claims:
                layers, digests = _read(claim, self.num_layers)
                for head, digest in digests.items():
                    told.setdefault(layers, {}).setdefault(head, set()).add(digest)
        except ValueError as e:
            return f"the digest that prefill sent cannot be read: {e}"
        own = {layers: [value & (1 << 64) - 1 for value in self.of(pages, layers=layers).tolist()] for layers in told}
        for head in range(self.first_head, self.first_head + self.num_heads):
            done = 0
            for first, end in sorted(layers for layers, heads in told.items() if head in heads):
                if first != done:
                    break
                done = end
                if told[first, end][head] != {own[first, end][head - self.first_head]}:
                    return f"what has arrived of KV head {head} is not what prefill sent (digest of {len(pages)} pages)"
            if done != self.num_layers:
                where = f" from layer {done} on" if done else ""
                return f"prefill sent no digest of KV head {head}{where}"
        return None


def _read(claim: str, num_layers: int) -> tuple[tuple[int, int], dict[int, int]]:
    """The layers of a claim and its digests by head. Raises ValueError for an invalid claim."""
    parts = claim.split(":")
    first, digits = parts[0], parts[1] if len(parts) > 1 else "?"
    layers = parts[2].split("-") if len(parts) == 3 else ["0", str(num_layers)]
    if (
        len(parts) not in (2, 3)
        or not first.isdecimal()
        or len(digits) % 16
        or len(digits) > 16 * MOST_HEADS
        or len(layers) != 2
        or not all(number.isdecimal() for number in layers)
        or not 0 <= int(layers[0]) < int(layers[1]) <= num_layers
    ):
        raise ValueError(f"{claim[:40]!r}")
    digests = {int(first) + n: int(digits[16 * n : 16 * (n + 1)], 16) for n in range(len(digits) // 16)}
    return (int(layers[0]), int(layers[1])), digests
