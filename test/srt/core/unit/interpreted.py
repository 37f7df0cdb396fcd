"""Triton kernels in Triton's interpreter, in a process whose modules were imported for a GPU."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import triton.experimental.gluon.language  # noqa: F401 - the interpreter imports it, and it takes no interpreted functions
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


@contextmanager
def interpreted(*modules):
    """Within, the kernels of these modules are what TRITON_INTERPRET=1 would have made of them at import.

    The variable is read when a kernel is defined, and by the time of a test other tests have imported the engine.
    """
    product = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, *options):
        # The interpreter keeps bfloat16 as 16-bit integers and multiplies those.
        return product(self, _as_float(a), _as_float(b), d, *options)

    prepare, prepared = interpreter._patch_lang, set()

    def prepare_once(function):
        # Anew at each call of a function in a kernel, it is most of the time that a small kernel takes.
        if function not in prepared:
            prepared.add(function)
            prepare(function)

    with (
        patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        patch.object(interpreter, "_patch_lang", prepare_once),
    ):
        made: dict[JITFunction, interpreter.InterpretedFunction] = {}
        started = []
        try:
            # Some functions of the language are kernels themselves.
            for module in (tl, tl.standard, *modules):
                for name, value in list(vars(module).items()):
                    if isinstance(value, JITFunction):
                        function = made.setdefault(value, interpreter.InterpretedFunction(value.fn))
                        started.append(patch.object(module, name, function))
                        started[-1].start()
                    elif inspect.isfunction(value) and value.__module__.startswith("sglang_pd_radix."):
                        # A form in torch for CPU hosts.
                        started.append(patch.object(module, name, inspect.unwrap(value)))
                        started[-1].start()
            yield
        finally:
            for change in started:
                change.stop()


def _as_float(value):
    if value.dtype.scalar != tl.bfloat16:
        return value
    wide = (value.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)
