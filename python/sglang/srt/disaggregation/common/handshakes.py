"""Decode's queries to a bootstrap server before a handshake, in threads: a scheduler never waits.

Upstream: sgl-project/sglang#34865 (open), which asks in a thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# Seconds between two log lines that no thread starts: a scheduler may try in each step.
SAY_AGAIN_S = 10.0
_said_at = -math.inf


def in_background(work: Callable[[], None], name: str) -> str | None:
    """Start ``work`` in a thread. Returns the error, as clients can exhaust the system's limit."""
    try:
        threading.Thread(target=work, daemon=True, name=name).start()
    except RuntimeError as e:
        global _said_at
        if time.monotonic() - _said_at >= SAY_AGAIN_S:
            _said_at = time.monotonic()
            logger.error("Peers cannot be asked now: %s", e)
        return str(e)
    return None


class RankAnswers:
    """The prefill DP ranks of rooms, queried in threads: one query at a time for each prefill."""

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._told: dict[str, dict[str, int]] = {}

    def query(
        self, addr: str, rooms: list[int], question: Callable[[str, list[int]], dict[str, int]]
    ) -> dict[str, int]:
        """The known ranks of ``rooms``, by number in decimal digits; ``question`` queries the rest.

        rooms: all of this prefill with unknown rank. Answers about other rooms are removed.
        """
        ranks, wanted = self._told.setdefault(addr, {}), set(map(str, rooms))
        missing = [room for room in rooms if str(room) not in ranks]
        if missing and addr not in self._asking:

            def ask() -> None:
                try:
                    ranks.update(question(addr, missing))
                except Exception:
                    logger.exception(
                        "Prefill %s cannot say which of its DP ranks has which room", addr
                    )
                finally:
                    self._asking.discard(addr)

            self._asking.add(addr)
            if in_background(ask, "ask-dp-ranks") is not None:
                self._asking.discard(addr)
        # Read first: a query may be answered meanwhile.
        all_known = addr not in self._asking
        known = [(room, ranks.pop(room)) for room in list(ranks)]
        if all_known:
            self._told.pop(addr)
        return {room: rank for room, rank in known if room in wanted}


class Connection:
    """One query for the addresses of a prefill DP rank, shared by requests that arrive meanwhile.

    over: it succeeded, or failed for ``reason``. The scheduler then registers this worker's memory.
    """

    over = False
    reason: str | None = None

    def __init__(self, fetch: Callable[[], None]) -> None:
        """Query in a thread. fetch: queries, and raises if the answer cannot be used."""

        def run() -> None:
            try:
                fetch()
            except Exception as e:
                logger.exception("The ranks of a prefill cannot be learnt")
                self.reason = f"{type(e).__name__}: {e}"
            self.over = True

        error = in_background(run, "ask-prefill-ranks")
        if error is not None:
            self.reason, self.over = error, True


class Connections:
    """Queries in flight or not yet registered, by prefill and DP rank. Scheduler's thread only."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, int], Connection] = {}

    def get(self, addr: str, dp_rank: int) -> Connection | None:
        """The query to join."""
        return self._attempts.get((addr, dp_rank))

    def start(self, addr: str, dp_rank: int, fetch: Callable[[], None]) -> Connection:
        """Start a query."""
        attempt = self._attempts[addr, dp_rank] = Connection(fetch)
        return attempt

    def done(self, addr: str, dp_rank: int, attempt: Connection) -> None:
        """Remove a query that failed or whose ranks have been registered."""
        if self._attempts.get((addr, dp_rank)) is attempt:
            del self._attempts[addr, dp_rank]


def known_ranks(pool: Mapping[str, list[dict]], keys: Iterable[str]) -> list[list[dict]] | None:
    """The addresses of a prefill's ranks in the engine's table; None until all are known."""
    known = [pool.get(key) for key in keys]
    return None if None in known else [infos for infos in known if infos is not None]


def check_sizes(info: Any) -> None:
    """Raise ValueError if a size of a prefill's parallelism is below 1."""
    for name in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"):
        if getattr(info, name) < 1:
            raise ValueError(f"it says that its {name} is {getattr(info, name)}")


class NotConnected(Exception):
    """The addresses of a prefill's ranks are still being queried."""


class Handshake:
    """One request's handshake with a prefill's DP rank, made once it does not block.

    dp_rank: the rank still to connect to. connection: the query that the request waits for.
    """

    def __init__(self) -> None:
        self.dp_rank: int | None = None
        self.connection: Connection | None = None

    def due(self) -> int | None:
        """The DP rank with which the handshake can continue now."""
        return None if self.connection is not None and not self.connection.over else self.dp_rank

    def reach(
        self,
        connections: Connections,
        addr: str,
        dp_rank: int,
        known: Callable[[], list[list[dict]] | None],
        fetcher: Callable[[], Callable[[], None]],
    ) -> tuple[list[list[dict]], bool]:
        """The ranks' addresses, and whether this worker's memory must still be registered there.

        known: the addresses, if known. fetcher: makes the thread's job. Raises NotConnected during
        the query, and ConnectionError if it failed.
        """
        if self.connection is not None and self.connection.reason is not None:
            connections.done(addr, dp_rank, self.connection)
            raise ConnectionError(self.connection.reason)
        ranks = known()
        attempt = connections.get(addr, dp_rank)
        if attempt is not None and attempt.over and (attempt.reason is not None or ranks is None):
            # It failed, or its result has been removed.
            connections.done(addr, dp_rank, attempt)
            attempt = None
        if attempt is None:
            if ranks is not None:
                return ranks, False
            attempt = connections.start(addr, dp_rank, fetcher())
        self.connection = attempt
        if not attempt.over:
            raise NotConnected
        connections.done(addr, dp_rank, attempt)
        ranks = known()
        if attempt.reason is not None or ranks is None:
            raise ConnectionError(attempt.reason or "it was lost in the meantime")
        return ranks, True
