"""What decode asks of a prefill's bootstrap server before it can shake hands, asked in threads: a scheduler waits for
no peer.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def in_background(work: Callable[[], None], name: str) -> None:
    """Start ``work`` in a thread of its own."""
    threading.Thread(target=work, daemon=True, name=name).start()


class RankAnswers:
    """Which DP ranks of prefills have which rooms, asked in threads: one question to each prefill at a time."""

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._told: dict[str, dict[str, int]] = {}

    def ask(self, addr: str, rooms: list[int], question: Callable[[str, list[int]], dict[str, int]]) -> dict[str, int]:
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
            in_background(put, "ask-dp-ranks")
        known = [(room, told.pop(room)) for room in list(told)]
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

        in_background(run, "ask-prefill-ranks")


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

    def done(self, addr: str, dp_rank: int, attempt: Connection) -> None:
        """It has failed, or the ranks have been sent what they must know."""
        if self._attempts.get((addr, dp_rank)) is attempt:
            del self._attempts[addr, dp_rank]
