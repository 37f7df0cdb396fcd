"""Requests of `pd-radix verify`: answers with log-probabilities, and records of their KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .. import forced
from ..rounding import Answer
from .kv_record import ByTokens, Record, Records
from .script import Script, Wave

# Tokens of an answer; and likeliest tokens per place of a score: a greedy token is compared with the first.
ANSWER_TOKENS, LIKELIEST = 24, 1

Tokens = tuple[int, ...]


@dataclass
class Run:
    """One run of all waves. By wave and prompt: answers, prompt tokens that decode held, KV at the end, and prompt
    tokens that decode computed."""

    answers: list[list[Answer]] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    kv: list[list[dict[int, Record]]] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)


def ask(url: str, prompt: Sequence[int]) -> tuple[Answer, int, int]:
    """A greedy answer of `ANSWER_TOKENS` tokens, and the prompt tokens that decode held, and computed.

    Raises PdRadixError.
    """
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }
    meta = forced.generate(url, body)
    told = forced.places_of(url, meta, "output_token_logprobs", ANSWER_TOKENS)
    answer = Answer(tuple(token for _, token, *_ in told), tuple(logprob for logprob, *_ in told))
    details = meta.get("cached_tokens_details") or {}
    return answer, details.get("decode_prefix", 0), details.get("decode_computed", 0)


def ask_alone(url: str, script: Script, records: Records) -> tuple[list[Wave], Run]:
    """Send all requests one by one. Chats continue with the answers; the returned waves have them in their prompts."""
    waves, run = script.waves(), Run()
    for wave in waves:
        _ask_wave(url, wave, run, records, at_once=1)
    histories: list[list[int]] = []
    for turn, added in enumerate(script.questions()):
        held = [script.held_of(len(history) - 1) for history in histories] or [0] * len(added)
        histories = [[*old, *new] for old, new in zip(histories or [[] for _ in added], added, strict=True)]
        waves.append(Wave(f"chats, turn {turn + 1}", [list(history) for history in histories], held, turn > 0))
        _ask_wave(url, waves[-1], run, records, at_once=1)
        histories = [[*old, *new.tokens] for old, new in zip(histories, run.answers[-1], strict=True)]
    return waves, run


def ask_together(url: str, waves: Sequence[Wave], records: Records) -> Run:
    """Send the requests of each wave at once."""
    run = Run()
    for wave in waves:
        _ask_wave(url, wave, run, records, at_once=len(wave.prompts))
    return run


def _ask_wave(url: str, wave: Wave, run: Run, records: Records, at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda prompt: ask(url, prompt), wave.prompts))
    whole = [(*prompt, *answer.tokens) for prompt, (answer, *_) in zip(wave.prompts, found, strict=True)]
    kv = records.take_all_of(whole)
    run.answers.append([answer for answer, _, _ in found])
    run.held.append([tokens for _, tokens, _ in found])
    run.computed.append([tokens for _, _, tokens in found])
    run.kv.append([kv.get(tokens, {}) for tokens in whole])


@dataclass
class Truth:
    """Prefill's recomputation of given answers: scores and KV, by prompt and answer.

    url: of the prefill worker.
    """

    url: str
    records: Records
    scores: dict[tuple[Tokens, Tokens], Answer] = field(default_factory=dict)
    kv: ByTokens = field(default_factory=ByTokens)

    def learn(self, waves: Sequence[Wave], runs: Iterable[Run]) -> None:
        """Score all new answers. Caches have to be empty: held KV would enter the scores."""
        self.records.take()
        asked: list[Tokens] = []
        for run in runs:
            for wave, answers in zip(waves, run.answers, strict=True):
                for prompt, answer in zip(wave.prompts, answers, strict=True):
                    key = tuple(prompt), answer.tokens
                    if key not in self.scores:
                        self.scores[key] = forced.score(self.url, prompt, answer.tokens, LIKELIEST, prefill_alone=True)
                        asked.append(key[0] + key[1])
        self.kv |= self.records.take_all_of(asked, whole=False)

    def score(self, prompt: Sequence[int], answer: Answer) -> Answer:
        return self.scores[tuple(prompt), answer.tokens]
