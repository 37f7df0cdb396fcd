"""A request that was answered, as its client saw it, and one that failed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .workload import Request


class RequestFailed(PdRadixError):
    """A request got no answer, or an incomplete one: a fault of the servers."""


@dataclass
class Asked:
    """An answered request: its prompt as sent, and times as its client saw them (seconds).

    beside, due_s: as in its `Request`. unix_s: offset from the clock of ``start_s`` to Unix time, if it has a rid.
    """

    prompt: Sequence[int]
    answer_tokens: int
    text: str
    start_s: float
    ttft_s: float
    latency_s: float
    itl_s: list[float]
    beside: bool = False
    due_s: float | None = None
    rid: str | None = None
    unix_s: float = 0.0

    @classmethod
    def of(cls, request: Request, prompt: Sequence[int], output: dict[str, Any]) -> Asked:
        """From the output of `load.py` for ``request``."""
        times = {name: output[name] for name in ("start_s", "ttft_s", "latency_s", "itl_s")}
        tokens, text = output["tokens"], output["text"]
        known = {name: output[name] for name in ("rid", "unix_s") if name in output}
        return cls(prompt, tokens, text, **times, beside=request.beside, due_s=request.arrival_s, **known)

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.latency_s - self.ttft_s) / max(1, self.answer_tokens - 1)

    def token_times(self) -> list[float]:
        return list(itertools.accumulate(self.itl_s, initial=self.start_s + self.ttft_s))
