"""Sizes of the models of ``pd-radix make-model``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. ``kv_bytes_per_token`` is what one cached token occupies in float32.

    For "mla" and "dsa", ``head_dim`` is the size of each head's value, of the part of its key that has no position and
    of the one that has (shared by all heads); ``kv_rank`` and ``query_rank`` are the sizes of the compressed forms.
    """

    arch: str = "qwen3"
    layers: int = 4
    hidden: int = 256
    heads: int = 0  # 0: 16, and 8 for "mla" and "dsa", which cost a CPU several times as much per head
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 4096
    max_positions: int = 32768
    kv_rank: int = 256
    query_rank: int = 128

    def __post_init__(self) -> None:
        if self.heads == 0:
            object.__setattr__(self, "heads", 8 if self.latent else 16)

    @property
    def latent(self) -> bool:
        """Whether the KV of all heads is one compressed vector."""
        return self.arch in ("mla", "dsa")

    @property
    def kv_bytes_per_token(self) -> int:
        own = self.head_dim // 2 if self.arch == "kimi-linear" else self.head_dim if self.latent else None
        per_layer = 2 * self.kv_heads * self.head_dim if own is None else self.kv_rank + own
        half = self.arch.startswith(("qwen3-next", "qwen3.5", "nemotron-h", "kimi-linear"))
        layers = self.layers // 2 if half else self.layers
        return layers * per_layer * 4


SIZES = {
    "layers": "decoder layers",
    "hidden": "hidden size",
    "heads": "query heads; 8 for mla and dsa",
    "kv_heads": "key/value heads (qwen3, eagle, eagle3)",
    "head_dim": "size of one head",
    "kv_rank": "size of the compressed key and value (mla, dsa, kimi-linear)",
    "query_rank": "size of the compressed query (mla, dsa)",
    "intermediate": "size of the MLP",
    "vocab": "tokens in the vocabulary",
    "max_positions": "longest context in tokens",
}


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")
