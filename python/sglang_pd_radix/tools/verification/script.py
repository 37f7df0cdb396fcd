"""The prompts of `pd-radix verify`, in waves that find the cache in different states."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Prompts sent at the same time. least_held: tokens of each that decode has to hold by then.

    follows: each continues the reference's answer to the same prompt of the wave before.
    """

    name: str
    prompts: list[list[int]]
    least_held: list[int]
    follows: bool = False


class Script:
    """The prompts. ``words``: token ids to use. Lengths in tokens. bigrams: keys are token pairs (EAGLE), so the last
    token of a match cannot be reused."""

    def __init__(self, words: range, page_size: int, seed: int, bigrams: bool = False) -> None:
        self._words, self._page, self._rnd, self._bigrams = words, page_size, random.Random(seed), bigrams

    def some(self, count: int) -> list[int]:
        """``count`` random tokens."""
        return [self._rnd.choice(self._words) for _ in range(count)]

    def held_of(self, count: int) -> int:
        """Tokens reusable of ``count`` answered ones: whole pages."""
        return max(0, count - self._bigrams) // self._page * self._page

    def waves(self) -> list[Wave]:
        """All waves except chats."""
        page = self._page
        new = [self.some(count) for count in (page, 3 * page + 1, 5 * page + page // 2, 300 + page, 1000 + page)]
        longer = [[*prompt, *self.some(20)] for prompt in new]
        cut = [[*prompt[: len(prompt) * 2 // 3], *self.some(30)] for prompt in new[1:]]
        shared = self.some(12 * page)
        herd = [[*shared, *self.some(7 + i)] for i in range(8)]
        return [
            Wave("new", new, [0] * len(new)),
            Wave("the same again", new, [self.held_of(len(p)) for p in new]),
            Wave("longer", longer, [self.held_of(len(p)) for p in new]),
            Wave("cut off", cut, [self.held_of(len(p) * 2 // 3) for p in new[1:]]),
            Wave("a herd", herd, [0] * len(herd)),
            Wave("the herd again", herd, [self.held_of(len(shared))] * len(herd)),
        ]

    def questions(self, clients: int = 4, turns: int = 3) -> list[list[list[int]]]:
        """By turn: what each client adds to its history."""
        first = [self.some(self._rnd.randrange(40, 260)) for _ in range(clients)]
        return [first, *([self.some(self._rnd.randrange(3, 70)) for _ in first] for _ in range(turns - 1))]

    def warm(self, waves: list[Wave]) -> list[Wave]:
        """The same waves repeated: decode has to hold every whole page of every prompt."""
        return [Wave(wave.name, wave.prompts, [self.held_of(len(p)) for p in wave.prompts]) for wave in waves]


def tokens_to_hold(page_size: int, answer: int) -> int:
    """Most tokens of KV that the script leaves, for answers of ``answer`` tokens; rounded up to pages."""
    script = Script(range(1, 2), page_size, 0)
    prompts = [prompt for wave in script.waves() for prompt in wave.prompts]
    # Chats grow by questions and answers; the last turn contains all.
    chats = sum(260 + 2 * 70 + 3 * answer for _ in range(4))
    return sum(-(-(len(prompt) + answer) // page_size) * page_size for prompt in prompts) + chats + 4 * page_size
