"""Clients that keep prefill busy beside a chat: each sends one new prompt after another, from before the first turn to
the last answer. Their requests count in no figure of the chat's.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_pd_radix.tools.cluster import http

from .asked import Asked, RequestFailed
from .stats import percentile
from .workload import STEADY_ANSWER, Steady

# Head start, so that prefill is busy at the first turn.
AHEAD_S = 1.0
# Time-out of one request, far more than any needs.
TIMEOUT_S = 600.0
# Wait for requests in flight after another failure.
GRACE_S = 5.0


class SteadyClients:
    """The clients of ``steady`` (None: no clients), sending to ``url`` during the ``with`` block.

    ``check`` raises PdRadixError if a server has ended.
    """

    def __init__(self, steady: Steady | None, url: str, check: Callable[[], None]) -> None:
        self._steady, self._url, self._alive = steady, url, check
        self._ended = threading.Event()
        self._failed: list[str] = []
        self._taken = 0
        #: Their answered requests, in order of completion; first and last tokens have one time.
        self.asked: list[Asked] = []
        count = steady.clients if steady else 0
        self._threads = [threading.Thread(target=self._ask_on, args=(i,), daemon=True) for i in range(count)]

    def __enter__(self) -> SteadyClients:
        for thread in self._threads:
            thread.start()
        if self._threads:
            self._ended.wait(AHEAD_S)
        return self

    def __exit__(self, *_: object) -> None:
        """After a failure, errors of requests in flight are ignored."""
        self._ended.set()
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """Raise PdRadixError if a server has ended, RequestFailed if a request of these clients has failed."""
        self._alive()
        if self._failed:
            raise RequestFailed(f"a request of the steady clients failed: {self._failed[0]}")

    def stop(self) -> None:
        """Stop sending and wait for all answers. Raises as `check`."""
        self._ended.set()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)
                self.check()
        self.check()

    def fresh(self) -> list[Sequence[int]]:
        """Prompts of requests answered since the last call."""
        asked = self.asked[self._taken :]
        self._taken += len(asked)
        return [one.prompt for one in asked]

    def figures(self) -> dict[str, float]:
        """Number, rate and times of their answered requests; {} without clients."""
        if not self._threads:
            return {}
        ends = [one.start_s + one.latency_s for one in self.asked]
        took = max(ends) - min(one.start_s for one in self.asked)
        return {
            "steady_requests": len(self.asked),
            "steady_per_s": len(self.asked) / took,
            "steady_p50_s": percentile([one.latency_s for one in self.asked], 50),
        }

    def _ask_on(self, client: int) -> None:
        assert self._steady
        for number in itertools.count():
            if self._ended.is_set() or self._failed:
                return
            prompt = self._steady.prompt(client, number)
            began = time.perf_counter()
            wrong = self._ask(prompt)
            if wrong:
                self._failed.append(wrong)
                return
            took = time.perf_counter() - began
            self.asked.append(Asked(prompt, STEADY_ANSWER, "", began, took, took, []))

    def _ask(self, prompt: Sequence[int]) -> str:
        """Why there is no complete answer; "" if there is one."""
        parameters = {"temperature": 0, "max_new_tokens": STEADY_ANSWER, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters}
        status, content = http(self._url + "/generate", body, timeout=TIMEOUT_S)
        said = content.decode(errors="replace")
        if status != 200:
            return f"HTTP {status}: {said[:300]}" if status else said[:300]
        tokens = _tokens(said)
        return "" if tokens == STEADY_ANSWER else f"it got {tokens} tokens of {STEADY_ANSWER}: it was cut off"


def _tokens(text: str) -> Any:
    """The number of tokens that an answer reports."""
    try:
        return json.loads(text)["meta_info"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return 0
