"""Workloads of ten thousand requests and more: a recorded trace, and a mixture of conversations."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_pd_radix.tools.bench.workload import TRACE_BLOCK, read_trace
from sim import times
from sim.workload import Request, Workload

# Tokens per slot of the pool.
SLOT = 64


@dataclass
class _Scaled:
    """Decode workers, prefills for each of them, and their pool: model and hardware of ``times.published``."""

    decodes: int = 1
    prefills: int = 1
    pool: int = 2_060_032
    reserve: int = 512
    router: str = "cache_aware"

    def _workload(
        self, title: str, asked: list[Request], concurrency: int | None = None, think: float = 0.0
    ) -> Workload:
        return Workload(
            f"{title}, {self.decodes} decode workers",
            [asked],
            concurrency,
            self.pool,
            self.reserve,
            SLOT,
            1,
            times.published(),
            self.prefills * self.decodes,
            self.decodes,
            router=self.router,
            think=think,
        )


@dataclass
class Trace(_Scaled):
    """A trace in Mooncake's format: one JSON object per line, with ``timestamp`` (ms), ``input_length``,
    ``output_length`` (tokens) and ``hash_ids``, one for each block of 512 tokens and all before it.

    Requests come at their time, ``speed`` x ``decodes`` times as fast as recorded; pool and prefill workers are per
    decode worker. Model and hardware are those of ``times.published``. limit: only so many requests; 0: all.
    """

    file: str = ""
    prefills: int = 12
    speed: float = 1.25
    limit: int = 0

    def make(self) -> Workload:
        if not self.file:
            raise ValueError("this workload is a recorded trace: give --trace FILE")
        recorded = read_trace(Path(self.file), self.limit or sys.maxsize)
        faster = 1000 * self.speed * self.decodes
        asked = [
            Request(
                _blocks(r["hash_ids"], r["input_length"]), max(1, r["output_length"]), arrival=r["timestamp"] / faster
            )
            for r in recorded
        ]
        return self._workload(f"trace: {len(asked)} requests", asked)


def _blocks(hashes: list[int], length: int) -> tuple[tuple[int, int], ...]:
    last = length - TRACE_BLOCK * (len(hashes) - 1)
    # 0 is no key.
    return tuple((h + 1, TRACE_BLOCK if i < len(hashes) - 1 else last) for i, h in enumerate(hashes))


@dataclass
class Many(_Scaled):
    """Conversations over documents, the n-th of which is chosen in proportion to 1 / n (Zipf).

    requests: turns of all conversations together. concurrency: conversations at a time, each of which asks again
    ``think`` seconds after its answer. Lengths of documents are log-normal around ``document`` tokens; a turn adds a
    question of up to ``question`` and an answer of up to ``answer`` tokens. All are whole slots.
    """

    requests: int = 100_000
    documents: int = 1000
    document: int = 6144
    question: int = 1024
    answer: int = 512
    turns: int = 6
    think: float = 5.0
    concurrency: int = 1400
    decodes: int = 4
    prefills: int = 6
    seed: int = 0

    def make(self) -> Workload:
        pick = random.Random(f"many/{self.seed}")
        keys = itertools.count(1)
        documents = [
            (next(keys), SLOT * max(1, round(self.document * math.exp(pick.gauss(0, 0.8)) / SLOT)))
            for _ in range(self.documents)
        ]
        weights = list(itertools.accumulate(1 / n for n in range(1, self.documents + 1)))
        asked: list[Request] = []
        left = self.requests
        while left:
            (chosen,) = pick.choices(range(self.documents), cum_weights=weights)
            turns = min(left, pick.randint(1, self.turns))
            left -= turns
            asked.append(self._conversation(pick, keys, documents[chosen], turns))
        title = f"many: {self.requests} requests over {self.documents} documents"
        return self._workload(title, asked, self.concurrency, self.think)

    def _conversation(
        self, pick: random.Random, keys: itertools.count, document: tuple[int, int], turns: int
    ) -> Request:
        blocks = (document,)
        made: list[Request] = []
        for _ in range(turns):
            blocks += ((next(keys), SLOT * pick.randint(1, self.question // SLOT)),)
            request = Request(blocks, SLOT * pick.randint(1, self.answer // SLOT), answer_key=next(keys))
            blocks += ((request.answer_key, request.answer),)
            if made:
                made[-1].then = request
            made.append(request)
        return made[0]
