"""Clients that hold multi-turn chats with an OpenAI endpoint, in step with each other, and what each request took.

The texts are random words, the same for the same workload on every machine. A conversation opens with a long message
(the document) and goes on with short ones (the questions). Each request carries the whole history, with the answers, as
chat clients do. Answers have a fixed number of tokens, so every turn of every run has the same size.
"""

from __future__ import annotations

import functools
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from sglang_pd_radix.errors import PdRadixError

from .cluster import local_session
from .make_model import make_vocabulary
from .rounding import Answer

Message = dict[str, str]


class ChatError(PdRadixError):
    """A request got no answer, or not the one asked for."""


@dataclass(frozen=True)
class Workload:
    """``clients`` conversations of ``turns`` turns. Texts are counted in words, answers in tokens."""

    clients: int = 4
    turns: int = 5
    document: int = 1000
    question: int = 60
    answer: int = 16
    seed: int = 0

    def check(self) -> None:
        """Raise PdRadixError naming the first size that makes no conversation."""
        for name in ("clients", "turns", "document", "question"):
            if getattr(self, name) < 1:
                raise PdRadixError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.answer < 2:
            raise PdRadixError(f"--answer {self.answer}: must be at least 2, since prefill makes the first token")

    def user_text(self, client: int, turn: int) -> str:
        """What ``client`` says in ``turn`` (both from 0)."""
        words = common_words()
        # Seeded by a string: the same words whatever the number of clients, turns or words.
        pick = random.Random(f"{self.seed}/{client}/{turn}")
        return " ".join(pick.choice(words) for _ in range(self.question if turn else self.document))

    def messages(self, client: int, answers: Sequence[str]) -> list[Message]:
        """What ``client`` sends after these ``answers`` to its earlier messages: the whole history and what is new."""
        history = []
        for turn, answer in enumerate(answers):
            history.append({"role": "user", "content": self.user_text(client, turn)})
            history.append({"role": "assistant", "content": answer})
        return [*history, {"role": "user", "content": self.user_text(client, len(answers))}]

    @property
    def words(self) -> int:
        """Words and answer tokens of the longest history, the last answer included."""
        return self.document + (self.turns - 1) * self.question + self.turns * self.answer


@functools.lru_cache(maxsize=1)
def common_words() -> tuple[str, ...]:
    """Common English words: one token each with `make-model`'s tokenizer, and about that with any other."""
    vocabulary = make_vocabulary(4096)
    start = vocabulary.emitted.start
    return tuple(token[1:] for token in vocabulary.tokens[start : start + 256])


@dataclass(frozen=True)
class Reply:
    """One answer. Tokens as the server counted them; seconds from the moment the request was sent.

    answer: the texts of its tokens with log-probabilities, where these were asked for.
    """

    text: str
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    total_s: float
    answer: Answer | None = None


def stream_chat(
    base_url: str,
    model: str,
    messages: Sequence[Message],
    answer_tokens: int,
    timeout_s: float = 600.0,
    logprobs: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Ask ``base_url``/v1/chat/completions for exactly ``answer_tokens`` greedy tokens, streamed.

    logprobs: whether the log-probability of each token is asked for. headers: of the request, beside the usual.

    Raises ChatError: no answer, an error, or an answer of another length.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"logprobs": True} if logprobs else {}),
    }
    url = base_url + "/v1/chat/completions"
    text, first, usage = "", None, None
    places: list[dict[str, Any]] = []
    started = time.perf_counter()
    try:
        with (
            local_session() as session,
            session.post(url, json=body, timeout=timeout_s, stream=True, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise ChatError(f"{url} answered HTTP {response.status_code}: {_short(response.text)}")
            for line in response.iter_lines():
                event = _event(line)
                if event is None:
                    continue
                if event.get("error"):
                    raise ChatError(f"{url} broke off with an error: {_short(event['error'])}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    if piece and first is None:
                        first = time.perf_counter()
                    text += piece
                    places += (choice.get("logprobs") or {}).get("content") or []
    except requests.RequestException as error:
        raise ChatError(f"{url} did not answer: {error}") from None
    total = time.perf_counter() - started
    if usage is None:
        raise ChatError(f"{url} ended its answer after {len(text)} characters, without usage figures")
    if usage["completion_tokens"] != answer_tokens:
        raise ChatError(f"{url} made {usage['completion_tokens']} tokens of {answer_tokens}: the request was cut off")
    if first is None:
        raise ChatError(
            f"{url} made {answer_tokens} tokens without any text, special ones alone: when the first came cannot be "
            "told; ask for more with --answer, or for other words with --seed"
        )
    answer = None
    if logprobs:
        answer = Answer(tuple(place["token"] for place in places), tuple(place["logprob"] for place in places))
    return Reply(text, usage["prompt_tokens"], answer_tokens, first - started, total, answer)


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON of one line of a server-sent event stream; None for any other line and for the closing mark."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ChatError(f"the stream holds a line that is no JSON object: {_short(data.decode(errors='replace'))}")
    return event


def _short(value: Any) -> str:
    return " ".join((value if isinstance(value, str) else json.dumps(value)).split())[:300]


class Chats:
    """The conversations of a workload. `turn` holds the next turn of all of them at once."""

    def __init__(
        self, base_url: str, model: str, workload: Workload, first_client: int = 0, logprobs: bool = False
    ) -> None:
        self._url, self._model, self._workload, self._first = base_url, model, workload, first_client
        self._logprobs = logprobs
        self._answers: list[list[str]] = [[] for _ in range(workload.clients)]
        self._turn = 0

    def turn(self, watch: Callable[[], None] | None = None) -> list[Reply]:
        """One reply per client, in order of clients. Raises ChatError of the first client that got none.

        ``watch`` is called five times a second meanwhile; what it raises ends the turn.
        """
        outcomes: list[Reply | ChatError | None] = [None] * self._workload.clients

        def hold(client: int) -> None:
            try:
                outcomes[client] = self._ask(client)
            except ChatError as error:
                outcomes[client] = error

        # Daemons: a server that never answers must not keep a program alive that was told to end.
        threads = [threading.Thread(target=hold, args=(client,), daemon=True) for client in range(len(outcomes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if watch:
                    watch()
        self._turn += 1
        for client, outcome in enumerate(outcomes):
            if not isinstance(outcome, Reply):
                raise ChatError(f"client {client + 1}, turn {self._turn}: {outcome or 'a fault in the client'}")
        return [outcome for outcome in outcomes if isinstance(outcome, Reply)]

    def _ask(self, client: int) -> Reply:
        messages = self._workload.messages(self._first + client, self._answers[client])
        reply = stream_chat(self._url, self._model, messages, self._workload.answer, logprobs=self._logprobs)
        self._answers[client].append(reply.text)
        return reply
