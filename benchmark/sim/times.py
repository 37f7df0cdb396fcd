"""How long things take: the constants of the simulation.

All times in seconds, tokens are the model's (of which one simulated slot may stand for many), see ``workload.py``.

**Decode step** = ``step`` + ``step_request`` x running requests + ``step_token`` x tokens of KV that they read.

**Prefill batch** of new tokens, taken in order of arrival and at most ``chunk`` at a time =
``batch`` + ``token`` x new tokens + ``attention`` x (new tokens x tokens before each, summed).

**Link**, one for each pair of a prefill and a decode worker, one transfer after the other, each chunk when it has been
computed = bytes / ``bandwidth``, and ``latency`` until decode knows of it.

The derivation of each set of constants is with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Times:
    """Constants in seconds, bytes and tokens; the formulas are above.

    handshake: from arrival at decode until the peers know each other. message: decode's metadata on its way to prefill.
    poll: how often an idle decode worker looks at its queues. stride: decode steps taken between two looks at a queue
    in which nothing happens meanwhile; 1 is exact. prefill_cache: tokens that the cache of each prefill worker holds.
    shares: 1 where a step reads once what several of its requests share. step_merge: seconds of such a step for each
    request that shares, whose parts are put together. beside: by which part a decode step takes longer while a prefill
    computes, and the other way round, where they have the same cores. computed: of a step over prompts on decode, what
    it takes whatever it computes; 0: as a decode step.
    """

    step: float
    step_request: float
    step_token: float
    batch: float
    token: float
    attention: float
    chunk: int
    bandwidth: float
    latency: float
    kv_bytes: int
    handshake: float
    message: float
    poll: float
    stride: int
    prefill_cache: int
    shares: int = 0
    step_merge: float = 0.0
    beside: float = 0.0
    computed: float = 0.0

    def decode_step(self, requests: int, tokens: int) -> float:
        """Seconds of one decode step of ``requests`` requests that read ``tokens`` tokens of KV together."""
        return self.step + self.step_request * requests + self.step_token * tokens

    def extend(self, spans: list[tuple[int, int]]) -> float:
        """Seconds of a step over prompts on decode, which reads the weights as any step. spans: as in `prefill`."""
        return (self.computed or self.step) + self.prefill(spans) - self.batch

    def prefill(self, spans: list[tuple[int, int]]) -> float:
        """Seconds of one prefill batch. spans: (tokens before, new tokens) of each request in it."""
        new = sum(n for _, n in spans)
        pairs = sum(n * before + n * n / 2 for before, n in spans)
        return self.batch + self.token * new + self.attention * pairs


def published() -> Times:
    """sgl-project/sglang#19746: Qwen3-32B, FP8 KV, page 64, TP 2, three prefill workers and one decode worker, NIXL.

    What was published is in ``published.py``, with the constant that was fitted to each outcome, and those that were
    held out. How the fitted ones were found:

    * The pool (in ``workload.py``): 37 requests of 54.5K tokens and the reserve of 512 fit in it without the cache.
    * ``step`` and ``step_token``: mean ITL, off and on. By Little's law 1.21 x 355 x 0.0656 = 28 requests run with the
      cache off and 1.59 x 355 x 0.1306 = 74 with it on (the 37 include those in transfer; the 104 to 126 are without
      the cold start and the end). A line through these has 1.4 ms per request of 54.7K tokens and 25 ms besides; the
      simulation, where more run than the mean for most of the time, has the measured ITL with 1.1 ms and 33 ms. How the
      1.1 ms divide between the request and its tokens, one length of prompt cannot tell: nearly all of it is counted as
      reading KV.
    * ``token`` and ``attention``, the operations: TTFT p50 with the cache on. Their proportion is that of the model's:
      64 x 10^9 for a token and 4 x 64 layers x 64 heads x 128 = 2.1 x 10^6 for each token before it; both follow from
      630 x 10^12 operations a second on the two GPUs of a prefill worker.
    * ``bandwidth``: requests/s with the cache off. 37 - 28 = 9 requests are on their way from admission to decode, at
      1.21 a second more than 7 s each, of which prefill's computation takes less than half.

    They were fitted with one draw of which request has which prefix (seed 0). With others the simulated TTFT with the
    cache on is several times as long: prefill is so busy that it depends on how evenly three workers are asked; see
    docs/evidence.md#simulation-2026-11-23.

    Assumed: the prefill router sends a prefix to the worker that has it (the run's front end, Dynamo, does).
    """
    flops = 630e12
    return Times(
        step=0.033,
        step_request=0.00005,
        step_token=0.019e-6,
        batch=0.02,
        token=64e9 / flops,
        attention=2.1e6 / flops,
        chunk=32768,
        bandwidth=5e9,
        latency=0.005,
        kv_bytes=131072,
        handshake=0.01,
        message=0.005,
        poll=0.05,
        stride=4,
        prefill_cache=1_980_000,
        # Two partial results of 64 heads x 128, float32, in each of 64 layers, half of them on each GPU, at the 8.5 ps
        # for a byte that an H100 took (docs/evidence.md#h100-2026-11-23).
        step_merge=2 * 64 * 64 * 128 * 4 / 2 * 8.5e-12,
    )


def this_machine() -> Times:
    """Two CPU cores, the small model of ``pd-radix bench`` (docs/evidence.md#benchmark-2026-11-23).

    One worker of each kind.

    * ``step`` and ``step_request``: workload (a), mean ITL 4.3 ms with 8.3 requests answered at a time and 7.2 ms with
      20.3; attention then went through requests one by one (`torch_native`), so their tokens count little.
    * ``token``: workload (e), 41 prompts of 384 tokens a second, 14.5 ms of prefill's CPU time each. ``batch``: of the
      74 ms that are TTFT p50 in (a), most is waiting for schedulers that share the cores.
    * ``latency``: 2.4 to 5.3 ms for one transfer (docs/evidence.md#transfers-2026-11-21) and a look at the queue.

    Prefill and decode share the cores there and do not here.
    """
    return Times(
        step=0.0023,
        step_request=0.00023,
        step_token=5e-9,
        batch=0.012,
        token=30e-6,
        attention=1e-9,
        chunk=8192,
        bandwidth=1e9,
        latency=0.006,
        kv_bytes=256,
        handshake=0.01,
        message=0.003,
        poll=0.002,
        stride=1,
        prefill_cache=131072,
    )


def one_gpu() -> Times:
    """One H100 that prefill and decode share, a model of 0.94 billion parameters (docs/evidence.md#h100-2026-11-26).

    * ``step``, ``step_request``: workload (a), ITL 2.2 ms with 21 and 3.4 with 57 running; (c), 1.5 ms with few.
    * ``computed``, and ``batch`` like it: a step over prompts, 15 to 18 ms whatever little it computes.
    * ``handshake`` and the like: TTFT p50 in (c) is 51 ms with local prefill, of which such a step is a third.
    * ``token`` (2 operations for each parameter at a third of the GPU's) and ``beside``: assumed.
    """
    return Times(
        step=0.0014,
        step_request=0.00003,
        step_token=0.0,
        batch=0.016,
        token=6e-6,
        attention=0.0,
        chunk=8192,
        bandwidth=2e10,
        latency=0.01,
        kv_bytes=65536,
        handshake=0.03,
        message=0.005,
        poll=0.001,
        stride=1,
        prefill_cache=400_000,
        beside=0.5,
        computed=0.016,
    )
