"""Float32 on GPUs: which forward method a layer takes, in a process that believes it is on CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_pd_radix.supplied import torch_layers

LAYER = """
import os
from sglang.srt.layers.utils import multi_platform
multi_platform._is_cuda = True

class Layer(multi_platform.MultiPlatformOp):
    def forward_cuda(self):
        return "cuda"
    def forward_native(self):
        return "torch"

print(Layer()(), os.environ.get("TRITON_F32_DEFAULT"))
"""


@pytest.mark.parametrize(("switch", "found"), [("1", "torch ieee"), ("0", "cuda None")])
def test_layers_run_in_torch_if_they_are_asked_to(switch, found):
    env = {**os.environ, "SGLANG_TORCH_LAYERS": switch}
    env.pop("TRITON_F32_DEFAULT", None)
    run = subprocess.run([sys.executable, "-c", LAYER], capture_output=True, text=True, env=env, timeout=100)
    assert run.stdout.split("\n")[0] == found, run.stderr[-2000:]


def test_what_the_switch_can_be(monkeypatch):
    monkeypatch.setenv(torch_layers.SWITCH, "")
    assert not torch_layers.wanted()
    monkeypatch.setenv(torch_layers.SWITCH, "off")
    with pytest.raises(ValueError, match="SGLANG_TORCH_LAYERS is 'off': give 1"):
        torch_layers.wanted()
