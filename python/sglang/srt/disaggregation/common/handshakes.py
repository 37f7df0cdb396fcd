"""What decode asks of a prefill's bootstrap server before it can shake hands, asked in threads: a scheduler waits for
no peer.

Upstream: sgl-project/sglang#34865 (open), which asks in a thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang.srt.disaggregation.common.peer_liveness import is_address

logger = logging.getLogger(__name__)

# A scheduler asks in each step, thousands of times a second: seconds between two lines that say why it cannot.
SAY_AGAIN_S = 10.0
_said_at = -math.inf


def in_background(work: Callable[[], None], name: str) -> str | None:
    """Start ``work`` in a thread of its own. Returns why that cannot be done, if so.

    Requests name peers, and one of many may have as many threads as the system lets it: a scheduler goes on.
    """
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
    """Which DP ranks of prefills have which rooms, asked in threads: one question to each prefill at a time."""

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._told: dict[str, dict[str, int]] = {}

    def query(
        self, addr: str, rooms: list[int], question: Callable[[str, list[int]], dict[str, int]]
    ) -> dict[str, int]:
        """What is known of ``rooms``, by number in decimal digits; the rest is asked by ``question``.

        rooms: all of this prefill whose ranks are not known. What is known of others is forgotten.
        """
        told, wanted = self._told.setdefault(addr, {}), set(map(str, rooms))
        lacking = [room for room in rooms if str(room) not in told]
        if lacking and addr not in self._asking:

            def put() -> None:
                try:
                    told.update(question(addr, lacking))
                except Exception:
                    logger.exception("Prefill %s cannot say which of its DP ranks has which room", addr)
                finally:
                    self._asking.discard(addr)

            self._asking.add(addr)
            if in_background(put, "ask-dp-ranks") is not None:
                self._asking.discard(addr)
        # Looked at first: what is asked may be answered meanwhile.
        all_told = addr not in self._asking
        known = [(room, told.pop(room)) for room in list(told)]
        if all_told:
            self._told.pop(addr)
        return {room: rank for room, rank in known if room in wanted}


class Connection:
    """One attempt to learn where the ranks of a prefill's DP rank listen, for all requests that come meanwhile.

    over: it has succeeded, or failed for ``reason``. The scheduler then sends these ranks this worker's memory.
    """

    def __init__(self) -> None:
        self.over = False
        self.reason: str | None = None

    def make(self, fetch: Callable[[], None]) -> None:
        """Ask in a thread. fetch: asks, and raises if that is of no use."""

        def run() -> None:
            try:
                fetch()
            except Exception as e:
                logger.exception("The ranks of a prefill cannot be learnt")
                self.reason = f"{type(e).__name__}: {e}"
            self.over = True

        wrong = in_background(run, "ask-prefill-ranks")
        if wrong is not None:
            self.reason, self.over = wrong, True


class Connections:
    """The attempts that are under way or not registered yet, by prefill and DP rank. For one thread, the scheduler."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, int], Connection] = {}

    def get(self, addr: str, dp_rank: int) -> Connection | None:
        """The attempt to join."""
        return self._attempts.get((addr, dp_rank))

    def start(self, addr: str, dp_rank: int, fetch: Callable[[], None]) -> Connection:
        """Begin one."""
        attempt = self._attempts[addr, dp_rank] = Connection()
        attempt.make(fetch)
        return attempt

    def join(
        self, addr: str, dp_rank: int, is_known: bool, fetcher: Callable[[], Callable[[], None]]
    ) -> Connection | None:
        """The attempt to wait for, begun if need be; None where the ranks are known, and know this worker's memory.

        is_known: whether it is known where they listen. fetcher: makes what a thread does to learn it.
        """
        attempt = self.get(addr, dp_rank)
        if attempt is not None and attempt.over and (attempt.reason is not None or not is_known):
            # It is of no use any more.
            self.done(addr, dp_rank, attempt)
            attempt = None
        if attempt is None and not is_known:
            attempt = self.start(addr, dp_rank, fetcher())
        return attempt

    def done(self, addr: str, dp_rank: int, attempt: Connection) -> None:
        """It has failed, or the ranks have been sent what they must know."""
        if self._attempts.get((addr, dp_rank)) is attempt:
            del self._attempts[addr, dp_rank]


def known_ranks(pool: Mapping[str, list[dict]], keys: Iterable[str]) -> list[list[dict]] | None:
    """Where the ranks of a prefill listen, as the engine keeps it by these keys; None while that is not known."""
    known = [pool.get(key) for key in keys]
    return None if None in known else [infos for infos in known if infos is not None]


def forget_heartbeats(manager: Any, addr: str) -> None:
    """Of a prefill that is gone: the connection over which the engine's heartbeat asks it, and what came of that."""
    with manager.session_pool_lock:
        session = manager.session_pool.pop(addr, None)
    if session is not None:
        session.close()
    manager.heartbeat_failures.pop(addr, None)


def check_rank(addr: str, info: Any) -> None:
    """Raise ConnectionError for what the bootstrap server at ``addr`` says of a rank, if nobody can listen there.

    For a name ZeroMQ's thread, which answers for this worker's life, would wait for DNS. The engine gives none.
    """
    host, port = (info.get("rank_ip"), info.get("rank_port")) if isinstance(info, dict) else (None, None)
    if not (isinstance(host, str) and is_address(host) and type(port) is int and 0 < port < 65536):
        raise ConnectionError(f"prefill {addr} does not say where a rank listens: {str(info)[:200]!a}")


def check_sizes(info: Any) -> None:
    """Raise ValueError for what a prefill says of its parallelism, if it has no ranks by that."""
    for name in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"):
        if getattr(info, name) < 1:
            raise ValueError(f"it says that its {name} is {getattr(info, name)}")


class NotConnected(Exception):
    """Where the ranks of a prefill listen is being asked."""


class Handshake:
    """One request's handshake with the ranks of a prefill's DP rank, made when it takes no waiting.

    dp_rank: with which it is still to be made. connection: the attempt to reach that which is waited for.
    """

    def __init__(self) -> None:
        self.dp_rank: int | None = None
        self.connection: Connection | None = None

    def due(self) -> int | None:
        """The DP rank with which it can go on now."""
        return None if self.connection is not None and not self.connection.over else self.dp_rank

    def reach(
        self,
        connections: Connections,
        addr: str,
        dp_rank: int,
        known: Callable[[], list[list[dict]] | None],
        fetcher: Callable[[], Callable[[], None]],
    ) -> tuple[list[list[dict]], bool]:
        """Where the ranks listen, and whether they have still to be told of this worker's memory.

        known: what is known of that. fetcher: makes what a thread does to learn it. Raises NotConnected while that is
        under way, and ConnectionError where it was of no use.
        """
        if self.connection is not None and self.connection.reason is not None:
            connections.done(addr, dp_rank, self.connection)
            raise ConnectionError(self.connection.reason)
        ranks = known()
        attempt = connections.join(addr, dp_rank, ranks is not None, fetcher)
        if attempt is None:
            return ranks or [], False
        self.connection = attempt
        if not attempt.over:
            raise NotConnected
        connections.done(addr, dp_rank, attempt)
        ranks = known()
        if attempt.reason is not None or ranks is None:
            raise ConnectionError(attempt.reason or "it was lost in the meantime")
        return ranks, True
