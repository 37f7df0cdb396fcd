"""What hardware that was measured would make of the decode step of ``times.published``.

The GPU of the published run is not the one that this project has had, and what is scaled from that one to it is
several times faster than the run was (docs/evidence.md#simulation-2026-11-23).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.times import published


@dataclass(frozen=True)
class Gpu:
    """Bytes/s of its memory by its data sheet, how many it was seen to read, and the engine's decode attention.

    call: seconds of that kernel for a layer, whatever it reads.
    """

    data_sheet: float
    read: float = 0.0
    attention: float = 0.0
    call: float = 0.0


# docs/evidence.md#h100-2026-11-23: memory, and the least squares of `decode_attention.py --triton-fit`.
H100 = Gpu(3.35e12, read=3.09e12, attention=2.78e12, call=8.2e-6)
# The thread does not name the run's GPU. 37 prompts of FP8 KV and half of the weights are 168 GB on each, which no H200
# has, and its author names this one.
B200 = Gpu(8.0e12)
LAYERS, PARAMETERS, WORKERS_GPUS = 64, 32.8e9, 2


def scaled_step() -> list[str]:
    """The settings of a decode step that follows from the H100's kernels, by the ratio of the memories.

    A step reads half of the weights (bfloat16) on each GPU, and each token's KV, half of it on each. What it leaves
    out: the reductions between the two GPUs, the host, and that FP8 has to be converted.
    """
    faster = B200.data_sheet / H100.data_sheet
    step = {
        "step": 2 * PARAMETERS / WORKERS_GPUS / (H100.read * faster) + LAYERS * H100.call,
        "step_request": 0.0,
        "step_token": published().kv_bytes / WORKERS_GPUS / (H100.attention * faster),
    }
    return [f"times.{name}={seconds!r}" for name, seconds in step.items()]
