"""Defaults of server arguments that suit a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from . import attention, kernels

#: What has torch forms, see `speculative`. The last is the engine's other name of the first.
SPECULATION = ("EAGLE", "EAGLE3", "NEXTN")


def _speculates(instance: Any) -> None:
    """Choose what drafts run on here, or raise ValueError for what cannot."""
    if instance.speculative_algorithm not in SPECULATION:
        raise ValueError(
            f"--speculative-algorithm {instance.speculative_algorithm} does not run on a CPU host; "
            f"{', '.join(SPECULATION)} does."
        )
    if (instance.speculative_eagle_topk or 1) != 1:
        raise ValueError("On a CPU host drafts are chains: give --speculative-eagle-topk 1.")
    if instance.attention_backend is None:
        instance.attention_backend = "triton"
    if instance.attention_backend != "triton":
        raise ValueError(
            f"Speculative decoding on a CPU host runs on --attention-backend triton, whose kernels are replaced by "
            f"torch, and not on {instance.attention_backend}. Leave the option out."
        )
    instance.disable_cuda_graph = True
    if instance.speculative_num_steps is None and instance.speculative_num_draft_tokens is None:
        # The engine's own choice is a tree.
        instance.speculative_num_steps, instance.speculative_eagle_topk = 3, 1
        instance.speculative_num_draft_tokens = 4


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_cpu_backends")
    def defaults(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device == "cpu":
            if instance.speculative_algorithm is not None:
                _speculates(instance)
            if not kernels.has_cpu_kernels() and instance.attention_backend is None:
                # What is compiled as a whole cannot have a plan made for each step.
                instance.attention_backend = "torch_native" if instance.enable_torch_compile else attention.NAME
            if instance.attention_backend == attention.NAME:
                instance.disable_cuda_graph = True  # as the engine does for torch_native
                attention.shares_prefixes()  # a value that says nothing is told of before a model is loaded
            if not instance.enable_torch_compile:
                # Small functions of the engine are compiled at their first call, whatever the options. On a CPU that
                # takes a C++ compiler and, for the first TP request, up to a minute.
                os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        wrapped()


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.server_args": _patch_server_args,
}
