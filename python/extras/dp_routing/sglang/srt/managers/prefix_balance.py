"""Chooses a DP rank of a decode worker for each request: the one with its prefix, unless that is too full.

Plain data in and out; `data_parallel_controller.py` connects it to the engine.

A request goes to the rank with the lowest

    prompt tokens to send there + `waiting`

Both are times, in units of sending one token's KV. Each token that a rank holds makes its decode steps longer by
``read``, the time to read one token's KV; a request has ``steps`` of them. It waits for what is there, and what is
there waits for it: 2 * ``steps * read`` per token by which the rank is fuller than the emptiest. In units of sending,
2 * steps * read / send, the size of a token's KV cancels: 2 x answer length x link bandwidth / memory bandwidth. With
355 tokens per answer, 5 GB/s and 6.9 TB/s (the run in sgl-project/sglang#19746, see `benchmark/sim/times.py`) it is 0.5
(`FULLNESS_WEIGHT`).

A difference does not last for a whole answer. Requests without a prefix go to the emptiest rank, and during one answer
ranks take in as much as they hold. So a difference is gone after its fraction of what ranks hold, times the answer's
time: it counts with that factor, at most 1. Small differences are nearly free, so conversations stay on their rank;
large ones are expensive, so a prefix that all requests share does not gather them on one rank.

A full pool makes requests wait for memory. Waiting requests count as held, which costs about the same: a full rank
turns its pool over once per answer, in which time the link sends 0.9 pools.

Held prefixes are remembered, not queried: the prompts sent to a rank, LRU, as many tokens as its pool has. So a prefix
counts before its KV has arrived, and concurrent requests of one prefix meet. It is kept in blocks; a hash stands for a
block and all before it. What it does not see (answers, running requests' private tokens, some flushes) only makes the
next choice for that prefix worse.

Upstream: sgl-project/sglang#26561 (open), which goes by digests that the ranks report.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence

__all__ = ["FULLNESS_WEIGHT", "HeldPrefixes", "PrefixBalance", "block_numbers", "waiting"]

FULLNESS_WEIGHT = 0.5
# Least tokens of a block; rounded up to whole pages.
BLOCK_TOKENS = 64
# Requests kept per rank since its last report.
MOST_UNREPORTED = 4096
# Seconds without a report after which a rank's load decays, and its half-life then.
SAID_S = 5.0


def block_numbers(token_ids: Sequence[int], key: Hashable, block: int) -> Iterator[int]:
    """A hash for each full block of a prompt and all before it.

    key: separates prompts, as in the tree. A collision only makes the choice of a rank worse.
    """
    number = hash(key)
    for end in range(block, len(token_ids) + 1, block):
        number = hash((number, *token_ids[end - block : end]))
        yield number


class HeldPrefixes:
    """Blocks that one rank is believed to hold, at most ``most``; with each block all before it."""

    def __init__(self, most: int):
        self.most = most
        # Least recently used first.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, numbers: Sequence[int]) -> int:
        """Leading blocks of a prompt that it holds."""
        blocks = self._blocks
        for count, number in enumerate(numbers):
            if number not in blocks:
                return count
        return len(numbers)

    def use(self, numbers: Sequence[int]) -> None:
        """A prompt of these blocks was sent to the rank."""
        blocks = self._blocks
        # In reverse, so that later blocks are dropped first. Blocks beyond ``most`` are ignored.
        for number in reversed(numbers[: self.most]):
            blocks[number] = None
            blocks.move_to_end(number)
        while len(blocks) > self.most:
            blocks.popitem(last=False)

    def forget(self) -> None:
        self._blocks.clear()


def waiting(load: float, least: float, mean: float, weight: float = FULLNESS_WEIGHT) -> float:
    """The cost of waiting on a rank with ``load`` tokens, in tokens that could be sent meanwhile.

    least, mean: of all ranks' loads.
    """
    more = load - least
    return weight * more * min(1.0, more / mean) if more else 0.0


class _Load:
    """Tokens that a rank has to hold: its last report, and requests sent since."""

    def __init__(self) -> None:
        self._tokens, self._last = 0, 0.0
        # (seconds, tokens).
        self._since: deque[tuple[float, int]] = deque()

    def tokens(self, now: float) -> int:
        """Decays while the rank sends no reports and gets no requests.

        Reports come with outputs; there are none for tokens freed later, as after failures.
        """
        silent = max(0.0, now - self._last - SAID_S)
        return int(self._tokens * 0.5 ** (silent / SAID_S))

    def give(self, tokens: int, at: float) -> None:
        self._tokens, self._last = self._tokens + tokens, at
        self._since.append((at, tokens))
        if len(self._since) > MOST_UNREPORTED:
            self._since.popleft()

    def report(self, tokens: int, at: float) -> None:
        while self._since and self._since[0][0] <= at:
            self._since.popleft()
        self._tokens, self._last = tokens + sum(given for _, given in self._since), max(at, self._last)


class PrefixBalance:
    """Chooses a rank for each request, by earlier choices and the ranks' reports.

    pool: tokens in each rank's KV pool. page: tokens per page.
    """

    def __init__(self, ranks: int, pool: int, page: int, weight: float = FULLNESS_WEIGHT):
        self.block = -(-BLOCK_TOKENS // page) * page
        self.weight = weight
        self.held = [HeldPrefixes(pool // self.block) for _ in range(ranks)]
        self._loads = [_Load() for _ in range(ranks)]
        self._turn = 0

    def choose(self, token_ids: Sequence[int], key: Hashable, usable: Sequence[bool], now: float) -> int:
        """The rank for a request; counted as sent there. Raises ValueError if no rank is usable.

        key: separates equal prompts. now: seconds, on the clock of the reports.
        """
        numbers = list(block_numbers(token_ids, key, self.block))
        ranks = len(self.held)
        loads = {rank: self._loads[rank].tokens(now) for rank in range(ranks) if usable[rank]}
        if not loads:
            raise ValueError("no rank is usable")
        least, mean = min(loads.values()), sum(loads.values()) / len(loads)

        def cost(rank: int) -> tuple[float, int]:
            to_send = len(token_ids) - self.held[rank].match(numbers) * self.block
            # Ties go round-robin.
            return to_send + waiting(loads[rank], least, mean, self.weight), (rank - self._turn) % ranks

        chosen = min(loads, key=cost)
        self._give(chosen, numbers, len(token_ids), now)
        return chosen

    def given(self, rank: int, token_ids: Sequence[int], key: Hashable, now: float) -> None:
        """A request was sent to ``rank`` by another rule."""
        self._give(rank, list(block_numbers(token_ids, key, self.block)), len(token_ids), now)

    def _give(self, rank: int, numbers: Sequence[int], tokens: int, now: float) -> None:
        self.held[rank].use(numbers)
        self._loads[rank].give(tokens, now)
        self._turn = (rank + 1) % len(self.held)

    def report(self, rank: int, tokens: int, at: float) -> None:
        """A report of ``rank``: tokens of its requests, waiting ones included. at: seconds."""
        self._loads[rank].report(tokens, at)

    def loads(self, now: float) -> list[int]:
        """Believed tokens of each rank at ``now``, seconds."""
        return [load.tokens(now) for load in self._loads]

    def forget(self) -> None:
        """The ranks drop their trees."""
        for held in self.held:
            held.forget()
