"""What a chat has to send, turn by turn: at least, and without each of the things that decode keeps.

Decode keeps the KV of prompts and of answers, in whole pages. How far it reaches into the next prompt follows from the
sizes of a conversation alone, if each prompt begins with the one before it and the answer to that. Where the token ids
are known, so does what a template that rewrites earlier answers, or a tokenizer that splits them otherwise, leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Per turn and conversation: (prompt tokens, answer tokens).
Sizes = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Ids:
    """Token ids of a prompt and of the answer to it; None for an answer whose ids cannot be told from its text.

    guessed: the answer's are those of its text, of which it has the number; the engine may have made others.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    guessed: bool = False


@dataclass(frozen=True)
class Reach:
    """A ``prompt`` and of how many of its first tokens decode has the KV (all in tokens).

    by_prompts: if it kept earlier prompts only. surely, at_most: if it keeps answers too; these two differ where it
    cannot be told, and ``surely`` is at least ``by_prompts`` but for what a tree for speculation leaves out.
    """

    prompt: int
    by_prompts: int
    surely: int
    at_most: int


@dataclass(frozen=True)
class Bounds:
    """Pages of one turn, all conversations together.

    least: no cache sends fewer. due: a cache that keeps prompts and answers sends no more. without_answers: what one
    sends that keeps prompts only; without_prompts: what is sent if nothing is kept.
    """

    least: int
    due: int
    without_answers: int
    without_prompts: int


def pages_of_prompts(turns: Sizes, page_size: int) -> int:
    """Pages that cross when decode holds nothing: every page of every prompt, also one that it fills in part."""
    return sum(-(-prompt // page_size) for turn in turns for prompt, _ in turn)


def kept_of_answer(answer: int, overlapped: bool) -> int:
    """Of how many tokens of an answer decode has the KV when it has ended.

    The last token is never fed back, unless the worker overlaps its steps: then the next one has been launched before
    the answer is seen to have ended. An answer of one token, which prefill makes, takes no step.
    """
    return answer if overlapped and answer > 1 else answer - 1


def reach_by_sizes(turns: Sizes, overlapped: bool, loose: int = 0) -> list[list[Reach]]:
    """How far decode reaches if every prompt begins with the one before it and its answer.

    loose: tokens at the end of what it has that it may be unable to reuse, as with speculation. Conversations are taken
    to have nothing in common.
    """
    found: list[list[Reach]] = []
    for number, turn in enumerate(turns):
        before = turns[number - 1] if number else [(0, 0)] * len(turn)
        reaches = []
        for (prompt, _), (earlier, answer) in zip(turn, before, strict=True):
            held = earlier + (kept_of_answer(answer, overlapped) if answer else 0)
            reaches.append(Reach(prompt, min(prompt, earlier), min(prompt, max(0, held - loose)), min(prompt, held)))
        found.append(reaches)
    return found


def reach_by_ids(turns: Sequence[Sequence[Ids]], sizes: Sizes, overlapped: bool, loose: int = 0) -> list[list[Reach]]:
    """How far decode reaches into prompts of these token ids, whichever conversation it has them from."""
    found: list[list[Reach]] = []
    prompts: list[tuple[int, ...]] = []
    held: list[tuple[int, ...]] = []
    unknown: list[tuple[tuple[int, ...], int]] = []  # prompts whose answers are not certain, and what is kept of these
    for turn, lengths in zip(turns, sizes, strict=True):
        reaches = []
        for ids in turn:
            by_prompts = max((common(ids.prompt, other) for other in prompts), default=0)
            surely = max((common(ids.prompt, other) for other in held), default=0)
            # Such an answer may be what follows its prompt, as a whole.
            maybe = (len(p) + kept for p, kept in unknown if common(ids.prompt, p) == len(p))
            at_most = min(len(ids.prompt), max(surely, *maybe, 0))
            reaches.append(Reach(len(ids.prompt), by_prompts, max(0, surely - loose), at_most))
        found.append(reaches)
        for ids, (_, answer) in zip(turn, lengths, strict=True):
            kept = kept_of_answer(answer, overlapped)
            prompts.append(ids.prompt)
            held.append(ids.prompt if ids.answer is None else ids.prompt + ids.answer[:kept])
            if ids.answer is None or ids.guessed:
                unknown.append((ids.prompt, kept))
    return found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many of the same tokens both begin."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def bounds(turns: Sequence[Sequence[Reach]], page_size: int) -> list[Bounds]:
    """By turn. Of a prompt, every page is sent that is not full of what decode has."""

    def pages(turn: Sequence[Reach], name: str) -> int:
        return sum(-(-reach.prompt // page_size) - getattr(reach, name) // page_size for reach in turn)

    return [
        Bounds(
            least=pages(turn, "at_most"),
            due=pages(turn, "surely"),
            without_answers=pages(turn, "by_prompts"),
            without_prompts=sum(-(-reach.prompt // page_size) for reach in turn),
        )
        for turn in turns
    ]


def least_pages(turns: Sizes, page_size: int, overlapped: bool) -> int:
    """The fewest pages that must cross, by the size of the conversations alone: `reach_by_sizes`, all turns together.

    After a turn decode holds the KV of P + K tokens: of the prompt and of K = `kept_of_answer` of the answer. So of the
    next prompt P' ceil(P' / page) - floor((P + K) / page) pages have to be sent, and of a first one ceil(P / page).
    """
    return sum(turn.least for turn in bounds(reach_by_sizes(turns, overlapped), page_size))
