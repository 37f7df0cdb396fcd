"""What is asked: requests as blocks of content, in rounds or by the clock.

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
    """blocks: (key, tokens) of each block of the prompt. answer: tokens. arrival: seconds; None: as clients get free.

    measured: whether it counts. answer_key: the answer as a block of later prompts; 0 if no prompt has it. then: what
    the client asks when it has the answer. turn: of its conversation, from 1; 0 where that is not told apart.
    """

    blocks: tuple[tuple[int, int], ...]
    answer: int
    group: int = 0
    arrival: float | None = None
    measured: bool = True
    answer_key: int = 0
    then: Request | None = None
    turn: int = 0
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
    """Rounds of requests: one begins when every answer of the one before is complete.

    concurrency: clients, each of which asks when it has its answer; None: by the times of arrival.
    pool: slots x scale, in tokens, of each decode worker. reserve: tokens kept for each running request's answer.
    think: seconds from an answer to what its client asks then. begin: seconds over which clients come, one by one.
    """

    title: str
    rounds: list[list[Request]]
    concurrency: int | None
    pool: int
    reserve: int
    scale: int
    page: int
    times: times.Times
    prefills: int = 1
    decodes: int = 1
    max_running: int = 256
    router: str = "round_robin"
    prefill_router: str = "affine"
    think: float = 0.0
    begin: float = 0.0


@dataclass
class Churn:
    """Rounds of new prefixes against a pool that is full of the last round's."""

    prefixes: int = 12
    shared: int = 1000
    own: int = 90
    answer: int = 64
    requests: int = 240
    rounds: int = 4
    concurrency: int = 64
    pool: int = 24000
    reserve: int = 64
    page: int = 16
    seed: int = 0

    def make(self) -> Workload:
        pick, keys = random.Random(f"churn/{self.seed}"), itertools.count(1)
        rounds = []
        for turn in range(self.rounds + 1):
            prefix = [next(keys) for _ in range(self.prefixes)]
            # The first round fills the pool and is not measured.
            groups = [i % self.prefixes for i in range(self.requests)]
            pick.shuffle(groups)
            rounds.append(
                [
                    Request(
                        ((prefix[g], self.shared), (next(keys), self.own)),
                        pick.randint(self.answer // 2, self.answer + self.answer // 2),
                        g,
                        measured=turn > 0,
                    )
                    for g in groups
                ]
            )
        title = f"churn: {self.rounds} rounds of {self.prefixes} new prefixes, pool full of old ones"
        return Workload(title, rounds, self.concurrency, self.pool, self.reserve, 1, self.page, times.this_machine())


@dataclass
class Crowd(Churn):
    """More prefixes than fit at once, cold, in random order."""

    requests: int = 480
    rounds: int = 1
    pool: int = 12288

    def make(self) -> Workload:
        made = super().make()
        made.rounds = made.rounds[1:]
        made.title = f"crowd: {self.prefixes} prefixes of {self.shared} tokens, a pool of {self.pool}, cold"
        return made


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
    decodes: int = 1
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
            g = pick.randrange(self.prefixes)
            asked.append(
                Request(
                    ((prefix[g], self.shared), (next(keys), self.own)),
                    pick.randint(self.answer // 2, 3 * self.answer // 2),
                    g,
                )
            )
        return Workload(
            f"{self.prefixes} prefixes of {self.shared} tokens, {self.own} own, {self.concurrency} clients",
            [asked],
            self.concurrency,
            self.pool,
            self.reserve,
            self.scale,
            self.page,
            self.times(),
            self.prefills,
            self.decodes,
            self.max_running,
        )

    def times(self) -> times.Times:
        return times.published()


@dataclass
class Shared(Published):
    """Workload (a) of `pd-radix bench` on a machine of the size that it was measured on: that shape, divided by 50."""

    shared: int = 1000
    own: int = 90
    answer: int = 80
    pool: int = 45_056
    reserve: int = 64
    prefills: int = 1
    scale: int = 1
    page: int = 16

    def times(self) -> times.Times:
        return times.this_machine()


@dataclass
class Behind:
    """Workload (i) of `pd-radix bench`: ``clients`` whose next turns begin together, each behind ``others`` prompts of
    ``prompt`` tokens that nobody asks again and that are not measured; nor is the first turn, of ``document`` tokens.

    apart: seconds between two requests on average, as a gateway sends them on.
    """

    clients: int = 8
    turns: int = 24
    document: int = 400
    question: int = 40
    answer: int = 32
    others: int = 4
    prompt: int = 1500
    apart: float = 0.004
    pool: int = 65_536
    reserve: int = 64
    seed: int = 0

    def make(self) -> Workload:
        pick, keys = random.Random(f"behind/{self.seed}"), itertools.count(1)
        said: list[tuple[tuple[int, int], ...]] = [() for _ in range(self.clients)]
        rounds: list[list[Request]] = []
        for turn in range(self.turns):
            asked = [Request(((next(keys), self.prompt),), 2, measured=False) for _ in range(self.others)]
            clients = list(range(self.clients))
            pick.shuffle(clients)
            for c in clients:
                blocks = (*said[c], (next(keys), self.question if turn else self.document))
                request = Request(blocks, self.answer, c, measured=turn > 0, answer_key=next(keys))
                said[c] = (*blocks, (request.answer_key, self.answer))
                asked.append(request)
            at = 0.0
            for request in asked:
                request.arrival = at = at + pick.expovariate(1 / self.apart)
            rounds.append(asked)
        title = f"chats of {self.clients} clients, each turn behind {self.others} prompts of {self.prompt} tokens"
        return Workload(title, rounds, None, self.pool, self.reserve, 1, 16, times.one_gpu())
