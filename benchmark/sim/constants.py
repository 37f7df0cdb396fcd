"""Where each constant of ``times.published`` comes from, and what hardware that was measured would make of it.

Kinds: *known* of the run or its model; *fitted* to an outcome (``published.py``); *assumed*: nobody has measured it
there. None of them is *measured*: the GPU of the published run is not the one that this project has had, and what is
scaled from that one to it (`scaled_step`) is several times faster than the run was
(docs/evidence.md#simulation-2026-11-23).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.times import published
from sim.workload import Published


@dataclass(frozen=True)
class Constant:
    """names: what it is called by ``--set``; several that are one number in other units."""

    name: str
    names: tuple[str, ...]
    kind: str
    source: str

    def value(self) -> float:
        group, _, field = self.names[0].partition(".")
        return float(getattr(published() if group == "times" else Published(), field))

    def times(self, factor: float) -> list[str]:
        """The settings that multiply it by ``factor``; whole numbers stay whole, and at least 1."""
        made = []
        for name in self.names:
            group, _, field = name.partition(".")
            old = getattr(published() if group == "times" else Published(), field)
            new = max(1, round(old * factor)) if isinstance(old, int) else old * factor
            made.append(f"{name}={new!r}")
        return made


CONSTANTS = (
    Constant("pool", ("published.pool",), "fitted", "tokens of the decode worker's KV"),
    Constant("step", ("times.step",), "fitted", "seconds of a decode step besides its requests"),
    Constant("step_token", ("times.step_token",), "fitted", "seconds to read a token's KV in a decode step"),
    Constant(
        "operations",
        ("times.token", "times.attention"),
        "fitted",
        "seconds of prefill per token and per pair of tokens; that the one is 64 x 10^9 and the other 2.1 x 10^6 "
        "operations is the model's",
    ),
    Constant("bandwidth", ("times.bandwidth",), "fitted", "bytes/s from a prefill worker to the decode worker"),
    Constant(
        "kv_bytes",
        ("times.kv_bytes",),
        "known",
        "Qwen3-32B: 2 x 64 layers x 8 KV heads x 128, and `--kv-cache-dtype fp8_e4m3`",
    ),
    Constant("chunk", ("times.chunk",), "known", "`--chunked-prefill-size 32768`"),
    Constant(
        "prefill_cache",
        ("times.prefill_cache",),
        "assumed",
        "tokens: about the pool of decode, since GPUs and `--mem-fraction-static` are the same",
    ),
    Constant("step_request", ("times.step_request",), "assumed", "seconds of a decode step for each request"),
    Constant("batch", ("times.batch",), "assumed", "seconds of a prefill batch besides its tokens"),
    Constant("latency", ("times.latency",), "assumed", "seconds from the last byte until decode knows"),
    Constant("handshake", ("times.handshake",), "assumed", "seconds"),
    Constant("message", ("times.message",), "assumed", "seconds of decode's metadata to prefill"),
    Constant("poll", ("times.poll",), "assumed", "seconds between an idle decode worker's looks at its queues"),
    Constant("stride", ("times.stride",), "assumed", "decode steps between looks where nothing happens; 1 is exact"),
)


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
