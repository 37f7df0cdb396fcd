"""Clients that send one new prompt after another beside a chat, from before its first turn until its last answer.

They keep prefill busy all the time. What they ask counts in no figure of the chat's own requests.
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

# Prefill is to be busy when the first turn comes.
AHEAD_S = 1.0
# Of one request; far more than one that is not lost takes.
TIMEOUT_S = 600.0
# How long those that are under way are waited for after something else has failed.
GRACE_S = 5.0


class SteadyClients:
    """The clients of ``steady`` (None: there are none), which ask ``url`` while the ``with`` block runs.

    ``check`` raises PdRadixError when a server has ended.
    """

    def __init__(self, steady: Steady | None, url: str, check: Callable[[], None]) -> None:
        self._steady, self._url, self._alive = steady, url, check
        self._ended = threading.Event()
        self._failed: list[str] = []
        self._taken = 0
        #: Their requests that were answered, in the order of the ends. First tokens are not told apart from last ones.
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
        """Also after a failure, of which the requests under way are to say nothing more."""
        self._ended.set()
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """Raise PdRadixError if a server has ended, and RequestFailed if a request of these clients has failed."""
        self._alive()
        if self._failed:
            raise RequestFailed(f"a request of the steady clients failed: {self._failed[0]}")

    def stop(self) -> None:
        """Send nothing more, and wait until all that was sent is answered. Raises as `check`."""
        self._ended.set()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)
                self.check()
        self.check()

    def fresh(self) -> list[Sequence[int]]:
        """The prompts of the requests that were answered since this was called last."""
        asked = self.asked[self._taken :]
        self._taken += len(asked)
        return [one.prompt for one in asked]

    def figures(self) -> dict[str, float]:
        """How many of their requests were answered, also per second, and how long they took; {} without clients."""
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
        """Why there is no whole answer; "" if there is one."""
        parameters = {"temperature": 0, "max_new_tokens": STEADY_ANSWER, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters}
        status, content = http(self._url + "/generate", body, timeout=TIMEOUT_S)
        said = content.decode(errors="replace")
        if status != 200:
            return f"HTTP {status}: {said[:300]}" if status else said[:300]
        tokens = _tokens(said)
        return "" if tokens == STEADY_ANSWER else f"it got {tokens} tokens of {STEADY_ANSWER}: it was cut off"


def _tokens(text: str) -> Any:
    """How many tokens an answer says that it has."""
    try:
        return json.loads(text)["meta_info"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return 0
