"""Attention and rotary embedding of MLA models in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import attention


def _patch_mla_dispatch(module: Any) -> None:
    # They attend to the KV pool alone, in which MLA keeps latents: only the absorbed form can read them. Without an
    # entry of their own they would get Triton's, which prefills from unpooled, up-projected keys.
    for backend in ("torch_native", attention.NAME):
        module.AttentionBackendRegistry.register(backend, module._dispatch_mla_subtype)


def _patch_rope(module: Any) -> None:
    import inspect

    import wrapt

    signature = inspect.signature(module.get_rope_cpu)

    @wrapt.patch_function_wrapper(module, "get_rope_cpu")
    def rope(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The engine's CPU form knows YaRN as DeepSeek uses it and nothing else; the general one runs on a CPU as well.
        bound = signature.bind(*args, **kwargs)
        scaling = bound.arguments.get("rope_scaling")
        if scaling and scaling.get("rope_type") == "deepseek_yarn":
            return wrapped(*args, **kwargs)
        bound.arguments.pop("device", None)
        return module.get_rope(**bound.arguments)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.rotary_embedding.factory": _patch_rope,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _patch_mla_dispatch,
}
