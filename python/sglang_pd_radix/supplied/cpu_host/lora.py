"""LoRA with the engine's torch backend, which prepares its batches in pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs.check_lora_server_args")
    def backend(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device == "cpu":
            # The others are Triton's.
            instance.lora_backend = "torch_native"
        wrapped()


def _patch_torch_backend(module: Any) -> None:
    import torch
    import wrapt

    @wrapt.patch_function_wrapper(module, "TorchNativeLoRABackend.prepare_lora_batch")
    def prepare(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device.type != "cpu":
            wrapped(*args, **kwargs)
            return

        def batch(
            forward_batch: Any,
            weight_indices: list[int],
            lora_ranks: list[int],
            scalings: list[float],
            use_cuda_graph: bool,
        ) -> Any:
            # A segment is a run of requests with one adapter; its length is in tokens.
            lengths = module.generate_sequence_lengths(forward_batch, device="cpu")
            adapters, segment = torch.unique_consecutive(
                torch.tensor(weight_indices, dtype=torch.int32), return_inverse=True
            )
            seg_lens = torch.zeros_like(adapters).scatter_add_(0, segment, lengths.to(torch.int32))
            seg_indptr = torch.zeros(len(adapters) + 1, dtype=torch.int32)
            seg_indptr[1:] = seg_lens.cumsum(0)
            tensors = {
                "lora_ranks": torch.tensor(lora_ranks, dtype=torch.int32),
                "seg_indptr": seg_indptr,
                "seg_lens": seg_lens,
                "weight_indices": adapters,
                "scalings": torch.tensor(scalings, dtype=torch.float),
            }
            return module.TorchNativeLoRABatchInfo(
                bs=forward_batch.batch_size,
                num_segments=len(adapters),
                max_len=int(seg_lens.max()),
                use_cuda_graph=False,
                permutation=None,
                **tensors,
                **{f"{name}_cpu": tensor for name, tensor in tensors.items()},
            )

        instance.batch_info = batch(*args, **kwargs)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.lora.backend.torch_backend": _patch_torch_backend,
    "sglang.srt.server_args": _patch_server_args,
}
