"""DeepSeek's sparse attention (the engine's ``nsa``) in torch.

The engine's indexer and its pool run as they are. Replaced are the kernels that they call, and the attention backend
``nsa`` as a whole: each new token attends to the tokens that the indexer has selected.

kernels.py    the computation
backend.py    the engine's interface
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pd_radix.supplied.cpu_host import attention

#: The engine's name for it, as a value of ``--attention-backend``.
NAME = "nsa"


def _patch_indexer(module: Any) -> None:
    from . import kernels

    def forward_indexer(self: Any, q_fp8: Any, weights: Any, forward_batch: Any, topk: int, layer_id: int) -> Any:
        # The engine's takes what a prompt's token must not see yet, and needs TileLang.
        step, pool = forward_batch.attn_backend.step, forward_batch.token_to_kv_pool
        # Of the pool's methods the one that waits for pages that a hierarchical cache brings back.
        pages = pool.get_index_k_with_scale_buffer(layer_id)
        return step.index(q_fp8, weights.squeeze(-1), pages, pool.page_size, topk)

    module.rotate_activation = kernels.rotate
    # The one for devices that are neither CUDA nor ROCm branches off within.
    module.Indexer.forward_native = module.Indexer.forward_cuda
    module.Indexer.forward_indexer = forward_indexer
    # Its weights are kept in float32, whatever the model is in.
    module.Indexer._weights_proj_bf16_in_fp32_out = lambda self, x: self.weights_proj(x.float())[0]


def _patch_quantization(module: Any) -> None:
    from .kernels import quantize

    module.act_quant = quantize


def _patch_accessor(module: Any) -> None:
    from .kernels import store

    module._set_k_and_s_triton = store


def _patch_registry(module: Any) -> None:
    @module.register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        from .backend import TorchSparseAttnBackend

        return TorchSparseAttnBackend()


def _patch_utils(module: Any) -> None:
    engine_answer = module.support_triton
    module.support_triton = lambda backend: backend != NAME and engine_answer(backend)


def _check(args: Any) -> None:
    """Raise ValueError for options with which such a model does not run here."""
    if args.speculative_algorithm is not None:
        raise ValueError(
            "Speculative decoding of a model with DeepSeek's sparse attention does not run on a CPU host: leave "
            "--speculative-algorithm out."
        )
    if args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        raise ValueError(
            f"--kv-cache-dtype {args.kv_cache_dtype}: with DeepSeek's sparse attention a CPU host has KV in auto or "
            "bfloat16."
        )
    for option in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, option)
        # What has no value until here has the default of this host.
        if value not in (None, NAME) and (option, value) != ("attention_backend", attention.NAME):
            raise ValueError(
                f"--{option.replace('_', '-')} {value}: DeepSeek's sparse attention runs on {NAME}. Leave it out."
            )


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_model_specific_adjustments")
    def choose(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        remote = module.parse_connector_type(instance.model_path) == module.ConnectorType.INSTANCE
        if remote or instance.device != "cpu":
            return wrapped()
        from sglang.srt.configs.model_config import is_deepseek_nsa

        if not is_deepseek_nsa(instance.get_model_config().hf_config):
            return wrapped()
        import torch

        _check(instance)
        instance.attention_backend, instance.disable_cuda_graph = NAME, True
        # The engine chooses pages of 64 for CUDA, and asks which CUDA device it is.
        capability = torch.cuda.get_device_capability
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
        try:
            wrapped()
        finally:
            torch.cuda.get_device_capability = capability

    def not_here(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device != "cpu":
            wrapped(*args, **kwargs)

    # They choose among kernels of CUDA, and bfloat16 for these.
    for name in ("_set_default_nsa_kv_cache_dtype", "_set_default_nsa_backends"):
        wrapt.wrap_function_wrapper(module, f"ServerArgs.{name}", not_here)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.attention_registry": _patch_registry,
    "sglang.srt.layers.attention.nsa.index_buf_accessor": _patch_accessor,
    "sglang.srt.layers.attention.nsa.nsa_indexer": _patch_indexer,
    "sglang.srt.layers.attention.nsa.triton_kernel": _patch_quantization,
    "sglang.srt.server_args": _patch_server_args,
    "sglang.srt.utils.common": _patch_utils,
}
