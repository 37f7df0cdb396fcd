"""Which DP rank of a decode worker a request goes to: where its prefix is, unless that rank is too full.

Plain data in and out; `data_parallel_controller.py` connects it to the engine.

The rule. A request goes to the rank for which

    tokens of its prompt that have to be sent there + `waiting`

is least. Both are times, in units of what it takes to send the KV of one token. A token more that a rank holds for its
requests makes each of its decode steps longer by ``read``, the time to read one token's KV, and a request waits for
that once for each of its ``steps`` tokens. It waits for what is there already, and what is there waits for it: twice
``steps * read`` for each token by which the rank is fuller than the emptiest. In units of sending that is
``2 * steps * read / send``, in which the size of a token's KV cancels: 2 x answer length x link bandwidth / memory
bandwidth. With 355 tokens per answer, 5 GB/s and 6.9 TB/s (the run in sgl-project/sglang#19746, see
`benchmark/sim/times.py`) it is 0.5: `FULLNESS_WEIGHT`.

A small difference does not last that long. What comes without a prefix goes to the emptiest rank, and in the time of an
answer ranks take in as much as they hold: a difference is gone after its part, of what they hold, of that time. So this
is the factor with which it counts, at most 1. Small differences are nearly free, and so conversations stay where they
are; one of the size of what ranks hold is dear, and so a prefix that everybody has does not gather all on one rank.

A rank whose pool is full makes requests wait for memory. What waits counts as held, so that this costs about as much (a
full rank gives back its pool once in the time of an answer, in which the link sends 0.9 pools there).

What the ranks hold is not asked of them but remembered: the prompts that they were sent, least recently used first out,
as many tokens as a rank's pool has. So it is known at once, before a prompt's KV has come: requests of one prefix that
come together meet. It is known in blocks, by a number that stands for a block and all before it. What it does not know
(answers, what running requests keep from the tree, a flush that it did not see) makes it choose less well until the
next request of that prefix, and no worse.

Upstream: sgl-project/sglang#26561 (open), which goes by digests that the ranks report.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence

__all__ = ["FULLNESS_WEIGHT", "HeldPrefixes", "PrefixBalance", "block_numbers", "waiting"]

FULLNESS_WEIGHT = 0.5
# Tokens of a block, at least; it is whole pages.
BLOCK_TOKENS = 64
# Requests sent to a rank since its last report that are kept apart.
MOST_UNREPORTED = 4096
# Seconds of silence after which what is believed of a rank begins to count less, and in which it halves from then on.
SAID_S = 5.0


def block_numbers(token_ids: Sequence[int], key: Hashable, block: int) -> Iterator[int]:
    """A number for each full block of a prompt, equal for equal content with equal content before it.

    key: what else keeps prompts apart, as in the tree. Two prompts may have one number; the choice of a rank is then
    worse than it could be, and nothing else.
    """
    number = hash(key)
    for end in range(block, len(token_ids) + 1, block):
        number = hash((number, *token_ids[end - block : end]))
        yield number


class HeldPrefixes:
    """Blocks that one rank holds, as far as known; at most ``most``, and with each block all before it."""

    def __init__(self, most: int):
        self.most = most
        # The least recently used first.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, numbers: Sequence[int]) -> int:
        """How many blocks it holds of a prompt."""
        blocks = self._blocks
        for count, number in enumerate(numbers):
            if number not in blocks:
                return count
        return len(numbers)

    def use(self, numbers: Sequence[int]) -> None:
        """The rank is given a prompt of these blocks."""
        blocks = self._blocks
        # A block is used after those behind it, so that these are forgotten before it. What cannot be held is the end.
        for number in reversed(numbers[: self.most]):
            blocks[number] = None
            blocks.move_to_end(number)
        while len(blocks) > self.most:
            blocks.popitem(last=False)

    def forget(self) -> None:
        self._blocks.clear()


def waiting(load: float, least: float, mean: float, weight: float = FULLNESS_WEIGHT) -> float:
    """What it costs to wait on a rank that has ``load`` tokens to hold, in tokens that could be sent meanwhile.

    least, mean: tokens that the emptiest rank has to hold, and ranks on average.
    """
    more = load - least
    return weight * more * min(1.0, more / mean) if more else 0.0


class _Load:
    """Tokens that a rank has to hold: what it last said, and what it has been given since."""

    def __init__(self) -> None:
        self._tokens, self._last = 0, 0.0
        # When, in seconds, and how many tokens.
        self._since: deque[tuple[float, int]] = deque()

    def tokens(self, now: float) -> int:
        """Less and less of it counts while the rank says nothing and is given nothing.

        It says it with its outputs, and has none of what it lets go of later, as after failures.
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
    """Chooses a rank for each request, from what it has chosen before and what the ranks report.

    pool: tokens in the KV pool of each rank. page: tokens of a page of it.
    """

    def __init__(self, ranks: int, pool: int, page: int, weight: float = FULLNESS_WEIGHT):
        self.block = -(-BLOCK_TOKENS // page) * page
        self.weight = weight
        self.held = [HeldPrefixes(pool // self.block) for _ in range(ranks)]
        self._loads = [_Load() for _ in range(ranks)]
        self._turn = 0

    def choose(self, token_ids: Sequence[int], key: Hashable, usable: Sequence[bool], now: float) -> int:
        """The rank for a request, which is taken to be sent there. Raises ValueError where no rank is usable.

        key: what keeps equal prompts apart. now: seconds, on the clock of the reports.
        """
        numbers = list(block_numbers(token_ids, key, self.block))
        ranks = len(self.held)
        loads = {rank: self._loads[rank].tokens(now) for rank in range(ranks) if usable[rank]}
        if not loads:
            raise ValueError("no rank is usable")
        least, mean = min(loads.values()), sum(loads.values()) / len(loads)

        def cost(rank: int) -> tuple[float, int]:
            to_send = len(token_ids) - self.held[rank].match(numbers) * self.block
            # In turn, where there is nothing to choose by.
            return to_send + waiting(loads[rank], least, mean, self.weight), (rank - self._turn) % ranks

        chosen = min(loads, key=cost)
        self._give(chosen, numbers, len(token_ids), now)
        return chosen

    def given(self, rank: int, token_ids: Sequence[int], key: Hashable, now: float) -> None:
        """A request was sent to ``rank`` without being asked about."""
        self._give(rank, list(block_numbers(token_ids, key, self.block)), len(token_ids), now)

    def _give(self, rank: int, numbers: Sequence[int], tokens: int, now: float) -> None:
        self.held[rank].use(numbers)
        self._loads[rank].give(tokens, now)
        self._turn = (rank + 1) % len(self.held)

    def report(self, rank: int, tokens: int, at: float) -> None:
        """``rank`` had to hold so many tokens for its requests, waiting ones included, ``at`` seconds."""
        self._loads[rank].report(tokens, at)

    def loads(self, now: float) -> list[int]:
        """Tokens that each rank has to hold at ``now``, seconds, as far as known."""
        return [load.tokens(now) for load in self._loads]

    def forget(self) -> None:
        """The ranks have been told to drop what they hold."""
        for held in self.held:
            held.forget()
