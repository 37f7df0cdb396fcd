"""Attention for CPU hosts: the requests of a decode step at once, and what they share read once; and for prompts.

plan.py       the pieces of KV of a step, in blocks, from batch to batch and from step to step
kernel.py     the computation
extend.py     prompts behind what is cached, and layers with a sliding window
backend.py    the engine's interface

Who shares what, and what of it pays, is in ``sglang_pd_radix/supplied/shared_prefix``, which GPUs use as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pd_radix.environment import switched_on

#: The value of ``--attention-backend``.
NAME = "torch_batched"
#: 0: every request reads its whole KV.
SHARE = "SGLANG_CPU_SHARED_PREFIX_ATTENTION"


def shares_prefixes() -> bool:
    """Whether shared KV is read once. Raises ValueError for a value of `SHARE` that is neither yes nor no."""
    return switched_on(SHARE, "to read shared prefixes once", "to have each request read all of its KV", True)


def _patch_registry(module: Any) -> None:
    @module.register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        from .backend import TorchBatchedAttnBackend

        return TorchBatchedAttnBackend(runner)


def _patch_choices(module: Any) -> None:
    module.add_attention_backend_choices([NAME])


def _patch_utils(module: Any) -> None:
    engine_answer = module.support_triton
    # Asked by name, of backends that the engine knows, whether Triton kernels can fill its tables. None can here.
    module.support_triton = lambda backend: backend not in (NAME, "triton") and engine_answer(backend)


def _patch_mem_cache(module: Any) -> None:
    # The same question, asked without that function.
    module.get_last_loc_triton = module.get_last_loc_torch


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.attention_registry": _patch_registry,
    "sglang.srt.mem_cache.common": _patch_mem_cache,
    "sglang.srt.server_args": _patch_choices,
    "sglang.srt.utils.common": _patch_utils,
}
