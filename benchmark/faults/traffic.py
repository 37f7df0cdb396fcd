"""Clients of a deployment: the requests of a trace, each asked in its manner, and what each was told and when."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_pd_radix.tools.bench import workload
from sglang_pd_radix.tools.cluster import local_session

from .schedule import CALM, Manner

# Ids of ordinary words in the vocabulary of `pd-radix make-model`.
WORDS = range(400, 1900)


@dataclass(frozen=True)
class Ask:
    """One request: the ids of its prompt, how many tokens are to be answered, and of which conversation it is a turn:
    a gateway that goes by its name (smg's ``manual``) sends all of them to one worker."""

    ids: tuple[int, ...]
    answer: int
    conversation: int | None = None


@dataclass(frozen=True)
class Told:
    """What a client was told. Times are of the monotonic clock.

    number: of the client; ask: of its request. status: HTTP's, 0 without an answer. ids: the whole answer, None if it
    did not come whole. ended_how: ``whole``, ``aborted`` by a worker (the engine's pause does so), ``left`` by the
    client, or ``failed``, and then ``error`` says how. first_s: when the first token came, of a stream.

    worker: the decode worker that has answered, by its ``--weight-version``; hit: tokens of the prompt that its tree
    held. Of a whole answer; None where it does not say. key: the ``extra_key`` that was given, if any.
    """

    number: int
    ask: int
    manner: str
    began_s: float
    ended_s: float
    status: int
    ended_how: str
    ids: tuple[int, ...] | None = None
    error: str = ""
    first_s: float | None = None
    worker: str | None = None
    hit: int | None = None
    key: str = ""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


def trace_asks(file: Path | None, count: int, shrink: int, longest: int) -> list[Ask]:
    """``count`` requests of a Mooncake-format trace, lengths divided by ``shrink`` (or of a made one of that shape).

    What is longer than ``longest`` tokens with its answer is cut to that. Raises PdRadixError.
    """
    sizes = workload.Trace(file=str(file or ""), requests=count, shrink=shrink, speed=0.0)
    sizes.check("f")
    asked = sizes.make("f", workload.Tokens(WORDS, 0)).rounds[0]
    found = []
    for request in asked:
        answer = min(request.answer, longest // 2)
        found.append(Ask(tuple(request.ids[: longest - answer]), answer))
    return found


class Clients:
    """``concurrency`` clients that ask one request after the other of ``url`` until all are answered or `stop`.

    number n asks ``asks[n % len(asks)]`` in ``manner(n)`` with the ``extra_key`` that ``key(n)`` says, empty for none.
    ``give_up_s``: how long a client waits for a word.
    """

    def __init__(
        self,
        url: str,
        asks: Sequence[Ask],
        total: int,
        concurrency: int,
        manner: Callable[[int], Manner] = lambda number: CALM,
        give_up_s: float = 120.0,
        key: Callable[[int], str] = lambda number: "",
    ) -> None:
        self.told: list[Told] = []
        self.began_s = self.ended_s = 0.0
        self._url, self._asks, self._total = url, asks, total
        self._manner, self._give_up_s, self._key = manner, give_up_s, key
        self._next, self._lock, self._stopping = 0, threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._talk, daemon=True) for _ in range(concurrency)]

    def start(self) -> Clients:
        self.began_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Ask nothing more; what has been asked is waited for by `join`."""
        self._stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether all clients have ended, within ``timeout_s``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in self._threads)
        if done:
            self.ended_s = max((told.ended_s for told in self.told), default=self.began_s)
        return done

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    @property
    def rate(self) -> float:
        """Whole answers a second."""
        whole = sum(told.ended_how == "whole" for told in self.told)
        return whole / max(1e-9, self.ended_s - self.began_s)

    def _talk(self) -> None:
        with local_session() as session:
            while not self._stopping.is_set():
                with self._lock:
                    number = self._next
                    self._next += 1
                if number >= self._total:
                    return
                told = self._ask(session, number)
                self.told.append(told)
                if told.ended_how == "failed":
                    # As people do: a refusal is not answered by a hundred more in the same second.
                    time.sleep(0.2)

    def _ask(self, session: requests.Session, number: int) -> Told:
        place, manner, key = number % len(self._asks), self._manner(number), self._key(number)
        ask = self._asks[place]
        body = {
            "input_ids": list(ask.ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": ask.answer, "ignore_eos": True},
            "stream": manner.kind != "plain",
            **({"extra_key": key} if key else {}),
        }
        headers = {} if ask.conversation is None else {"X-SMG-Routing-Key": f"{ask.conversation} {key}"}
        began = time.monotonic()
        leaves = began + manner.after_s if manner.kind == "abort" else None
        patience = self._give_up_s if leaves is None else max(0.01, manner.after_s)
        status, first = 0, None
        last: Any = None

        def ended(how: str, ids: Sequence[int] | None = None, error: str = "") -> Told:
            whole = None if ids is None else tuple(ids)
            said = _said_of(last) if whole is not None else (None, None)
            now = time.monotonic()
            return Told(number, place, manner.kind, began, now, status, how, whole, error[:400], first, *said, key)

        try:
            with session.post(self._url, json=body, headers=headers, stream=True, timeout=(10, patience)) as reply:
                status = reply.status_code
                if status != 200:
                    return ended("failed", error=reply.text)
                if manner.kind == "plain":
                    last = reply.json()
                    return ended(*_verdict(last, ask.answer))
                for line in reply.iter_lines():
                    if not line.startswith(b"data: "):
                        continue
                    if line == b"data: [DONE]":
                        return ended(*_verdict(last, ask.answer))
                    last = json.loads(line[6:])
                    first = first or time.monotonic()
                    if isinstance(last, dict) and "error" in last:
                        return ended("failed", error=json.dumps(last["error"]))
                    if leaves is not None and time.monotonic() > leaves:
                        return ended("left")
                    time.sleep(manner.nap_s)
                return ended("failed", error="the stream ended in the middle")
        except requests.exceptions.Timeout:
            return ended("left") if leaves is not None else ended("failed", error="no word")
        except (requests.RequestException, ValueError) as error:
            if leaves is not None and time.monotonic() >= leaves:
                return ended("left")
            return ended("failed", error=f"{type(error).__name__}: {error}")


def wait_answered(url: str, ask: Ask, seconds: float) -> bool:
    """Whether a gateway answers eight times in a row within ``seconds``: it has seen that all its workers are back."""
    deadline, row = time.monotonic() + seconds, 0
    while row < 8 and time.monotonic() < deadline:
        clients = Clients(url + "/generate", [ask], 1, 1).start()
        clients.join()
        row = row + 1 if clients.told[0].ended_how == "whole" else 0
    return row == 8


def _verdict(answer: Any, tokens: int) -> tuple[str, list[int] | None, str]:
    """How an answer with status 200 has ended, its ids if it is whole, and what is wrong with it."""
    with contextlib.suppress(KeyError, TypeError):
        reason = answer["meta_info"]["finish_reason"]
        kind = reason["type"] if isinstance(reason, dict) else reason
        if kind == "abort":
            code = reason.get("status_code") if isinstance(reason, dict) else None
            # A failure that came after the first piece of a stream has no other place.
            return ("failed" if code else "aborted"), None, str(reason)
        ids = answer["output_ids"]
        if len(ids) == tokens:
            return "whole", ids, ""
        return "failed", None, f"{len(ids)} of {tokens} tokens, finish_reason {reason}"
    return "failed", None, f"no answer in {str(answer)[:200]}"


def _said_of(answer: Any) -> tuple[str | None, int | None]:
    """Which worker an answer says that it is from, and how many tokens of the prompt decode held."""
    meta = answer["meta_info"]
    return meta.get("weight_version"), (meta.get("cached_tokens_details") or {}).get("decode_prefix")
