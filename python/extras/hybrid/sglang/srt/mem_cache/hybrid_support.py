"""Models and options refused with the decode tree and Mamba or SWA state, as entries of `cache_support.py`.

Upstream: none: it names what has been verified here.
"""

from __future__ import annotations

from sglang.srt.mem_cache.cache_support import FLAG, KINDS, SPECULATION, CacheKind, Refused, switch

__all__ = ["LINEAR", "STATES", "WINDOWS"]

#: Verified models with states. Others may keep their states in another way.
STATES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "FalconH1ForCausalLM",
    "NemotronHForCausalLM",
    "KimiLinearForCausalLM",
)

LINEAR = CacheKind(
    "the same, linear attention (GDN, KDA) or Mamba2 in some layers",
    "DecodeRadixCache",
    (),
)

WINDOWS = CacheKind(
    "the same, sliding windows in some layers",
    "WindowRadixCache",
    (
        Refused(
            f"{FLAG} is not verified for a model with sliding windows together with {{name}}. Leave that out, "
            "start with --disable-hybrid-swa-memory, which keeps the KV of all layers for all tokens, or start "
            "this decode worker without the flag.",
            (
                SPECULATION,
                switch("--enable-dp-attention"),
                switch("--enable-hierarchical-cache"),
            ),
        ),
    ),
)

KINDS += LINEAR, WINDOWS
