"""What is asked: requests as blocks of content, each by a client that has its answer to the one before.

Lengths are tokens of the model. A block has a key, equal for equal content with equal content before it. One slot of
the simulated pool holds ``scale`` tokens: with a scale of 64 a slot stands for a page of 64, and the page size of the
simulated pool is 1.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from sim import times

# Keys of blocks are multiplied by it to make the numbers of their slots.
SPAN = 1 << 20


@dataclass(eq=False)
class Request:
    """blocks: (key, tokens) of each block of the prompt. answer: tokens."""

    blocks: tuple[tuple[int, int], ...]
    answer: int
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = sum(n for _, n in self.blocks)

    def slots(self, scale: int, unique: itertools.count) -> list[int]:
        """Numbers of the prompt's slots; of a slot that is filled in part, one that nobody else has."""
        ids: list[int] = []
        for key, tokens in self.blocks:
            ids.extend(range(key * SPAN, key * SPAN + tokens // scale))
            if tokens % scale:
                ids.append(-next(unique))
        return ids


@dataclass
class Workload:
    """concurrency: clients. pool: slots x scale, in tokens, of the decode worker. reserve: tokens kept for each running
    request's answer. prefills: workers.
    """

    requests: list[Request]
    concurrency: int
    pool: int
    reserve: int
    scale: int
    page: int
    times: times.Times
    prefills: int
    max_running: int


@dataclass
class Published:
    """The shape of sgl-project/sglang#19746; see ``times.published``."""

    prefixes: int = 20
    shared: int = 49_984
    own: int = 4_480
    answer: int = 355
    requests: int = 1000
    concurrency: int = 128
    # 37 requests with the cache off: 37 x 54,464, the reserve of 512 for each, and most of their answers
    pool: int = 2_060_032
    reserve: int = 512
    prefills: int = 3
    seed: int = 0
    # Slots stand for so many tokens.
    scale: int = 64
    page: int = 1
    max_running: int = 256

    def make(self) -> Workload:
        pick = random.Random(f"published/{self.seed}")
        keys = itertools.count(1)
        prefix = [next(keys) for _ in range(self.prefixes)]
        asked = []
        for _ in range(self.requests):
            blocks = ((prefix[pick.randrange(self.prefixes)], self.shared), (next(keys), self.own))
            asked.append(Request(blocks, pick.randint(self.answer // 2, self.answer + self.answer // 2)))
        return Workload(
            asked,
            self.concurrency,
            self.pool,
            self.reserve,
            self.scale,
            self.page,
            times.published(),
            self.prefills,
            self.max_running,
        )
