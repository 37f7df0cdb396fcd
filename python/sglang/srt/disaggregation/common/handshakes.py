"""Decode's queries to bootstrap servers, in threads: a scheduler waits for no peer.

Upstream: sgl-project/sglang#34865 (open), which asks in a thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

# Seconds between two log lines that no thread starts: a scheduler may try in each step.
SAY_AGAIN_S = 10.0
_said_at = -math.inf


def in_background(work: Callable[[], Any], name: str) -> Future[Any]:
    """Start ``work`` in a thread. It fails at once without one: clients can exhaust the limit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as e:
            logger.exception("%s", name)
            future.set_exception(e)

    try:
        threading.Thread(target=run, daemon=True, name=name).start()
    except RuntimeError as e:
        global _said_at
        if time.monotonic() - _said_at >= SAY_AGAIN_S:
            _said_at = time.monotonic()
            logger.error("Peers cannot be asked now: %s", e)
        future.set_exception(e)
    return future


class RankAnswers:
    """The prefill DP ranks of rooms, queried in threads: one query at a time for each prefill."""

    def __init__(self) -> None:
        self._queries: dict[str, Future[dict[str, int]]] = {}

    def query(
        self, addr: str, rooms: list[int], question: Callable[[str, list[int]], dict[str, int]]
    ) -> dict[str, int]:
        """The known ranks of ``rooms``, by number in decimal digits; ``question`` queries the rest.

        rooms: all of this prefill with unknown rank. Answers about other rooms are dropped.
        """
        query, ranks = self._queries.get(addr), {}
        if query is not None:
            if not query.done():
                return {}
            del self._queries[addr]
            ranks = {} if query.exception() else query.result()
        missing = [room for room in rooms if str(room) not in ranks]
        if missing:
            name = f"ask {addr} for DP ranks"
            self._queries[addr] = in_background(lambda: dict(question(addr, missing)), name)
        return {str(room): ranks[str(room)] for room in rooms if str(room) in ranks}
