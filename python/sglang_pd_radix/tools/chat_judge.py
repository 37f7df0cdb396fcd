"""Two runs of one chat, with the decode prefix cache off and on, against each other and against what has to be.

Bytes are judged turn by turn from the second on, where there is something to reuse; the first turn, which is most of a
chat's bytes, would hide what the others lack. Each of the two things that decode keeps, prompts and answers, is judged
by what would be sent without it. Answers have to be the same; where the type rounds, their log-probabilities are held
to what prefill says of the same tokens, without any cache on decode and whatever the other run has said.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from .chat_least import Bounds, bounds, pages_of_prompts, reach_by_ids, reach_by_sizes
from .chat_load import Reply
from .chat_run import Run, count, mib
from .rounding import Answer, Deviation, Limits, deviation

# The cache may send this much more than what is due: in the first turn, and in all others together.
MOST_OVER_LEAST = 1.05

# The first turn is the same work in both runs. Where it took this many times longer in one of them, something else ran.
MOST_DISTURBED = 1.1


@dataclass
class Comparison:
    """Both runs against each other. ``failures`` is what makes the demo fail, ``notes`` what a reader has to know.

    bounds: pages of each turn, for the conversations as they were with the flag on.
    """

    off: Run
    on: Run
    page_bytes: float
    bounds: list[Bounds]
    differences: list[str]
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # What rounding may do to a log-probability, nats, where it was judged.
    rounding_limit: float | None = None

    @property
    def bytes_ratio(self) -> float:
        """KV bytes sent with the flag off over those with it on."""
        return ratio(self.off.total("sent_bytes"), self.on.total("sent_bytes"))

    @property
    def ttft_ratio(self) -> float:
        """TTFT with the flag off over that with it on, medians of all answers from the second turn on."""
        return ratio(self.off.later_ttft_s, self.on.later_ttft_s)

    @property
    def least_bytes(self) -> float:
        """The least possible, all turns."""
        return self.bytes_of("least", self.bounds)

    @property
    def over_least(self) -> float:
        """KV bytes sent with the flag on over the least possible."""
        return ratio(self.on.total("sent_bytes"), self.least_bytes)

    @property
    def later_sent(self) -> int:
        """KV bytes sent with the flag on from the second turn on."""
        return sum(turn.sent_bytes for turn in self.on.turns[1:])

    @property
    def later_over_due(self) -> float:
        """They, over what is due."""
        return ratio(self.later_sent, self.later("due"))

    def later(self, name: str) -> float:
        """``name`` of the bounds, in bytes, from the second turn on."""
        return self.bytes_of(name, self.bounds[1:])

    def bytes_of(self, name: str, turns: Sequence[Bounds]) -> float:
        return self.page_bytes * sum(getattr(turn, name) for turn in turns)


def ratio(a: float, b: float) -> float:
    return a / b if b else float("inf") if a else 1.0


def compare(off: Run, on: Run) -> Comparison:
    """Judge the two runs of one workload."""
    prompt_pages, page_bytes = pages_of_prompts(off.sizes, off.page_size), page_bytes_of(off)
    result = Comparison(off, on, page_bytes, bounds_of(on), differences(off, on))
    judge_answers(result)
    unlike = sorted((off.turns[0].ttft_s, on.turns[0].ttft_s))
    if unlike[1] > MOST_DISTURBED * unlike[0]:
        result.notes.append(
            "turn 1 is the same work in both runs, and its TTFT differs. That much is chance, or other work of this "
            "machine, and so may the other times be (tokens and bytes are exact)"
        )
    if off.total("reused_tokens") or off.total("saved_bytes"):
        result.failures.append("with the flag off, decode reused part of a prompt")
    _judge_counts(result)
    if not page_bytes:
        result.failures.append(
            f"with the flag off, no KV bytes were counted for {prompt_pages} pages of prompts, so nothing can be said "
            "of those with it on: prefill's counter of sent bytes does not see this transfer"
        )
        return result
    if page_bytes != int(page_bytes):
        sent = off.total("sent_bytes")
        result.failures.append(f"with the flag off, {prompt_pages} pages of prompts took {sent} bytes")
    _judge_bytes(result)
    return result


def page_bytes_of(off: Run) -> float:
    """Of a page. Off, every page of every prompt is sent, so they follow for any model, dtype and TP degree."""
    return off.total("sent_bytes") / pages_of_prompts(off.sizes, off.page_size)


def differences(off: Run, on: Run) -> list[str]:
    """Every answer that is not the same in both runs, and where it parts."""
    found = []
    for number, (one, other) in enumerate(zip(off.turns, on.turns, strict=True), 1):
        for client, (a, b) in enumerate(zip(one.replies, other.replies, strict=True), 1):
            if a.text != b.text:
                same = len(os.path.commonprefix([a.text, b.text]))
                found.append(
                    f"turn {number}, client {client}: the answers part after {same} characters, "
                    f"off {_excerpt(a.text, same)}, on {_excerpt(b.text, same)}"
                )
    return found


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - 12)
    return json.dumps(("..." if start else "") + text[start : at + 24], ensure_ascii=False)


# ------------------------------------------------------------------------------------------------------------ answers


def judge_answers(result: Comparison) -> None:
    """Whether the answers of ``on`` are right: those of ``off``, or as likely to prefill where the type rounds."""
    if not result.on.exact:
        _judge_rounding(result)
    elif result.differences:
        result.failures.append(f"{len(result.differences)} answers are not identical")


def _deviations(run: Run) -> dict[tuple[int, int], Deviation]:
    """What decode said of each answer against its score, by turn and client (from 1); of those that were scored."""
    found = {}
    for number, (turn, scores) in enumerate(zip(run.turns, run.scores or (), strict=False), 1):
        for client, (reply, scored) in enumerate(zip(turn.replies, scores, strict=True), 1):
            if scored is not None and reply.answer is not None:
                # The same tokens: texts in the one, ids in the other.
                found[number, client] = deviation(Answer(scored.tokens, reply.answer.logprobs), scored)
    return found


def _parted(off: Run, on: Run) -> set[tuple[int, int]]:
    """(turn, client), from 1, of the answers in which a conversation is not, or no longer, that with the flag off."""

    def same(a: Reply, b: Reply) -> bool:
        return a.text == b.text and (a.answer and a.answer.tokens) == (b.answer and b.answer.tokens)

    parted = set()
    for number, (one, other) in enumerate(zip(off.turns, on.turns, strict=True), 1):
        for client, (a, b) in enumerate(zip(one.replies, other.replies, strict=True), 1):
            if (number - 1, client) in parted or not same(a, b):
                parted.add((number, client))
    return parted


def _judge_rounding(result: Comparison) -> None:
    """Where the type rounds: each answer by what prefill says of it, and by what it says of those with the flag off."""
    off, on = result.off, result.on
    noise, seen, parted = _deviations(off), _deviations(on), _parted(off, on)
    answers = sum(len(turn.replies) for turn in on.turns)
    conversations = count(len({client for _, client in parted}), "conversation")
    unjudged = parted - set(seen) if noise else parted
    if unjudged:
        why = on.unknown or off.unknown or "the tokens of answers cannot be told from their text"
        result.failures.append(
            f"in {on.dtype}, {conversations} part from those with the flag off, and {len(unjudged)} of {answers} "
            f"answers could be compared with nothing: {why}. pd-radix verify asks with token ids, and in float32 "
            "all answers have to be the same"
        )
    if not noise or not seen:
        return
    limits = Limits.of(noise.values(), on.dtype)
    result.rounding_limit = limits.most
    if limits.unjudgeable:
        result.failures.append(f"in {on.dtype}, with the flag off: {limits.unjudgeable}")
        return
    told = (
        f"in {on.dtype}, {conversations} part from those with the flag off. By a pass of prefill over the same tokens, "
        f"log-probabilities of {len(seen)} answers are at most {max(d.most for d in seen.values()):.2g} off, and a "
        f"token that was taken at most {max(d.behind for d in seen.values()):.2g} behind the likeliest; with the flag "
        f"off {limits.noise.most:.2g} and {limits.noise.behind:.2g} (limit {limits.most:.2g})"
    )
    beyond = {place: what for place, d in seen.items() if (what := limits.beyond(d))}
    if beyond:
        turn, client = min(beyond)
        told += (
            f". {count(len(beyond), 'answer')} beyond that, the first in turn {turn} of client {client}: "
            f"{beyond[turn, client]}"
        )
    (result.failures if beyond else result.notes).append(told)


# -------------------------------------------------------------------------------------------------------------- bytes


def bounds_of(on: Run) -> list[Bounds]:
    """Of the conversation which ran with the flag on, by turn: other answers may tokenize to other lengths."""
    if on.ids:
        reach = reach_by_ids(on.ids, on.sizes, on.overlapped, on.loose)
    else:
        reach = reach_by_sizes(on.sizes, on.overlapped, on.loose)
    return bounds(reach, on.page_size)


def _judge_counts(result: Comparison) -> None:
    for name, run in (("off", result.off), ("on", result.on)):
        counted, asked = run.total("prompt_tokens"), sum(prompt for turn in run.sizes for prompt, _ in turn)
        if counted != asked:
            result.failures.append(f"flag {name}: decode counted {counted} prompt tokens, and {asked} were answered")
        if run.total("reused_tokens") + run.total("transferred_tokens") != counted:
            result.failures.append(f"flag {name}: reused and transferred tokens do not make the prompts")
        result.failures += [f"flag {name}: {problem}" for problem in run.problems]


def _judge_bytes(result: Comparison) -> None:
    page, first = result.page_bytes, result.on.turns[0].sent_bytes
    due = page * result.bounds[0].due
    if first > MOST_OVER_LEAST * due:
        result.failures.append(f"with the flag on, turn 1 took {mib(first)} MiB, and its prompts have {mib(due)}")
    short, no_prompts, no_answers = [], [], []
    for number, (turn, of) in enumerate(zip(result.on.turns, result.bounds, strict=True), 1):
        pages = turn.sent_bytes / page
        if number == 1:
            continue
        if pages < of.least:
            short.append(number)
        elif of.without_prompts > of.without_answers and 2 * pages > of.without_answers + of.without_prompts:
            no_prompts.append(number)
        elif of.without_answers > of.due and 2 * pages > of.due + of.without_answers:
            no_answers.append(number)
    failures = [
        _lost(result, short, "fewer KV bytes are counted than any cache has to send"),
        _lost(result, no_prompts, "earlier prompts are not reused", "without_prompts", "if nothing were kept"),
        _lost(result, no_answers, "earlier answers are not reused", "without_answers", "if prompts alone were kept"),
    ]
    if result.later_over_due > MOST_OVER_LEAST:
        failures.append(
            f"with the flag on, {result.later_over_due:.3f} times the least possible was sent from turn 2 on, above "
            f"{MOST_OVER_LEAST}"
        )
    found = list(filter(None, failures))
    result.failures += found
    result.notes += _what_cannot_be_reused(result, failed=bool(found))


def _lost(result: Comparison, numbers: Sequence[int], what: str, name: str = "", when: str = "") -> str:
    """One line for the turns ``numbers``; empty for none. name, when: the bound to tell besides, and what it is."""
    if not numbers:
        return ""
    turns = [result.on.turns[number - 1] for number in numbers]
    sent, reused, prompts = (
        sum(getattr(turn, name) for turn in turns) for name in ("sent_bytes", "reused_tokens", "prompt_tokens")
    )
    of = [result.bounds[number - 1] for number in numbers]
    beside = f", and {mib(result.bytes_of(name, of))} would be {when}" if name else ""
    return (
        f"{_turns(numbers)}: {what}: {mib(sent)} MiB were sent, the least possible is "
        f"{mib(result.bytes_of('least', of))}{beside} (decode counted {reused} of {prompts} prompt tokens as reused)"
    )


def _what_cannot_be_reused(result: Comparison, failed: bool) -> list[str]:
    """What the setting, and not the cache, does to the bytes; failed: whether there is anything to explain."""
    on = result.on
    notes: list[str] = []
    if len(on.turns) < 2:
        return ["whether anything is reused cannot be told from one turn: give --turns 2 or more"]
    changed = 0
    if on.ids:
        could = reach_by_sizes(on.sizes, on.overlapped, on.loose)
        can = reach_by_ids(on.ids, on.sizes, on.overlapped, on.loose)
        flat = zip(itertools.chain(*could), itertools.chain(*can), strict=True)
        changed = sum(max(0, a.surely - b.surely) for a, b in flat)
        if changed:
            notes.append(
                f"{changed} prompt tokens that follow the earlier chat are not those of its prompts and answers: the "
                "chat template or the tokenizer makes others of the same text, and no cache can reuse them"
            )
    elif failed and on.unknown:
        notes.append(f"if the chat template rewrites earlier answers, no cache can reuse them: {on.unknown}")
    if not changed and result.later("without_answers") <= result.later("due"):
        notes.append(
            f"whether answers are reused cannot be told: those of {on.turns[0].replies[0].answer_tokens} tokens end no "
            f"page of {on.page_size} that can be reused. A longer --answer shows it, or a smaller --page-size"
        )
    if result.later("without_prompts") <= result.later("without_answers"):
        notes.append(f"whether prompts are reused cannot be told: none fills a page of {on.page_size} tokens")
    needed = sum(prompt + answer for prompt, answer in on.sizes[-1])
    pools = [pool["size"] for name, pool in on.pools.items() if name.startswith("decode") and "size" in pool]
    if failed and pools and sum(pools) < needed:
        notes.append(
            f"decode's KV pool has room for {sum(pools)} tokens, and the conversations have {needed}: what does not "
            "fit cannot be reused. A larger pool is -- --max-total-tokens N, a smaller chat --clients or --document"
        )
    return notes


def _turns(numbers: Sequence[int]) -> str:
    """``turn 2``, ``turns 2 to 5`` or ``turns 2, 4``."""
    if len(numbers) == 1:
        return f"turn {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"turns {numbers[0]} to {numbers[-1]}"
    return "turns " + ", ".join(map(str, numbers))
