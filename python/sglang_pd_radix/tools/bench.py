"""``pd-radix bench``: the way to the benchmark, which lies under ``benchmark/bench`` in a checkout.

In an installed wheel the same files are the package ``sglang_pd_radix._bench``; `package` gives them that name in a
checkout too. Run as a program (``python -m sglang_pd_radix.tools.bench MODEL``) it is the benchmark's load generator.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from sglang_pd_radix.errors import PdRadixError

PACKAGE = "sglang_pd_radix._bench"


def package(name: str) -> ModuleType:
    """Module ``name`` of the benchmark. Raises PdRadixError where neither a wheel nor a checkout has it."""
    if importlib.util.find_spec(PACKAGE) is None:
        directory = Path(__file__).resolve().parents[3] / "benchmark" / "bench"
        start = directory / "__init__.py"
        if not start.is_file():
            raise PdRadixError(f"the benchmark is not installed: there is no {directory}")
        spec = importlib.util.spec_from_file_location(PACKAGE, start, submodule_search_locations=[str(directory)])
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{PACKAGE}.{name}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix bench``."""
    package("command").add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and write the report. Returns the exit code."""
    return package("command").run(args)


if __name__ == "__main__":
    sys.exit(package("load").main(sys.argv[1]))
