"""Process groups without NCCL, and threads shared out among TP ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from . import kernels

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


def _patch_parallel_state(module: Any) -> None:
    import inspect

    import wrapt

    signature = inspect.signature(module.GroupCoordinator.__init__)

    @wrapt.patch_function_wrapper(module, "GroupCoordinator.__init__")
    def without_nccl(
        wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # gloo, the group's torch backend on a CPU, does all the work; NCCL would look for a GPU here.
        bound = signature.bind(instance, *args, **kwargs)
        bound.arguments.update(use_pynccl=False, use_custom_allreduce=False)
        wrapped(*bound.args[1:], **bound.kwargs)

    # Both are ops of torch that exist for CUDA only, around these.
    module.GroupCoordinator.all_gather_into_tensor = module.GroupCoordinator._all_gather_into_tensor
    module.GroupCoordinator.reduce_scatter_tensor = module.GroupCoordinator._reduce_scatter_tensor


def threads_bind(tp_size: int, cpus: Sequence[int]) -> str:
    """Value of ``SGLANG_CPU_OMP_THREADS_BIND`` that shares ``cpus`` out among ``tp_size`` ranks, e.g. ``0,1|2,3``."""
    ordered = sorted(cpus)
    if len(ordered) < tp_size:
        shares = [[ordered[rank % len(ordered)]] for rank in range(tp_size)]
    else:
        edges = [rank * len(ordered) // tp_size for rank in range(tp_size + 1)]
        shares = [ordered[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _patch_model_runner(module: Any) -> None:
    import torch
    import wrapt

    if not kernels.has_cpu_kernels():
        module._is_cpu_arm64 = False  # true means "has the CPU build's ops"

    @wrapt.patch_function_wrapper(module, "ModelRunner.init_threads_binding")
    def bind(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Left alone, the engine wants one NUMA node per rank and refuses to start with fewer.
        os.environ.setdefault(THREADS_BIND, threads_bind(instance.tp_size, tuple(os.sched_getaffinity(0))))
        wrapped()
        if instance.tp_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Only the CPU build of sgl_kernel binds threads; at least let a rank use no more than its share.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // instance.tp_size))


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.distributed.parallel_state": _patch_parallel_state,
    "sglang.srt.model_executor.model_runner": _patch_model_runner,
}
