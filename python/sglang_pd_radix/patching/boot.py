"""Runs at the start of every Python of this environment: it has to be cheap and import nothing.

It puts one finder for the name ``sglang`` on ``sys.meta_path``. The loader is imported only when that package is
executed, not when a program checks whether it exists.
"""

import os
import sys


class _EngineFinder:
    """Finds ``sglang`` as other finders do, and runs the loader before its code."""

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
        # A namespace package has no loader yet: a bare directory called sglang, not the engine.
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
        # Do not end processes without the engine: the loader reports it on import.
        return False


def install() -> None:
    """Wait for the engine, or patch it if it is imported already. Does nothing with SGLANG_PD_RADIX=0."""
    if _is_switched_off() or any(isinstance(f, _EngineFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _EngineFinder())  # type: ignore[arg-type]
    engine = sys.modules.get("sglang")
    if engine is not None and getattr(engine, "__file__", None):
        from sglang_pd_radix.patching import loader

        loader.activate(engine)


install()
