"""Torch and the tree, instrumented: what a scheduler step does is counted, by whose code does it.

On a CPU host nothing waits: counted are the calls that would wait if tensors lay on a device. What is in host memory on
any machine does not count.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from ranks import CONTEXT
from torch.utils._python_dispatch import TorchDispatchMode

ENGINE = sysconfig.get_paths()["purelib"] + "/sglang/"
STAND_INS = ("/host_worker.py", "/step_costs.py", "/decode_world.py", "/overlapped_loop.py")
# A whole prompt is longer than this, and the part of it that is not held is shorter.
WHOLE = 10_000
# Waits for the device: what copies to the host, and what must know a size.
OF_TENSORS = "cpu tolist item numpy __bool__ __int__ __index__ __float__ unique nonzero masked_select to __getitem__"
OF_TORCH = "unique nonzero masked_select"
NO_LAUNCH = {"_local_scalar_dense", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"}
KINDS = ("waits", "copies", "launches", "collectives", "walks", "flattened", "calls")


@functools.cache
def owner(file: str) -> str:
    """Whose a function of this file is, "" for what works for whoever calls it."""
    if file.endswith(STAND_INS):
        return "stand-in"
    if "/sglang_pd_radix/supplied/cpu_host/" in file or "/sglang/srt/" not in file:
        return ""
    return "engine" if file.startswith(ENGINE) else "ours"


class Meter(TorchDispatchMode):
    """Counts what is done between `begin` and `end`, for each step by itself.

    waits: for the device. copies: of lists to the device. launches: of kernels. collectives. walks: of whole prompts
    along the tree. flattened: lists longer than `WHOLE` that become tensors. calls: of functions of ours.
    """

    def __init__(self, on_host: Any = None) -> None:
        """on_host: an object whose tensors lie in host memory on any machine."""
        super().__init__()
        tensors = [one for one in vars(on_host or self).values() if isinstance(one, torch.Tensor)]
        self._host = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.steps: list[dict[str, dict[str, int]]] = []
        self._step: dict[str, dict[str, int]] | None = None

    def begin(self) -> None:
        self._step = {kind: collections.Counter() for kind in KINDS}
        self.__enter__()
        sys.setprofile(self._called)

    def end(self) -> None:
        sys.setprofile(None)
        self.__exit__(None, None, None)
        assert self._step is not None
        self.steps.append(self._step)
        self._step = None

    def _note(self, kind: str, what: str) -> None:
        """By the innermost function that is the engine's or ours; not what a stand-in does itself."""
        frame = sys._getframe(1)
        while frame and not (whose := owner(frame.f_code.co_filename)):
            frame = frame.f_back  # type: ignore[assignment]
        if frame and whose != "stand-in" and self._step is not None:
            file = frame.f_code.co_filename.rpartition("/sglang/srt/")[2]
            self._step[kind][f"{whose} {file}:{frame.f_lineno} {frame.f_code.co_name} {what}"] += 1

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._step is not None and owner(frame.f_code.co_filename) == "ours":
            self._step["calls"][frame.f_code.co_qualname] += 1

    @contextlib.contextmanager
    def instrument(self, event: type = torch.cpu.Event) -> Iterator[None]:
        """event: whose ``synchronize`` waits for a step."""
        from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache

        wrapped: list[tuple[Any, str, Callable]] = [(torch.Tensor, name, self._wait) for name in OF_TENSORS.split()]
        wrapped += [(torch, name, self._wait) for name in OF_TORCH.split()]
        wrapped += [(event, "synchronize", self._waited), (torch, "tensor", self._tensor)]
        wrapped += [(DecodeRadixCache, name, self._walk) for name in ("match_prefix", "insert", "peek")]
        with contextlib.ExitStack() as stack:
            for where, name, counted in wrapped:
                stack.enter_context(mock.patch.object(where, name, self._wrap(getattr(where, name), counted)))
            yield

    def _wrap(self, real: Callable, counted: Callable) -> Callable:
        @functools.wraps(real)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return (real if self._step is None else functools.partial(counted, real))(*args, **kwargs)

        return inner

    def _waited(self, real: Callable, *args: Any, **kwargs: Any) -> Any:
        self._note("waits", real.__name__)
        # What it calls in turn does not wait again.
        step, self._step = self._step, None
        try:
            return real(*args, **kwargs)
        finally:
            self._step = step

    def _wait(self, real: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real.__name__
        to_host = name == "cpu" or (name == "to" and "cpu" in map(str, (*args, *kwargs.values())))
        by_mask = name == "__getitem__" and getattr(args[0], "dtype", None) is torch.bool
        if self._is_on_host(tensor) or not (to_host or by_mask or name not in ("to", "__getitem__")):
            return real(tensor, *args, **kwargs)
        # What does not block is waited for by its event.
        call = real if kwargs.get("non_blocking") else functools.partial(self._waited, real)
        result = call(tensor, *args, **kwargs)
        if to_host:
            result = result.detach()
            result.on_host = True
        return result

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor, "on_host") or tensor.untyped_storage().data_ptr() in self._host

    def _tensor(self, real: Callable, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list) and len(data) > WHOLE:
            self._note("flattened", f"{len(data)}")
        result = real(data, *args, **kwargs)
        if "device" in kwargs and not kwargs.get("pin_memory"):
            self._note("copies", "tensor")
        else:
            result.on_host = True
        return result

    def _walk(self, real: Callable, tree: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
        if len(getattr(what, "key", what)) > WHOLE:
            self._note("walks", real.__name__)
        return real(tree, what, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if space == "c10d":
            self._note("collectives", name)
        elif not (is_view or name in NO_LAUNCH or (tensors and all(map(self._is_on_host, tensors)))):
            self._note("launches", name)
        return func(*args, **(kwargs or {}))


def counts(side: str, told: Path) -> dict[str, list]:
    """What each step of each state of `benchmark/step_costs.py` does, counted in another process.

    told: where that writes.
    """
    process = CONTEXT.Process(target=_count, args=(side, told), daemon=True)
    process.start()
    process.join(300)
    said = told.read_text()
    assert process.exitcode == 0, said[-3000:]
    return dict(json.loads(text[7:]) for text in said.splitlines() if text.startswith("RESULT "))


def _count(side: str, told: Path) -> None:
    with told.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import step_costs

    # As long as is needed to tell a whole prompt from the part of it that is not held.
    step_costs.HELD = WHOLE + 2000

    def count(worker: step_costs.StepWorker, state: step_costs.State) -> list:
        meter = Meter(worker.queue.metadata_buffers)
        with meter.instrument():
            worker.play(state, meter.begin, meter.end)
        return meter.steps

    # There is no path without the flag, so turns on it are all alike.
    names = [name for name in step_costs.STATES if side == "on" or name != "late turns"]
    step_costs.tell(side, names, count)
