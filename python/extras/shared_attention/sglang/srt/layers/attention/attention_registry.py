"""The ``triton`` attention backend with shared prefixes, where requested.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.attention import attention_registry as engine
from sglang.srt.layers.attention.shared_prefix import option

logger = logging.getLogger(__name__)

__all__ = ["create_triton_backend"]


@engine.register_attention_backend("triton")
def create_triton_backend(runner: Any) -> Any:
    """The ``triton`` backend. With SGLANG_TRITON_SHARED_PREFIX_ATTENTION=1, and a model that allows it, decode steps
    read shared prefixes once. Otherwise it is the engine's."""
    if not option.wanted() or runner.server_args.disaggregation_mode == "prefill" or runner.is_draft_worker:
        return engine.create_triton_backend(runner)
    from sglang.srt.layers.attention.shared_prefix import triton_shared

    layers = triton_shared.attention_layers(runner)
    reason = option.why_not(runner, layers)
    if reason is not None:
        logger.warning(f"{option.OPTION}=1 has no effect for this model: {reason}. Each request reads all of its KV.")
        return engine.create_triton_backend(runner)
    logger.info("Decode attention reads prefixes that running requests share once (triton).")
    return triton_shared.SharedPrefixTritonBackend(runner, layers)
