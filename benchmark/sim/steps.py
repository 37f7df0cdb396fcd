"""What the next decode step of a simulated worker reads, and how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.prefix_reader import tokens_above

if TYPE_CHECKING:
    from sim.decode import SimulatedDecode


def tokens_read(worker: SimulatedDecode) -> int:
    """Tokens of KV that the next decode step of ``worker`` reads."""
    return sum([worker.records[r.rid].request.length + worker.records[r.rid].tokens for r in worker.running])


def step_time(worker: SimulatedDecode, requests: int, tokens: int) -> float:
    """Seconds of that step."""
    times, merged = worker.times, 0.0
    if times.shares and not worker.off:
        # As the gate counts it.
        held = sum([req.cache_protected_len for req in worker.running])
        tokens -= (held - tokens_above(req.last_node for req in worker.running)) * worker.scale
        merged = times.step_merge * requests
    step = times.decode_step(requests, tokens) + merged
    return step * (1 + times.beside) if times.beside and worker.beside() else step
