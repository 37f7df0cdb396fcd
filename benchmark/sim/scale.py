"""Conversations: a hundred thousand requests of a mixture, and agents of many long turns."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from sim import times
from sim.workload import Request, Workload

# Tokens per slot of the pool.
SLOT = 64


@dataclass
class Many:
    """Conversations over documents, the n-th of which is chosen in proportion to 1 / n (Zipf).

    requests: turns of all conversations together. concurrency: conversations at a time, each of which asks again
    ``think`` seconds after its answer. Lengths of documents are log-normal around ``document`` tokens; a turn adds a
    question of up to ``question`` and an answer of up to ``answer`` tokens. All are whole slots. decodes: workers;
    prefills: for each of them; pool: of each. Model and hardware are those of ``times.published``.
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
    pool: int = 2_060_032
    reserve: int = 512
    router: str = "cache_aware"
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
        return Workload(
            f"{title}, {self.decodes} decode workers",
            [asked],
            self.concurrency,
            self.pool,
            self.reserve,
            SLOT,
            1,
            times.published(),
            self.prefills * self.decodes,
            self.decodes,
            router=self.router,
            think=self.think,
        )

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


@dataclass
class Agents:
    """Workload (k) of `pd-radix bench` unscaled: ``conversations`` of ``turns``, ``concurrency`` at a time.

    Each begins with ``document`` tokens; a turn adds 200 to 2,000 tokens, a tool's result (``question`` to
    ``longest_question``), for an answer of 50 to 500, ``think`` seconds after the last one. All are whole slots. Model
    and hardware are those of ``times.published``, with its number of workers.
    """

    conversations: int = 48
    turns: int = 40
    document: int = 98_304
    question: int = 192
    longest_question: int = 2048
    answer: int = 64
    longest_answer: int = 512
    think: float = 20.0
    concurrency: int = 24
    begin: float = 600.0
    prefills: int = 3
    pool: int = 2_060_032
    reserve: int = 512
    seed: int = 0

    def make(self) -> Workload:
        pick, keys = random.Random(f"agents/{self.seed}"), itertools.count(1)
        asked = [self._conversation(pick, keys) for _ in range(self.conversations)]
        title = f"agents: {self.conversations} conversations of {self.turns} turns after {self.document} tokens"
        return Workload(
            title,
            [asked],
            self.concurrency,
            self.pool,
            self.reserve,
            SLOT,
            1,
            times.published(),
            self.prefills,
            think=self.think,
            begin=self.begin,
        )

    def _conversation(self, pick: random.Random, keys: itertools.count) -> Request:
        blocks: tuple[tuple[int, int], ...] = ()
        made: list[Request] = []
        for turn in range(1, self.turns + 1):
            new = SLOT * pick.randint(self.question // SLOT, self.longest_question // SLOT) if made else self.document
            blocks += ((next(keys), new),)
            answer = SLOT * pick.randint(self.answer // SLOT, self.longest_answer // SLOT)
            request = Request(blocks, answer, answer_key=next(keys), turn=turn)
            blocks += ((request.answer_key, request.answer),)
            if made:
                made[-1].then = request
            made.append(request)
        return made[0]
