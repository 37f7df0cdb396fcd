"""For workers of the tests that run without the patch set: with SGLANG_PD_RADIX=0, only what a CPU host needs."""

from pathlib import Path

import wrapt

import sglang_pd_radix
from sglang_pd_radix.supplied import cpu_host

SHARED_PREFIX = Path(sglang_pd_radix.__file__).parents[1] / "sglang/srt/layers/attention"


def _extend(package):
    # Of the patch set, a CPU host's decode attention needs new modules only, which change nothing in the engine.
    package.__path__.append(str(SHARED_PREFIX))


wrapt.register_post_import_hook(_extend, "sglang.srt.layers.attention")
cpu_host.install()
