"""What a decode worker knows of prefills: their features, and why a prefill cannot be used.

Prefills are queried in threads: a scheduler waits for no peer.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged) on all prefills.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import requests
from sglang.srt.disaggregation.common.handshakes import in_background
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_ROUTE, DECODE_PREFIX_VERSION
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

# Seconds of queries without a usable answer, as in the engine, and seconds between two queries.
UNANSWERED_S, ASK_AGAIN_S = 15, 0.4
# Requests name prefills: at most so many queries are kept, each for at least so many seconds. A
# prefill that a request waits for is queried again before that.
MOST_ASKED, FORGOTTEN_S = 1024, 60.0


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The features that a prefill reports.

    version: of the decode prefix, 0 for none. prompts: whether it compares digests of prompts.
    waiting_timeout: seconds for which it may write for a request. bootstrap_timeout: seconds for
    which it keeps a request that decode never mentions. Both are 0 if not reported. all_cp_ranks:
    whether all its context-parallel ranks send; None without any or if not reported. others: see
    `listen_for`.
    """

    version: int = 0
    prompts: bool = False
    waiting_timeout: int = 0
    bootstrap_timeout: int = 0
    all_cp_ranks: bool | None = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def takes_prefix(self) -> bool:
        """Whether it may be sent a prefix."""
        return self.version == DECODE_PREFIX_VERSION


UNKNOWN = Capabilities()
_others: set[str] = set()
_checks: list[Callable[[Mapping[str, Any], Any], None]] = []


def listen_for(name: str) -> None:
    """For extras: have `Capabilities.others` keep a prefill's answer for ``name`` unless false."""
    _others.add(name)


def check_with(check: Callable[[Mapping[str, Any], Any], None]) -> None:
    """For extras: ``check(answer, options)`` raises ValueError for an incompatible prefill."""
    _checks.append(check)


def parse_capabilities(answer: Mapping[str, Any]) -> Capabilities:
    """Parse a prefill's answer. Raises KeyError, TypeError or ValueError if it is malformed."""
    version = int(answer["version"])
    takes = version == DECODE_PREFIX_VERSION

    def can(name: str) -> bool:
        return takes and bool(answer.get(name))

    def number(name: str) -> int:
        value = answer.get(name) if takes else 0
        return value if type(value) is int and value > 0 else 0

    timeouts = number("waiting_timeout"), number("bootstrap_timeout")
    # Independent of the version, which is 0 if all ranks send.
    all_cp_ranks = None if answer.get("all_cp_ranks") is None else bool(answer["all_cp_ranks"])
    prompts, others = number("prompts") > 1, {name: answer[name] for name in _others if can(name)}
    return Capabilities(version, prompts, *timeouts, all_cp_ranks, others)


def check_cp_ranks(theirs: Capabilities) -> None:
    """Raise ValueError if other context-parallel ranks of prefill send than this worker expects."""
    ours = envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
    if theirs.all_cp_ranks is not None and theirs.all_cp_ranks != ours:
        # Unasked ranks would wait for ever, or this worker for ranks that send nothing.
        raise ValueError(
            "of its context-parallel ranks, "
            f"{'all send' if theirs.all_cp_ranks else 'the first sends'} KV, and this decode "
            f"worker asks {'all' if ours else 'the first'}. Give both the same "
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
        )


def check_tp_sizes(theirs: int, ours: int, what: str | None) -> None:
    """Raise ValueError if ``what`` would have to be sliced for a prefill of another TP size."""
    if what is not None:
        raise ValueError(
            f"it has TP size {theirs} and this decode worker {ours}; the {what} of this "
            "model cannot be cut. Start both with the same --tp-size."
        )


class NotTrusted(requests.RequestException):
    """A prefill does not accept this worker, or its answer cannot be verified."""


class PrefillPeers:
    """The prefills of a decode worker with a radix cache.

    server_args: this worker's. met: called after each handshake with a prefill that takes a prefix.
    shake: makes the engine's queries, returns whether they were answered. get: makes our query.
    asked: called after each query of a prefill, with whether it was answered.
    """

    def __init__(
        self,
        server_args: Callable[[], Any],
        met: Callable[[str], object],
        shake: Callable[[str], bool],
        get: Callable[..., requests.Response] = requests.get,
        asked: Callable[[str, bool], object] = lambda addr, answered: None,
    ) -> None:
        self._args, self._met, self._shake = server_args, met, shake
        self._get, self._asked = get, asked
        # By address, after a handshake. Never removed, 300 bytes each: a lost prefill may still
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
            answered = version is not None and self._shake(addr)
            known = known or answered
            self._asked(addr, answered)
            if version is not None and answered:
                self._warn(addr, version)
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

    def _warn(self, addr: str, version: int) -> None:
        if version != DECODE_PREFIX_VERSION:
            logger.warning(
                "Prefill %s does not understand a decode prefix (version %s, this worker has %s): "
                "it will send whole prompts. Install sglang-pd-radix there to send only what is "
                "missing.",
                addr,
                version or "none",
                DECODE_PREFIX_VERSION,
            )
            return
        self._met(addr)

    def ask_for_prefix(self, addr: str) -> int | None:
        """The decode prefix version that a prefill understands, 0 for none; None without an answer.

        It is a separate route, so that the engine's protocol stays unchanged: a prefill without the
        patch answers 404 and gets no prefix. Raises NotTrusted if that prefill rejects this worker,
        and ValueError if it is incompatible.
        """
        try:
            reply = self._get(f"http://{addr}{DECODE_PREFIX_ROUTE}", timeout=5)
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
        check_cp_ranks(found)
        for check in _checks:
            check(answer, self._args())
        self.capabilities[addr] = found
        return found.version

    def why_unreached(
        self, addr: str, since: float, is_known: bool, timeout_s: float
    ) -> str | None:
        """Why a handshake that has been due since ``since`` must fail; None if it may go on.

        is_known: whether that prefill has answered. timeout_s: longest wait for a handshake.
        """
        now = time.monotonic()
        at, reason = self._unusable.get(addr, (0.0, ""))
        if at > since:
            return f"prefill {addr} cannot be used: {reason}"
        if not is_known and now - since > UNANSWERED_S:
            return f"prefill {addr} has not answered for {UNANSWERED_S} s"
        if now - since > timeout_s:
            return (
                f"timed out after {now - since:.0f} s, in which prefill {addr} has not known of it"
            )
        return None
