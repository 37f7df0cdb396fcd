"""Workloads: prompts as token ids, answer lengths, and the order of requests.

All follows from sizes and seed, so the same options give the same requests on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .deploy import PREFILL_POOL
from .traces import TRACE_BLOCK, made_trace, read_trace, turns_of


@dataclass(frozen=True)
class Request:
    """One request. ``ids``: its prompt; in a chat only what its client adds to the history. Lengths in tokens.

    ``group``: its prefix, client or herd. ``arrival_s``: send time in seconds from the start of its round; None: as
    soon as the concurrency allows. ``beside``: it only loads the servers; its own TTFT does not count.
    """

    ids: tuple[int, ...]
    answer: int
    group: int = 0
    arrival_s: float | None = None
    beside: bool = False


# The least answer for which bench_serving has a time between tokens.
STEADY_ANSWER = 2


@dataclass(frozen=True)
class Steady:
    """Clients that send one new prompt of ``length`` tokens after another beside a workload, for answers of
    `STEADY_ANSWER` tokens. ``take``: tokens by name, as `Tokens.take`."""

    clients: int
    length: int
    take: Callable[[str, int], tuple[int, ...]] = field(repr=False)

    def prompt(self, client: int, number: int) -> tuple[int, ...]:
        """The ``number``-th prompt of a client (from 0); equal in all runs."""
        return self.take(f"{client}/{number}", self.length)


@dataclass
class Workload:
    """Rounds of requests: each starts when all answers of the one before are complete; at once in a ``stream``.

    ``warm``: unmeasured requests before each round, or none. In a ``chat``, round n holds turn n of every client, one
    request each; each prompt begins with its group's previous prompt and answer. ``steady``: unmeasured clients beside.
    ``may_refuse``: a side that refuses late requests may answer 503.
    """

    key: str
    title: str
    sizes: dict[str, Any]
    rounds: list[list[Request]]
    warm: list[list[Request]] = field(default_factory=list)
    concurrency: int | None = None
    chat: bool = False
    stream: bool = False
    may_refuse: bool = False
    notes: list[str] = field(default_factory=list)
    steady: Steady | None = None

    @property
    def requests(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        lengths: dict[int, int] = {}
        for request in (r for rnd in [*self.rounds, *self.warm] for r in rnd):
            before = lengths.get(request.group, 0)
            length = len(request.ids) + request.answer
            lengths[request.group] = before + length if self.chat else max(before, length)
        beside = self.steady.length + STEADY_ANSWER if self.steady else 0
        return max(beside, *lengths.values())

    def beginning(self, most: int) -> Workload:
        """The first ``most`` requests of the first round, and its warm-up."""
        return dataclasses.replace(self, rounds=[self.rounds[0][:most]], warm=self.warm[:1])


# ------------------------------------------------------------------------------------------------------------- sizes
#
# A class per workload: its fields are the options `--set KEY.FIELD=VALUE`, its `make` builds the requests. ``pool``: KV
# pool of each decode worker in tokens. ``reserve``: tokens kept free per request for its answer
# (--num-reserved-decode-tokens). ``prefill``: pool of the prefill worker, at least ``pool``.


class Tokens:
    """Random tokens out of ``ids``: `take` depends on the name only, not on earlier calls."""

    def __init__(self, ids: range, seed: int) -> None:
        self._ids, self._seed = ids, seed

    def take(self, name: str, count: int) -> tuple[int, ...]:
        # Python's own generator seeded by a string gives the same stream on every version and machine.
        return tuple(random.Random(f"{self._seed}/{name}").choices(self._ids, k=count))

    def order(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/order/{name}")


_MAY_BE_ZERO = ("reserve", "speed", "suffix", "skip", "pause", "others", "steady")


@dataclass
class Sizes:
    """Sizes that all workloads have."""

    pool: int = 32768
    reserve: int = 64
    prefill: int = field(default=PREFILL_POOL, kw_only=True)

    def check(self, key: str) -> None:
        """Raise PdRadixError naming the first invalid size."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            least = 2 if f.name == "answer" else 0 if f.name in _MAY_BE_ZERO else 1
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                finite = ", and finite" if isinstance(value, float) else ""
                raise PdRadixError(f"--set {key}.{f.name}={value}: must be at least {least}{finite}")

    def make(self, key: str, tokens: Tokens) -> Workload:
        raise NotImplementedError


