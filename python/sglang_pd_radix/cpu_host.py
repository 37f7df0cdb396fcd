"""What the engine needs to run on a host without a CUDA driver.

``install()`` is called once per process, before the first module of the engine is executed. On a CUDA host it returns
at once and leaves nothing behind. Where there is no CUDA driver (or ``SGLANG_USE_CPU_ENGINE=1``) it puts a placeholder
in the place of ``sgl_kernel`` and registers one post-import hook per engine module that assumes a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

SWITCH = "SGLANG_USE_CPU_ENGINE"
THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
KERNELS = "sgl_kernel"

_installed = False


# -- when ----------------------------------------------------------------------------------------------------------


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

    ``SGLANG_USE_CPU_ENGINE=0`` keeps it out. The answer is found once per process.
    """
    choice = os.environ.get(SWITCH, "").strip()
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
    if not _has_cpu_kernels():
        sys.meta_path.insert(0, KernelPlaceholderFinder())
    for name, hook in HOOKS.items():
        wrapt.register_post_import_hook(hook, name)


# -- sgl_kernel ----------------------------------------------------------------------------------------------------


class MissingOp:
    """Stands for one op of ``sgl_kernel``. It can be named, imported and passed on; calling it is an error."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = name.rpartition(".")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.__name__} is a CUDA kernel and needs a CUDA GPU, but this host has no CUDA driver (libcuda.so.1). "
            "Use options and a model that run on torch alone (--device cpu --attention-backend torch_native, "
            "no quantization), or run this worker on a GPU host."
        )

    def __getattr__(self, name: str) -> MissingOp:
        # Dunder and underscore names are probes of the interpreter and of libraries, never ops.
        if name.startswith("_"):
            raise AttributeError(name)
        return MissingOp(f"{self.__name__}.{name}")

    def __repr__(self) -> str:
        return f"<{self.__name__}: needs a CUDA GPU>"


class KernelPlaceholder(ModuleType):
    """A module of ``sgl_kernel`` in which every public name is a `MissingOp`."""

    def __getattr__(self, name: str) -> MissingOp:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        op = MissingOp(f"{self.__name__}.{name}")
        setattr(self, name, op)
        return op


class KernelPlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers every import of ``sgl_kernel`` and of modules below it with a `KernelPlaceholder`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != KERNELS and not fullname.startswith(KERNELS + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return KernelPlaceholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _has_cpu_kernels() -> bool:
    """True where the CPU build of ``sgl_kernel`` is installed. The CUDA build keeps its ops in one folder per GPU."""
    spec = importlib.machinery.PathFinder.find_spec(KERNELS)
    folders = spec.submodule_search_locations if spec else None
    return any(
        entry.name.startswith("common_ops.")
        for folder in folders or ()
        if os.path.isdir(folder)
        for entry in os.scandir(folder)
    )


# -- paged allocator -----------------------------------------------------------------------------------------------


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
) -> None:
    """Give each request KV slots for its tokens ``[prefix_len, seq_len)``, all requests one after another in ``out``.

    The partly filled page of a prefix is filled up first (``last_loc`` is the slot of its last token, -1 without a
    prefix); further tokens take pages from the front of ``free_pages``, in request order. Lengths are in tokens,
    ``free_pages`` in pages, ``out`` in slots (page * page_size + offset). Where ``free_pages`` runs out the slots are
    meaningless: the caller compares the counts afterwards and drops the result.
    """
    import torch

    prefix, seq, last = prefix_lens.long(), seq_lens.long(), last_loc.long()
    pages_held = (prefix + page_size - 1) // page_size
    pages_new = (seq + page_size - 1) // page_size - pages_held
    lens = seq - prefix
    owner = torch.repeat_interleave(lens)
    token = torch.arange(len(owner)) - (lens.cumsum(0) - lens)[owner] + prefix[owner]

    # Position of the token's page in free_pages; negative while the token still fits the page its prefix ends in.
    order = token // page_size - pages_held[owner]
    slots = last[owner] + 1 + token - prefix[owner]
    if len(free_pages):
        source = (order + (pages_new.cumsum(0) - pages_new)[owner]).clamp(0, len(free_pages) - 1)
        slots = torch.where(order < 0, slots, free_pages[source] * page_size + token % page_size)
    out[: len(slots)] = slots


class TorchKernel:
    """Has a Triton kernel's calling form, ``kernel[grid](*args)``, and runs a torch function instead."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    extend_slots(prefix_lens, seq_lens, last_loc, free_pages, out, page_size)


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    # One more token per request is an extension by one.
    extend_slots(seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size)


