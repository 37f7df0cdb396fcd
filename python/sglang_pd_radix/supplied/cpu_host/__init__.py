"""What the engine needs to run on a host without a CUDA driver.

``install()`` is called once per process, before the first module of the engine is executed. On a CUDA host it returns
at once and leaves nothing behind. Where there is no CUDA driver (or ``SGLANG_USE_CPU_ENGINE=1``) it puts a placeholder
in the place of ``sgl_kernel`` and registers the post-import hooks of `PARTS`: one file for each part of the engine that
assumes a GPU, with ``HOOKS`` from the engine's module to what mends it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import sys
from functools import lru_cache

from . import (
    allocator,
    attention,
    constrained,
    dp_attention,
    dsa,
    hicache,
    idle,
    kernels,
    linear_attention,
    lora,
    mamba2,
    memory_pool,
    mla,
    nixl,
    options,
    parallel,
    pipeline,
    speculative,
    staging,
)

SWITCH = "SGLANG_USE_CPU_ENGINE"
PARTS = (
    allocator,
    attention,
    constrained,
    dp_attention,
    dsa,
    hicache,
    idle,
    linear_attention,
    lora,
    mamba2,
    memory_pool,
    mla,
    nixl,
    options,
    parallel,
    pipeline,
    speculative,
    staging,
)

logger = logging.getLogger(__name__)

_installed = False


def has_cuda_driver() -> bool:
    """True where the CUDA driver library can be loaded, whether or not a GPU is visible to this process."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_other_accelerator() -> bool:
    """True where torch was built, or extended, for an accelerator that is not CUDA (ROCm, XPU, Ascend, Habana)."""
    try:
        build = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    if "rocm" in build or "xpu" in build:
        return True
    return any(importlib.util.find_spec(name) for name in ("torch_npu", "habana_frameworks", "torchada"))


@lru_cache(maxsize=1)
def active() -> bool:
    """True where this module takes part: no CUDA driver on a Linux host, or ``SGLANG_USE_CPU_ENGINE=1``.

    Any other value keeps it out, as the engine takes none but 1 for a CPU engine. The answer is found once per process.
    """
    choice = os.environ.get(SWITCH, "").strip()
    if choice not in ("", "0", "1"):
        logger.warning(
            "%s is %r, which counts as 0: give 1 to run as on a CPU host, or nothing to do so where there is no CUDA "
            "driver",
            SWITCH,
            choice,
        )
    if choice:
        return choice == "1"
    return sys.platform == "linux" and not has_cuda_driver() and not has_other_accelerator()


def install() -> None:
    """Make the engine usable on this host if it has no CUDA driver. Does nothing elsewhere, or the second time."""
    global _installed
    if _installed or not active():
        return
    _installed = True
    import wrapt

    # Threads that spin while they wait starve the other workers of a host by a factor of ten and more.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The engine's own name for "this is a CPU engine": it selects the device and the plain torch layers by it.
    os.environ[SWITCH] = "1"
    if has_cuda_driver():
        # The engine prefers any GPU that torch reports; who asks for a CPU engine there must not get half of each.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # CUDA only as well, and a tenth of the engine's import time. The engine runs without it where it is not installed.
    sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]
    if not kernels.has_cpu_kernels():
        sys.meta_path.insert(0, kernels.KernelPlaceholderFinder())
    for part in PARTS:
        for name, hook in part.HOOKS.items():
            wrapt.register_post_import_hook(hook, name)