@dataclass
class Prefixes(Sizes):
    """``requests`` requests over ``prefixes`` prefixes of ``shared`` tokens, each with a ``suffix`` of its own and an
    answer of half to one and a half ``answer`` tokens; ``concurrency`` at a time."""

    prefixes: int = 20
    shared: int = 1024
    suffix: int = 96
    answer: int = 192
    requests: int = 480
    concurrency: int = 24

    @property
    def share(self) -> str:
        return f"{self.shared / (self.shared + self.suffix):.0%} of each prompt shared"

    def ask(self, key: str, tokens: Tokens, numbers: Iterable[int], name: str, prefix: str = "prefix") -> list[Request]:
        """Requests ``numbers`` in the random order of ``name``, over the prefixes ``prefix`` in turn."""
        shuffled = list(numbers)
        tokens.order(f"{key}/{name}").shuffle(shuffled)
        # Answers of equal length would end together, so requests would come in waves.
        length = tokens.order(f"{key}/answer/{name}")
        shared = {g: tokens.take(f"{key}/{prefix}/{g}", self.shared) for g in {i % self.prefixes for i in shuffled}}
        return [
            Request(
                shared[i % self.prefixes] + tokens.take(f"{key}/suffix/{i}", self.suffix),
                max(2, length.randint(self.answer // 2, self.answer + self.answer // 2)),
                i % self.prefixes,
            )
            for i in shuffled
        ]


@dataclass
class SharedPrefixes(Prefixes):
    """The same in ``rounds`` rounds over all prefixes in random order, from a cold start and without emptying caches in
    between. With ``pause`` (1) a round waits for the answers of the one before."""

    # The lengths of the published run over 50, with its 20 prefixes, 128 clients and 1000 requests. The pool is about
    # twice the prefixes: without the cache it holds some 37 requests, as in that run. With pauses most requests would
    # belong to the burst that starts a round: this machine is too slow for much longer rounds.
    pool: int = 45056
    reserve: int = 64
    shared: int = 1000
    suffix: int = 90
    answer: int = 80
    requests: int = 1000
    concurrency: int = 128
    rounds: int = 5
    pause: int = 0

    title = "shared prefixes"

    def check(self, key: str) -> None:
        """Also refuse rounds without requests."""
        super().check(key)
        if self.rounds > self.requests:
            raise PdRadixError(f"--set {key}.rounds={self.rounds}: there are only {self.requests} requests")

    def make(self, key: str, tokens: Tokens) -> Workload:
        rounds = []
        for n in range(self.rounds):
            numbers = range(n * self.requests // self.rounds, (n + 1) * self.requests // self.rounds)
            rounds.append(self.ask(key, tokens, numbers, f"{n}", self.called(n)))
        title = f"{self.title}: {self.prefixes} prefixes, {self.share}, {self.rounds} round{'s'[: self.rounds > 1]}"
        stream = not self.pause
        return Workload(
            key, f"{title}, cold", dataclasses.asdict(self), rounds, concurrency=self.concurrency, stream=stream
        )

    def called(self, number: int) -> str:
        """Names of the prefixes of round ``number``; equal names share prefixes."""
        return "prefix"


@dataclass
class Churn(SharedPrefixes):
    """The same with ``prefixes`` new prefixes in every round, so that the pool is full of old ones."""

    # 22 whole prompts with answers: room for all 64 clients only if they share.
    pool: int = 27648
    prefixes: int = 12
    answer: int = 192
    requests: int = 480
    concurrency: int = 64
    rounds: int = 4
    pause: int = 1

    title = "churn, new prefixes every round"

    def called(self, number: int) -> str:
        return f"prefix/{number}"


@dataclass
class CrowdedPrefixes(SharedPrefixes):
    """The same with more prefixes than fit into the pool."""

    # All prefixes and hardly anything else: at most half of them beside the requests that use them.
    pool: int = 12288
    prefixes: int = 12
    answer: int = 192
    requests: int = 360
    concurrency: int = 64
    rounds: int = 1

    title = "more prefixes than fit"


@dataclass
class WarmPrefixes(Prefixes):
    """The same with ``at_once`` prefixes in use at a time: a round of requests over them in random order, then the next
    ones. Before a round each of its prefixes is sent once, unmeasured, so no measured request has a new prefix."""

    # A round's prefixes, 24 requests' own tokens, and the reserve. Without the cache: 10 requests.
    pool: int = 13824
    reserve: int = 192
    # Long rounds: the first requests of a round are a burst, which is not typical of a service.
    at_once: int = 4

    title = "warm shared prefixes"

    def make(self, key: str, tokens: Tokens) -> Workload:
        rounds, warm = [], []
        for first in range(0, self.prefixes, self.at_once):
            used = range(first, min(self.prefixes, first + self.at_once))
            rounds.append(
                self.ask(key, tokens, (i for i in range(self.requests) if i % self.prefixes in used), f"{first}")
            )
            ids = {g: tokens.take(f"{key}/prefix/{g}", self.shared) for g in used}
            warm.append([Request(ids[g] + tokens.take(f"{key}/warm/{g}", self.suffix), 2, g) for g in used])
        together = f", {self.at_once} at a time" if self.at_once < self.prefixes else ""
        title = f"{self.title}: {self.prefixes} prefixes{together}, {self.share}, each asked before"
        return Workload(key, title, dataclasses.asdict(self), rounds, warm, self.concurrency)


@dataclass
class Groups(WarmPrefixes):
    """``prefixes`` groups of ``per_group`` prompts, 7 shared tokens for each own one, and long answers."""

    # As in the incremental proposal, with lengths over 16. Everything fits into the pool.
    pool: int = 122880
    reserve: int = 64
    prefixes: int = 80
    at_once: int = 80
    per_group: int = 8
    shared: int = 448
    suffix: int = 64
    answer: int = 64
    requests: int = 640
    concurrency: int = 128

    title = "groups"

    def check(self, key: str) -> None:
        """Also derive what follows from the number of groups."""
        super().check(key)
        self.requests, self.at_once = self.prefixes * self.per_group, self.prefixes


_BESIDE = (
    "KV sent, tokens held, requests running and CPU time per request include the long prompts beside; requests/s, "
    "TTFT, ITL and tokens reused do not."
)


@dataclass
class Chat(Sizes):
    """``clients`` conversations of ``turns`` turns: a first message of ``document`` tokens, then ``question`` each."""

    clients: int = 8
    turns: int = 6
    document: int = 400
    question: int = 40
    answer: int = 32

    def make(self, key: str, tokens: Tokens) -> Workload:
        rounds = [
            [
                *self.beside(key, tokens, t),
                *(self.ask(key, tokens, c, t) for c in range(self.clients)),
            ]
            for t in range(self.turns)
        ]
        title = f"chat: {self.clients} clients, {self.turns} turns, {self.told}"
        sizes, steady = dataclasses.asdict(self), self.steadily(key, tokens)
        notes = [_BESIDE] if steady else []
        return Workload(key, title, sizes, rounds, concurrency=len(rounds[0]), chat=True, notes=notes, steady=steady)

    def ask(self, key: str, tokens: Tokens, client: int, turn: int) -> Request:
        """A client's request in a turn."""
        return Request(tokens.take(f"{key}/{client}/{turn}", self.new(turn)), self.answer, client)

    def steadily(self, key: str, tokens: Tokens) -> Steady | None:
        """The clients beside, if any."""
        return None

    def new(self, turn: int) -> int:
        """Tokens that a client adds in a turn."""
        return self.question if turn else self.document

    def beside(self, key: str, tokens: Tokens, turn: int) -> list[Request]:
        """Others' requests just before the clients' turn."""
        return []

    @property
    def told(self) -> str:
        return "growing history"


@dataclass
class BusyChat(Chat):
    """The same behind ``others`` new prompts of ``prompt`` tokens per turn, never repeated; with ``steady`` (1) beside
    as many clients that send such prompts all the time."""

    others: int = 4
    prompt: int = 1500
    steady: int = 0

    def check(self, key: str) -> None:
        """Also refuse ``steady`` other than 0 and 1."""
        super().check(key)
        if self.steady > 1:
            raise PdRadixError(f"--set {key}.steady={self.steady}: must be 0 or 1")

    def beside(self, key: str, tokens: Tokens, turn: int) -> list[Request]:
        if self.steady:
            return []
        numbers = range(turn * self.others, (turn + 1) * self.others)
        # The least answer for which bench_serving has a time between tokens.
        return [
            Request(tokens.take(f"{key}/other/{n}", self.prompt), 2, self.clients + n, beside=True) for n in numbers
        ]

    def steadily(self, key: str, tokens: Tokens) -> Steady | None:
        if not self.steady:
            return None
        return Steady(self.others, self.prompt, lambda name, count: tokens.take(f"{key}/steady/{name}", count))

    @property
    def told(self) -> str:
        if self.steady:
            clients = f"{self.others} client{'s'[: self.others > 1]}"
            verb = "send" if self.others > 1 else "sends"
            return f"beside {clients} that {verb} prompts of {self.prompt} tokens"
        return f"each behind {self.others} prompts of {self.prompt} tokens of others"


@dataclass
class AlternatingChat(Chat):
    """The same, with ``long`` tokens in every other question."""

    turns: int = 7
    long: int = 600

    def new(self, turn: int) -> int:
        return self.long if turn and turn % 2 == 0 else super().new(turn)

    @property
    def told(self) -> str:
        return f"short and long ones ({self.question} and {self.long} tokens) by turns"


@dataclass
class Agents(BusyChat):
    """Conversations of many turns that begin with ``document`` tokens. Each later turn adds a tool's result of
    ``question`` to ``longest_question`` tokens, for ``answer`` to ``longest_answer`` tokens; the clients of a turn
    arrive over ``pause`` seconds. With a trace's ``file``, lengths are those of its later turns over ``shrink``.
    ``others``: clients beside that send other agents' first prompts, of ``prompt`` tokens, all the time."""

    # Each ends with 4,700 tokens, so together they outgrow the pool during a run.
    pool: int = 32768
    prefill: int = 32768
    clients: int = 12
    turns: int = 40
    document: int = 2000
    question: int = 10
    longest_question: int = 100
    answer: int = 3
    longest_answer: int = 25
    others: int = 0
    prompt: int = 2000
    steady: int = 1
    pause: float = 1.0
    file: str = ""
    shrink: int = 20

    def check(self, key: str) -> None:
        """Also refuse inverted length ranges, and a trace without later turns."""
        super().check(key)
        if self.longest_question < self.question or self.longest_answer < self.answer:
            raise PdRadixError(f"--set {key}: longest_question and longest_answer are at least question and answer")
        if self.file and not self.lengths:
            raise PdRadixError(f"{self.file}: no request continues an earlier one")

    @functools.cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Later turns of the trace: added tokens, and answer; empty without a trace."""
        found = turns_of(read_trace(Path(self.file))) if self.file else []
        return [(max(1, new // self.shrink), max(2, answer // self.shrink)) for new, answer in found]

    def ask(self, key: str, tokens: Tokens, client: int, turn: int) -> Request:
        pick = tokens.order(f"{key}/{client}/{turn}")
        drawn = pick.randint(self.question, self.longest_question), pick.randint(self.answer, self.longest_answer)
        new, answer = pick.choice(self.lengths) if self.lengths else drawn
        ids = tokens.take(f"{key}/{client}/{turn}", new if turn else self.document)
        return Request(ids, answer, client, pick.uniform(0, self.pause) if self.pause else None)

    def steadily(self, key: str, tokens: Tokens) -> Steady | None:
        return super().steadily(key, tokens) if self.others else None

    @property
    def told(self) -> str:
        return f"agents after {self.document} tokens" + (f", {super().told}" if self.others else "")


@dataclass
class Herd(Sizes):
    """``herds`` times ``size`` concurrent requests with the same new prefix of ``shared`` tokens."""

    herds: int = 4
    size: int = 16
    shared: int = 512
    suffix: int = 32
    answer: int = 16

    def make(self, key: str, tokens: Tokens) -> Workload:
        rounds = []
        for herd in range(self.herds):
            prefix = tokens.take(f"{key}/{herd}", self.shared)
            rounds.append(
                [
                    Request(prefix + tokens.take(f"{key}/{herd}/{i}", self.suffix), self.answer, herd)
                    for i in range(self.size)
                ]
            )
        title = f"cold herd: {self.size} requests at once with the same new prefix, {self.herds} times"
        return Workload(key, title, dataclasses.asdict(self), rounds)


@dataclass
class Distinct(Sizes):
    """``requests`` prompts of ``prompt`` tokens without common prefixes, ``concurrency`` at a time."""

    requests: int = 120
    prompt: int = 384
    answer: int = 32
    concurrency: int = 16

    def make(self, key: str, tokens: Tokens) -> Workload:
        asked = [Request(tokens.take(f"{key}/{i}", self.prompt), self.answer, i) for i in range(self.requests)]
        title = "no sharing: every prompt is new"
        return Workload(key, title, dataclasses.asdict(self), [asked], concurrency=self.concurrency)


@dataclass
class Trace(Sizes):
    """``requests`` requests of a Mooncake-format trace from line ``skip`` on, lengths over ``shrink``, sent at
    ``speed`` times the trace's pace (0: all at once, ``concurrency`` at a time). Without ``file``: a synthetic trace of
    conversations."""

    file: str = ""
    skip: int = 0
    requests: int = 120
    shrink: int = 32
    speed: float = 4.0
    concurrency: int = 32

    def check(self, key: str) -> None:
        """Also refuse an unreadable trace."""
        super().check(key)
        if self.file:
            self._records(key)

    def _records(self, key: str) -> list[dict[str, Any]]:
        if not self.file:
            return made_trace(self.requests)
        records = read_trace(Path(self.file), self.skip + self.requests)[self.skip :]
        if not records:
            raise PdRadixError(f"--set {key}.skip={self.skip}: {self.file} has no line after it")
        return records

    def make(self, key: str, tokens: Tokens) -> Workload:
        records = self._records(key)
        block = max(1, TRACE_BLOCK // self.shrink)
        first = records[0]["timestamp"]

        @functools.cache
        def tokens_of(block_id: int) -> tuple[int, ...]:
            return tokens.take(f"trace/{block_id}", block)

        asked = []
        for record in records:
            length = max(1, round(record["input_length"] / self.shrink))
            ids = tuple(token for b in record["hash_ids"] for token in tokens_of(b))
            if len(ids) < length:  # rounding: the last block of the trace is shorter than a block, ours may be too
                ids += tokens.take(f"trace/rest/{record['hash_ids'][-1]}", length - len(ids))
            answer = max(2, round(record["output_length"] / self.shrink))
            due = (record["timestamp"] - first) / 1000 / self.speed if self.speed else None
            asked.append(Request(ids[:length], answer, record["hash_ids"][0], due))
        name = Path(self.file).stem if self.file else "a made trace"
        title = f"trace: {len(asked)} requests of {name}, lengths / {self.shrink}" + (
            f", {self.speed:g} x its pace" if self.speed else ""
        )
        concurrency = None if self.speed else self.concurrency
        return Workload(key, title, dataclasses.asdict(self), [asked], concurrency=concurrency)


#: Every workload by its key.
KINDS: dict[str, Callable[[], Sizes]] = {
    "a": SharedPrefixes,
    "aw": WarmPrefixes,
    "b": Groups,
    "c": Chat,
    "d": Herd,
    "e": Distinct,
    "f": Trace,
    "g": Churn,
    "h": CrowdedPrefixes,
    "i": BusyChat,
    "j": AlternatingChat,
    "k": Agents,
}


def apply_settings(sizes: dict[str, Sizes], settings: Sequence[str]) -> None:
    """Change ``sizes`` by ``KEY.FIELD=VALUE`` strings. Raises PdRadixError that lists the valid ones."""
    for setting in settings:
        name, equals, value = setting.partition("=")
        key, dot, field_name = name.partition(".")
        if not equals or not dot or key not in sizes:
            raise PdRadixError(f"--set {setting}: write KEY.SIZE=VALUE, with KEY one of {', '.join(sizes)}")
        known = {f.name: f for f in dataclasses.fields(sizes[key])}
        if field_name not in known:
            raise PdRadixError(f"--set {setting}: {key} has the sizes {', '.join(known)}")
        kind = type(getattr(sizes[key], field_name))
        try:
            setattr(sizes[key], field_name, kind(value))
        except ValueError:
            raise PdRadixError(f"--set {setting}: {field_name} takes {kind.__name__}") from None
    for key, entry in sizes.items():
        entry.check(key)
