"""Defaults of server arguments that suit a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from . import attention, kernels


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_cpu_backends")
    def defaults(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device == "cpu":
            if not kernels.has_cpu_kernels() and instance.attention_backend is None:
                # What is compiled as a whole cannot have a plan made for each step.
                instance.attention_backend = "torch_native" if instance.enable_torch_compile else attention.NAME
            if instance.attention_backend == attention.NAME:
                instance.disable_cuda_graph = True  # as the engine does for torch_native
            if not instance.enable_torch_compile:
                # Small functions of the engine are compiled at their first call, whatever the options. On a CPU that
                # takes a C++ compiler and, for the first TP request, up to a minute.
                os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        wrapped()


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.server_args": _patch_server_args,
}
