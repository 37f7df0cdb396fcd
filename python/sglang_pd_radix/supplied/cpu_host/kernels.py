"""A placeholder for ``sgl_kernel``, whose CUDA build cannot be imported without a driver."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

KERNELS = "sgl_kernel"


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


def has_cpu_kernels() -> bool:
    """True where the CPU build of ``sgl_kernel`` is installed. The CUDA build keeps its ops in one folder per GPU."""
    spec = importlib.machinery.PathFinder.find_spec(KERNELS)
    folders = spec.submodule_search_locations if spec else None
    return any(
        entry.name.startswith("common_ops.")
        for folder in folders or ()
        if os.path.isdir(folder)
        for entry in os.scandir(folder)
    )
