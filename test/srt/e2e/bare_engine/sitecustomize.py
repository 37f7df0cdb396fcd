"""For workers of the tests that run without the patch set: with SGLANG_PD_RADIX=0, only what a CPU host needs."""

import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import sglang_pd_radix
from sglang_pd_radix.supplied import cpu_host

NAME = "sglang.srt.layers.attention.shared_prefix"
FOLDER = Path(sglang_pd_radix.__file__).parents[1].joinpath(*NAME.split("."))


class SharedPrefix:
    """Of the patch set, a CPU host's decode attention needs new modules only, which change nothing in the engine."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == NAME:
            return spec_from_file_location(name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])


sys.meta_path.append(SharedPrefix)
cpu_host.install()