def _patch_allocator(module: Any) -> None:
    module.alloc_extend_kernel = TorchKernel(_alloc_extend)
    module.alloc_decode_kernel = TorchKernel(_alloc_decode)


# -- process groups and threads ------------------------------------------------------------------------------------


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

    if not _has_cpu_kernels():
        module._is_cpu_arm64 = False  # true means "has the CPU build's ops"

    @wrapt.patch_function_wrapper(module, "ModelRunner.init_threads_binding")
    def bind(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Left alone, the engine wants one NUMA node per rank and refuses to start with fewer.
        os.environ.setdefault(THREADS_BIND, threads_bind(instance.tp_size, tuple(os.sched_getaffinity(0))))
        wrapped()
        if instance.tp_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Only the CPU build of sgl_kernel binds threads; at least let a rank use no more than its share.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // instance.tp_size))


# -- idle ----------------------------------------------------------------------------------------------------------

TRANSFER_POLL_S = 0.0005
# A request ends the wait at once, so this only bounds how late an idle worker sees anything else.
IDLE_POLL_MS = 100


def _waits_for_peer(scheduler: Any) -> bool:
    """True if the scheduler has a request whose next step is announced by a peer worker and not by the tokenizer."""
    queues = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue", "disagg_decode_transfer_queue")
    return bool(
        scheduler.waiting_queue
        or getattr(scheduler, "disagg_prefill_inflight_queue", None)
        or any(getattr(getattr(scheduler, name, None), "queue", None) for name in queues)
    )


def _patch_idle(module: Any) -> None:
    import time

    import wrapt

    @wrapt.patch_function_wrapper(module, "SchedulerRuntimeCheckerMixin.self_check_during_idle")
    def rest(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An idle scheduler spins. Beside a GPU that costs a core nobody needs; here the cores are the accelerator, and
        # a spinning prefill worker takes half of the decode worker's time.
        wrapped()
        if _waits_for_peer(instance):
            time.sleep(TRANSFER_POLL_S)
        elif instance.recv_from_tokenizer is not None:  # only the first rank has it; the others wait for that one
            instance.recv_from_tokenizer.poll(IDLE_POLL_MS)


# -- options -------------------------------------------------------------------------------------------------------


def _patch_server_args(module: Any) -> None:
    import wrapt

    @wrapt.patch_function_wrapper(module, "ServerArgs._handle_cpu_backends")
    def defaults(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if instance.device == "cpu":
            if not _has_cpu_kernels() and instance.attention_backend is None:
                instance.attention_backend = "torch_native"
            instance.disable_overlap_schedule = True  # it overlaps CUDA streams
            if not instance.enable_torch_compile:
                # Small functions of the engine are compiled at their first call, whatever the options. On a CPU that
                # takes a C++ compiler and, for the first TP request, up to a minute.
                os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        wrapped()


# -- NIXL ----------------------------------------------------------------------------------------------------------

# Longest wait of an agent's progress thread, microseconds. What comes in ends it at once.
PROGRESS_WAIT_US = 10_000


def _patch_nixl(module: Any) -> None:
    import wrapt

    class HostMemoryAgent(wrapt.ObjectProxy):
        """A NIXL agent for KV pools in host memory: what the engine calls VRAM is DRAM here."""

        def register_memory(self, reg_list: Any, mem_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__.register_memory(reg_list, _host_kind(mem_type), *args, **kwargs)

        def get_xfer_descs(self, descs: Any, mem_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__.get_xfer_descs(descs, _host_kind(mem_type), *args, **kwargs)

    @wrapt.patch_function_wrapper(module, "NixlKVManager.register_buffer_to_engine")
    def register(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        instance.agent = HostMemoryAgent(instance.agent)
        wrapped()


def _patch_nixl_api(module: Any) -> None:
    config = module.nixlBind.nixlAgentConfig

    class PatientConfig(config):  # type: ignore[misc, valid-type]
        """Lets an agent's progress thread wait for events; NIXL's Python layer makes it spin, idle or not."""

        @property
        def pthrDelay(self) -> int:
            delay: int = config.pthrDelay.__get__(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            config.pthrDelay.__set__(self, max(microseconds, PROGRESS_WAIT_US))

    module.nixlBind.nixlAgentConfig = PatientConfig


def _host_kind(mem_type: str | None) -> str | None:
    return "DRAM" if mem_type == "VRAM" else mem_type


# -- staging buffers of Mooncake -----------------------------------------------------------------------------------


def gather_heads(
    k_buffers: list[torch.Tensor],
    v_buffers: list[torch.Tensor],
    page_indices: Any,
    staging_buffer: Any,
    head_start: int,
    num_heads: int,
    page_size: int,
    gpu_id: int,
) -> int:
    """Copy some heads of some pages of each layer, K before V, into a staging buffer; returns the bytes written.

    The engine's function of this calling form puts the copies on a CUDA stream. page_indices: int32 array.
    """
    import numpy as np
    import torch

    pages = torch.from_numpy(page_indices.astype(np.int64))
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    end = 0
    for pool in (*k_buffers, *v_buffers):
        block = pool[slots, head_start : head_start + num_heads].contiguous().view(torch.uint8).flatten()
        staging_buffer.buffer[end : end + len(block)] = block
        end += len(block)
    return end


def _patch_staging_buffer(module: Any) -> None:
    import torch

    class HostStagingBuffer(module.StagingBuffer):  # type: ignore[misc, name-defined]
        """A staging buffer in host memory, whatever device it is asked for."""

        def __init__(self, size_bytes: int, device: str, gpu_id: int, custom_mem_pool: Any = None) -> None:
            self.size_bytes, self.device, self.gpu_id = size_bytes, "cpu", gpu_id
            self.buffer = torch.empty(size_bytes, dtype=torch.uint8)
            self.data_ptr = self.buffer.data_ptr()

    module.StagingBuffer = HostStagingBuffer
    module.gather_all_layers_to_staging = gather_heads
    module._USE_TRITON_STAGING = False


# -- MLA -----------------------------------------------------------------------------------------------------------


def _patch_mla_dispatch(module: Any) -> None:
    # torch_native attends to the KV pool alone, in which MLA keeps latents: only the absorbed form can read them.
    # Without an entry of its own it would get Triton's, which prefills from unpooled, up-projected keys.
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


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


def _patch_memory_pool(module: Any) -> None:
    # Copies of retracted requests' KV wait for CUDA streams that do not exist here.
    module.torch.cuda.synchronize = lambda device=None: None


HOOKS: dict[str, Callable[[Any], None]] = {
    "nixl_cu12._api": _patch_nixl_api,
    "nixl_cu13._api": _patch_nixl_api,
    "sglang.srt.disaggregation.common.staging_buffer": _patch_staging_buffer,
    "sglang.srt.disaggregation.nixl.conn": _patch_nixl,
    "sglang.srt.distributed.parallel_state": _patch_parallel_state,
    "sglang.srt.layers.rotary_embedding.factory": _patch_rope,
    "sglang.srt.managers.scheduler_runtime_checker_mixin": _patch_idle,
    "sglang.srt.mem_cache.allocator": _patch_allocator,
    "sglang.srt.mem_cache.memory_pool": _patch_memory_pool,
    "sglang.srt.model_executor.model_runner": _patch_model_runner,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _patch_mla_dispatch,
    "sglang.srt.server_args": _patch_server_args,
}
