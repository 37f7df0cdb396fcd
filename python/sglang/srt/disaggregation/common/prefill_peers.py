"""What a decode worker knows of prefills: features, why one cannot be used, DP ranks of rooms.

Prefills are queried in threads: a scheduler waits for no peer.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged) on all prefills; in
threads #34865 (open).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import requests
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE, DECODE_PREFIX_VERSION
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

# Seconds of queries without a usable answer, as in the engine, and seconds between two queries.
UNANSWERED_S, ASK_AGAIN_S = 15, 0.4
# Requests name prefills: at most so many queries are kept, each for at least so many seconds. A
# prefill that a request waits for is queried again before that.
MOST_ASKED, FORGOTTEN_S = 1024, 60.0
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


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The features that a prefill reports.

    version: of the decode prefix, 0 for none. prompts: whether it compares digests of prompts.
    waiting_timeout: seconds for which it may write for a request. bootstrap_timeout: seconds for
    which it keeps a request that decode never mentions. Both are 0 if not reported. others: its
    whole answer without false values, for extras.
    """

    version: int = 0
    prompts: bool = False
    waiting_timeout: int = 0
    bootstrap_timeout: int = 0
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def takes_prefix(self) -> bool:
        """Whether it may be sent a prefix."""
        return self.version == DECODE_PREFIX_VERSION


UNKNOWN = Capabilities()


def check_cp_ranks(answer: Mapping[str, Any], options: Any) -> None:
    """Raise ValueError if other context-parallel ranks of prefill send than this worker expects."""
    theirs = answer.get("all_cp_ranks")
    ours = envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
    if theirs is not None and bool(theirs) != ours:
        # Unasked ranks would wait for ever, or this worker for ranks that send nothing.
        raise ValueError(
            f"of its context-parallel ranks, {'all send' if theirs else 'the first sends'} KV, and "
            f"this decode worker asks {'all' if ours else 'the first'}. Give both the same "
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
        )


#: Checks of an answer with this worker's options: raise ValueError for an incompatible prefill.
CHECKS: list[Callable[[Mapping[str, Any], Any], None]] = [check_cp_ranks]


def parse_capabilities(answer: Mapping[str, Any]) -> Capabilities:
    """Parse a prefill's answer. Raises KeyError, TypeError or ValueError if it is malformed."""
    version = int(answer["version"])
    if version != DECODE_PREFIX_VERSION:
        return Capabilities(version)

    def number(name: str) -> int:
        value = answer.get(name)
        return value if type(value) is int and value > 0 else 0

    timeouts = number("waiting_timeout"), number("bootstrap_timeout")
    others = {name: value for name, value in answer.items() if value}
    return Capabilities(version, number("prompts") > 1, *timeouts, others)


class NotTrusted(requests.RequestException):
    """A prefill does not accept this worker, or its answer cannot be verified."""


class PrefillPeers:
    """The prefills of a decode worker with a radix cache. manager: of its KV transfers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # By address, after a handshake. Never removed, 2 KB each: a lost prefill may still
        # write for requests that depend on this, and a prefill in use is not queried again.
        self.capabilities: dict[str, Capabilities] = {}
        # Queries in flight; when prefills were last queried, latest last, and found unusable, and
        # why.
        self._asking: set[str] = set()
        self._asked_at: OrderedDict[str, float] = OrderedDict()
        self._unusable: dict[str, tuple[float, str]] = {}

    def of(self, addr: str) -> Capabilities:
        """What is known of a prefill."""
        return self.capabilities.get(addr, UNKNOWN)

    def query(self, addr: str) -> None:
        """Query a prefill's features unless done recently. `why_unreached` reports the result."""
        now = time.monotonic()
        if addr not in self._asking and now - self._asked_at.get(addr, -math.inf) >= ASK_AGAIN_S:
            self._asked_at[addr] = now
            self._asked_at.move_to_end(addr)
            self._asking.add(addr)
            query = in_background(lambda: self._query(addr), "ask-prefill")
            query.add_done_callback(lambda _: self._asking.discard(addr))
            self._forget_oldest(now)

    def _forget_oldest(self, now: float) -> None:
        """Remove results of old queries, except of those in flight."""
        while len(self._asked_at) > MOST_ASKED:
            addr, at = next(iter(self._asked_at.items()))
            if addr in self._asking or now - at < FORGOTTEN_S:
                return
            for table in (self._asked_at, self._unusable):
                table.pop(addr, None)

    def _query(self, addr: str) -> None:
        """Make the engine's queries and ours, and record why the prefill cannot be used."""
        now = time.monotonic()
        known = addr in self.capabilities
        try:
            # First: requests go on once the engine's queries are answered.
            version = self.ask_for_prefix(addr)
            answered = version is not None and self._manager.query_prefill(addr)
            known = known or answered
            self._manager.asked_prefill(addr, answered)
            if answered and version == DECODE_PREFIX_VERSION:
                self._manager.met_prefill(addr)
            elif answered:
                logger.warning(
                    "Prefill %s does not understand a decode prefix (version %s, this worker has "
                    "%s): it will send whole prompts. Install sglang-pd-radix there to send only "
                    "what is missing.",
                    addr,
                    version or "none",
                    DECODE_PREFIX_VERSION,
                )
        except Exception as e:
            logger.exception("Prefill %s cannot be used", addr)
            # A client gets this as JSON, in which a lone surrogate would fail.
            self._unusable[addr] = (
                now,
                f"{type(e).__name__}: {e}".encode(errors="replace").decode(),
            )
        finally:
            if not known:
                # No request uses it. Any server may have answered 404.
                self.capabilities.pop(addr, None)

    def ask_for_prefix(self, addr: str) -> int | None:
        """The decode prefix version that a prefill understands, 0 for none; None without an answer.

        It is a separate route, so that the engine's protocol stays unchanged: a prefill without the
        patch answers 404 and gets no prefix. Raises NotTrusted if that prefill rejects this worker,
        and ValueError if it is incompatible.
        """
        try:
            reply = self._manager.requests.get(f"http://{addr}{DECODE_PREFIX_ROUTE}", timeout=5)
            if reply.status_code == 401:
                raise NotTrusted(reply.text)
            if reply.status_code == 503:
                logger.info("Prefill %s is starting: %s", addr, reply.text)
                return None
            if reply.status_code not in (200, 404):
                raise ValueError(f"status {reply.status_code}")
            answer = reply.json() if reply.status_code == 200 else {"version": 0}
            found = parse_capabilities(answer)
        except NotTrusted:
            raise
        except Exception as e:
            logger.error(
                "Could not ask prefill %s whether it understands a decode prefix: %s", addr, e
            )
            return None
        for check in CHECKS:
            check(answer, self._manager.server_args)
        self.capabilities[addr] = found
        return found.version

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Why a handshake that has been due since ``since`` must fail; None if it may go on."""
        now = time.monotonic()
        at, reason = self._unusable.get(addr, (0.0, ""))
        if at > since:
            return f"prefill {addr} cannot be used: {reason}"
        if addr not in self._manager.prefill_info_table and now - since > UNANSWERED_S:
            return f"prefill {addr} has not answered for {UNANSWERED_S} s"
        if now - since > envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get():
            return (
                f"timed out after {now - since:.0f} s, in which prefill {addr} has not known of it"
            )
        return None


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
