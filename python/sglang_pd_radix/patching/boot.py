"""Runs at the start of every Python of this environment, so it must cost next to nothing and import nothing.

It leaves one finder on ``sys.meta_path`` that waits for the name ``sglang``. Only when that package is really executed,
and not when a program merely asks whether it exists, is the loader imported.
"""

import os
import sys


class _EngineFinder:
    """Finds ``sglang`` where everybody else finds it, and gets the loader a word in before its code runs."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "sglang":
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                break
        else:
            return None
        # A namespace package has no loader yet: that is a bare directory called sglang, not the engine.
        if spec.loader is not None and spec.submodule_search_locations is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                from sglang_pd_radix.patching import loader

                loader.activate(module)
                execute(module)

            spec.loader.exec_module = exec_module
        return spec


def _is_switched_off() -> bool:
    if not os.environ.get("SGLANG_PD_RADIX"):
        return False
    from sglang_pd_radix import environment

    try:
        return not environment.patches_engine()
    except environment.PdRadixError:
        # Not for a process without the engine to end by: the loader says it to who imports that.
        return False


def install() -> None:
    """Wait for the engine; if it is imported already, patch it now. Does nothing with SGLANG_PD_RADIX=0."""
    if _is_switched_off() or any(isinstance(f, _EngineFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _EngineFinder())  # type: ignore[arg-type]
    engine = sys.modules.get("sglang")
    if engine is not None and getattr(engine, "__file__", None):
        from sglang_pd_radix.patching import loader

        loader.activate(engine)


install()
